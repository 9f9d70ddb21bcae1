"""`ff plan model`: what a model needs, from its config.json."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from fireflyer.cli.completion import complete_file
from fireflyer.cli.numbers import PositiveNumber, WholeNumber

if TYPE_CHECKING:
    from fireflyer.planning import ExpertLimits, ModelAnswer, ModelUse

__all__ = ["model_command"]


@click.command(
    "model",
    short_help="Parameters, FLOPs, KV cache and decoding limits of a model.",
    epilog="""\b
Examples:
  ff plan model config.json
  ff plan model config.json --sequence 32768 --bandwidth 3350 --network 50
  ff plan model config.json --bandwidth 3350 --gpu-tflops 400 --answer 1000  # prefill and decoding apart""",
)
@click.argument("config", metavar="CONFIG", shell_complete=complete_file)
@click.option("--sequence", metavar="TOKENS", type=WholeNumber(min=1, max=1 << 24), default=4096, show_default=True,
              help="Tokens of a sequence.")  # fmt: skip
@click.option("--bandwidth", metavar="GB/S", type=PositiveNumber(), default=1555.0,
              show_default=True, help="Of the memory from which tokens are decoded.")  # fmt: skip
@click.option("--tokens", metavar="N", type=WholeNumber(min=1, max=1 << 16), default=32, show_default=True,
              help="Of a micro-batch of a device, with experts on many devices.")  # fmt: skip
@click.option("--network", metavar="GB/S", type=PositiveNumber(), default=50.0,
              show_default=True, help="Of a device, over which tokens go to experts.")  # fmt: skip
@click.option("--nvlink", metavar="GB/S", type=PositiveNumber(), default=160.0,
              show_default=True, help="Of a device, over which tokens are forwarded inside a node.")  # fmt: skip
@click.option("--nodes-per-token", metavar="M", type=WholeNumber(min=1, max=1 << 16),
              help="Most nodes to which a token is sent; default: as the model's routing is limited.")  # fmt: skip
@click.option("--gpu-tflops", metavar="TFLOPS", type=PositiveNumber(),
              help="That a GPU delivers: also print how to divide GPUs into prefill and decoding.")  # fmt: skip
@click.option("--answer", metavar="TOKENS", type=WholeNumber(min=1, max=1 << 24), default=1000, show_default=True,
              help="Of an answer to a prompt of --sequence tokens.")  # fmt: skip
@click.option("--lent-sms", metavar="N", type=WholeNumber(min=0, max=131), default=0, show_default=True,
              help="Of 132 SMs, those that move messages during prefill, and do not compute.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def model_command(
    *,
    config: str,
    sequence: int,
    bandwidth: float,
    tokens: int,
    network: float,
    nvlink: float,
    nodes_per_token: int | None,
    gpu_tflops: float | None,
    answer: int,
    lent_sms: int,
    as_json: bool,
) -> int:
    """Print what the model of the Hugging Face CONFIG needs: parameters, FLOPs of a token by both conventions, KV
    cache by format, bytes of its weights and of its training state, and what limits decoding: memory, the exchange of
    experts, speculation. These are upper limits: what a device does beside reading and sending is left out."""
    import msgspec

    from fireflyer.cli.model_config import read_shape
    from fireflyer.planning import ModelUse, plan_model

    shape = read_shape(config)
    use = ModelUse(
        sequence_tokens=sequence,
        memory_bytes_per_s=bandwidth * 1e9,
        batch_tokens=tokens,
        network_bytes_per_s=network * 1e9,
        inside_bytes_per_s=nvlink * 1e9,
        nodes_per_token=nodes_per_token,
        gpu_flops=None if gpu_tflops is None else gpu_tflops * 1e12,
        answer_tokens=answer,
        lent_sms=lent_sms,
    )
    needed = plan_model(shape, use)
    shown = _size(needed, use) | _memory(needed, use)
    if needed.experts is not None:
        shown |= _experts(needed.experts, use)
    shown |= _service(needed, use)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(shown), indent=2))
    else:
        for what, value in shown.items():
            click.echo(f"{what}: {_words(value)}")
    return 0


def _words(value: Any) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def _size(needed: ModelAnswer, use: ModelUse) -> dict[str, Any]:
    cache = f"KV cache bytes of {use.sequence_tokens} tokens"
    return {
        "parameters": needed.parameters.total,
        "parameters that a token uses": needed.parameters.active,
        "training FLOPs of a token, causal": needed.causal_flops,
        "training FLOPs of a token, non-causal": needed.whole_flops,
        "training FLOPs of a token, 6 (12 L h^2 + V h)": needed.dense_flops,
        "KV cache bytes of a token": needed.kv_token_bytes,
        cache: needed.kv_sequence_bytes,
        **{f"{cache}, {name} with scales": size for name, size in needed.kv_quantised_bytes.items()},
        **{f"bytes of weights, {name}": size for name, size in needed.weight_bytes.items()},
        **{f"bytes of training state: {name}": size for name, size in needed.training_bytes.items()},
        "bytes of a checkpoint: bf16 weights, fp32 master and two moments": needed.checkpoint_bytes,
    }


def _memory(needed: ModelAnswer, use: ModelUse) -> dict[str, Any]:
    memory = f"{use.memory_bytes_per_s / 1e9:g} GB/s"
    shown: dict[str, Any] = {
        f"most tokens per second of one request at {memory}, {name}": rate
        for name, rate in needed.request_tokens_per_s.items()
    }
    for name, rate in needed.machine_tokens_per_s.items():
        what = f"most tokens per second on one {name}, 4 bits"
        shown[what] = "does not fit into its memory" if rate is None else rate
    return shown


def _experts(limits: ExpertLimits, use: ModelUse) -> dict[str, Any]:
    network, memory = f"{use.network_bytes_per_s / 1e9:g} GB/s", f"{use.memory_bytes_per_s / 1e9:g} GB/s"
    two = "most tokens per second of a request, two overlapped micro-batches, limited by"
    exchange = f"microseconds of an exchange of {use.batch_tokens} tokens at {network}, fp8 there, bf16 back"
    helped = (
        "microseconds of it while another micro-batch is in the opposite phase, with multicast and aggregation in the "
        "network"
    )
    shown: dict[str, Any] = {
        exchange: limits.exchange_s * 1e6,
        helped: limits.helped_exchange_s * 1e6,
        f"microseconds of a layer's reads at {memory}, one expert a device, fp8": limits.read_s * 1e6,
        f"{two} the exchange": limits.exchange_tokens_per_s,
        f"{two} exchange and memory": limits.tokens_per_s,
        "most tokens per second of a request, micro-batches not overlapped": limits.serial_tokens_per_s,
        **{f"bytes of a token on the wire, {name}": size for name, size in limits.wire_bytes.items()},
    }
    dispatch = {
        "sent to each device": limits.dispatch_s,
        f"sent to {limits.nodes_per_token} nodes, forwarded at {use.inside_bytes_per_s / 1e9:g} GB/s": (
            limits.node_dispatch_s
        ),
    }
    for where, seconds in dispatch.items():
        if seconds is not None:
            shown[f"microseconds to dispatch one token, {where}"] = seconds * 1e6
    return shown


def _service(needed: ModelAnswer, use: ModelUse) -> dict[str, Any]:
    shown: dict[str, Any] = {
        f"times as many tokens per second with predictions of which {one.acceptance:.0%} are accepted": one.gain
        for one in needed.speculation
    }
    service = needed.service
    if service is None:
        return shown
    if use.lent_sms:
        shown["share of SMs that compute during prefill"] = service.compute_share
    return shown | {
        "prompt tokens per second of a GPU": service.prefill_tokens_per_s,
        "answer tokens per second of a GPU": service.decode_tokens_per_s,
        "share of GPUs for prefill": service.split.prefill_share,
        "KV cache bytes per second that a GPU of prefill sends on": service.split.cache_bytes_per_s,
    }

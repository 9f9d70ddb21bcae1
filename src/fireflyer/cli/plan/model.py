"""`ff plan model`: what a model needs, from its config.json."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from fireflyer.cli.completion import complete_file
from fireflyer.cli.numbers import PositiveNumber, WholeNumber

if TYPE_CHECKING:
    from fireflyer.codesign.model import ModelShape

__all__ = ["model_command"]

TRAINING_BYTES: Final = {
    "bf16 weights and gradients, fp32 master and two moments": 16,
    "bf16 weights, fp32 moments": 10,
}
CHECKPOINT_BYTES: Final = 14
"""Of a parameter: bf16 weights, fp32 master weights and two moments."""
LOCAL_BYTES: Final = 0.5
"""Of a parameter on the computer of one user: 4 bits."""
INSIDE_BYTES_PER_S: Final = 160e9
"""NVLink of an H800, as DeepSeek-V3 paper, 4.3, has it in practice."""
ACCEPTANCE: Final = (0.8, 0.9)
SMS: Final = 132
"""Of an H100 or H800."""


class _Given(NamedTuple):
    """Options. Rates are bytes and FLOPs per second."""

    sequence: int
    memory: float
    tokens: int
    network: float
    gpu: float | None
    answer: int
    lent_sms: int


@click.command(
    "model",
    short_help="Parameters, FLOPs, KV cache and decoding limits of a model.",
    epilog="""\b
Examples:
  ff plan model config.json
  ff plan model config.json --sequence 32768 --bandwidth 3350 --network 50
  ff plan model config.json --bandwidth 3350 --gpu-tflops 400 --answer 1000     # prefill and decoding apart""",
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
@click.option("--gpu-tflops", metavar="TFLOPS", type=PositiveNumber(),
              help="That a GPU delivers: also print how to divide GPUs into prefill and decoding.")  # fmt: skip
@click.option("--answer", metavar="TOKENS", type=WholeNumber(min=1, max=1 << 24), default=1000, show_default=True,
              help="Of an answer to a prompt of --sequence tokens.")  # fmt: skip
@click.option("--lent-sms", metavar="N", type=WholeNumber(min=0, max=SMS - 1), default=0, show_default=True,
              help=f"Of {SMS} SMs, those that move messages during prefill, and do not compute.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def model_command(
    *,
    config: str,
    sequence: int,
    bandwidth: float,
    tokens: int,
    network: float,
    gpu_tflops: float | None,
    answer: int,
    lent_sms: int,
    as_json: bool,
) -> int:
    """Print what the model of the Hugging Face CONFIG needs: parameters, FLOPs of a token by both conventions, KV
    cache by format, bytes of its weights and of its training state, and what limits decoding: memory, the exchange of
    experts, speculation. These are upper limits: what a device does beside reading and sending is left out."""
    from fireflyer.cli.model_config import read_shape

    shape = read_shape(config)
    gpu = None if gpu_tflops is None else gpu_tflops * 1e12
    given = _Given(sequence, bandwidth * 1e9, tokens, network * 1e9, gpu, answer, lent_sms)
    shown = _needs(shape, given) | _memory(shape, given) | _experts(shape, given) | _service(shape, given)
    if as_json:
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode(shown), indent=2))
    else:
        for what, value in shown.items():
            click.echo(f"{what}: {_words(value)}")
    return 0


def _words(value: Any) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def _needs(shape: ModelShape, given: _Given) -> dict[str, Any]:
    from fireflyer.codesign.decoding import CACHE_FORMATS, cache_bytes
    from fireflyer.codesign.model import (
        count_parameters,
        dense_flops,
        kv_bytes_per_sequence,
        kv_bytes_per_token,
        training_flops,
    )

    count, sequence = count_parameters(shape), given.sequence
    shown: dict[str, Any] = {
        "parameters": count.total,
        "parameters that a token uses": count.active,
        "training FLOPs of a token, causal": training_flops(shape, sequence),
        "training FLOPs of a token, non-causal": training_flops(shape, sequence, causal=False),
        "training FLOPs of a token, 6 (12 L h^2 + V h)": dense_flops(shape),
        "KV cache bytes of a token": kv_bytes_per_token(shape),
        f"KV cache bytes of {sequence} tokens": kv_bytes_per_sequence(shape, sequence),
    }
    for name, form in CACHE_FORMATS.items():
        if name != "bf16":
            shown[f"KV cache bytes of {sequence} tokens, {name} with scales"] = cache_bytes(shape, sequence, form)
    shown |= {"bytes of weights, bf16": 2 * count.total, "bytes of weights, fp8": count.total}
    shown["bytes of weights, 4 bits without scales"] = count.total / 2
    shown |= {f"bytes of training state: {name}": size * count.total for name, size in TRAINING_BYTES.items()}
    return shown | {"bytes of a checkpoint: bf16 weights, fp32 master and two moments": CHECKPOINT_BYTES * count.total}


def _memory(shape: ModelShape, given: _Given) -> dict[str, Any]:
    from fireflyer.codesign.decoding import MACHINES, decode_reads, machine_seconds

    shown: dict[str, Any] = {}
    for name, size in (("bf16", 2), ("fp8", 1)):
        reads = decode_reads(shape, 1, given.sequence, weight_bytes=size)
        what = f"most tokens per second of one request at {given.memory / 1e9:g} GB/s, {name}"
        shown[what] = given.memory / reads.total
    for machine in MACHINES:
        seconds = machine_seconds(machine, shape, given.sequence, weight_bytes=LOCAL_BYTES)
        what = f"most tokens per second on one {machine.name}, 4 bits"
        shown[what] = "does not fit into its memory" if seconds is None else 1 / seconds
    return shown


def _experts(shape: ModelShape, given: _Given) -> dict[str, Any]:
    """Of a model with experts, each of which has a device of its own."""
    if shape.experts is None:
        return {}
    from fireflyer.codesign.decoding import exchange_bytes, node_limited_dispatch, token_seconds

    experts, gigabytes = shape.experts, f"{given.network / 1e9:g} GB/s"
    exchange_s, reading_s = _layer_seconds(shape, given)
    helped = exchange_bytes(shape.hidden, _copies(shape), multicast=True, aggregation=True)
    shown: dict[str, Any] = {
        f"microseconds of an exchange of {given.tokens} tokens at {gigabytes}, fp8 there, bf16 back": exchange_s * 1e6,
        "microseconds of it while another micro-batch is in the opposite phase, with multicast and aggregation in the "
        "network": helped.seconds(given.tokens, given.network, at_once=True) * 1e6,
        f"microseconds of a layer's reads at {given.memory / 1e9:g} GB/s, one expert a device, fp8": reading_s * 1e6,
        "most tokens per second of a request, two overlapped micro-batches, limited by the exchange": 1
        / token_seconds(shape.layers, exchange_s),
        "most tokens per second of a request, two overlapped micro-batches, limited by exchange and memory": 1
        / token_seconds(shape.layers, exchange_s, reading_s),
        "most tokens per second of a request, micro-batches not overlapped": 1
        / token_seconds(shape.layers, exchange_s, reading_s, overlapped=False),
    }
    shown |= _wire_bytes(shape)
    if experts.groups > 1:
        for nodes in (None, experts.groups_per_token):
            one = node_limited_dispatch(
                experts.per_token, nodes, shape.hidden, network_bytes_per_s=given.network,
                inside_bytes_per_s=INSIDE_BYTES_PER_S,
            )  # fmt: skip
            where = "sent to each device" if nodes is None else f"sent to {nodes} nodes, forwarded at 160 GB/s"
            shown[f"microseconds to dispatch one token, {where}"] = one.longest * 1e6
    return shown


def _wire_bytes(shape: ModelShape) -> dict[str, Any]:
    """Of a token, as the codecs of dispatch and combine send it; those of tiles take multiples of 128 values."""
    from fireflyer.collectives.tokens import TOKEN_CODECS, TileCodec, token_codec

    codecs = [token_codec(name) for name in sorted(TOKEN_CODECS) if name not in ("f32", "f64")]
    return {
        f"bytes of a token on the wire, {codec.name}": codec.row_bytes(shape.hidden)
        for codec in codecs
        if not isinstance(codec, TileCodec) or shape.hidden % codec.unit == 0
    }


def _service(shape: ModelShape, given: _Given) -> dict[str, Any]:
    from fireflyer.codesign.decoding import CACHE_FORMATS, compute_share, prefill_rate, speculation_gain, split_gpus

    shown: dict[str, Any] = {}
    if shape.mtp_layers:
        for acceptance in ACCEPTANCE:
            gain = speculation_gain(acceptance, shape.mtp_layers, module_cost=1 / shape.layers)
            shown[f"times as many tokens per second with predictions of which {acceptance:.0%} are accepted"] = gain
    if given.gpu is not None:
        gpu = given.gpu * compute_share(SMS, given.lent_sms)
        prefill_per_s, decode_per_s = prefill_rate(shape, given.sequence, gpu), _decode_rate(shape, given)
        split = split_gpus(
            shape,
            given.sequence,
            given.answer,
            prefill_per_s=prefill_per_s,
            decode_per_s=decode_per_s,
            cache=CACHE_FORMATS["bf16"],
        )
        if given.lent_sms:
            shown["share of SMs that compute during prefill"] = compute_share(SMS, given.lent_sms)
        shown |= {
            "prompt tokens per second of a GPU": prefill_per_s,
            "answer tokens per second of a GPU": decode_per_s,
            "share of GPUs for prefill": split.prefill_share,
            "KV cache bytes per second that a GPU of prefill sends on": split.cache_bytes_per_s,
        }
    return shown


def _decode_rate(shape: ModelShape, given: _Given) -> float:
    """Tokens per second of a device: of two micro-batches where experts are on many devices, of one batch else."""
    from fireflyer.codesign.decoding import decode_reads, token_seconds

    if shape.experts is None:
        return given.tokens * given.memory / decode_reads(shape, given.tokens, given.sequence, weight_bytes=1).total
    return 2 * given.tokens / token_seconds(shape.layers, *_layer_seconds(shape, given))


def _layer_seconds(shape: ModelShape, given: _Given) -> tuple[float, float]:
    """Of a micro-batch: of the exchange, and of reading."""
    from fireflyer.codesign.decoding import device_layer_seconds, exchange_bytes

    exchange = exchange_bytes(shape.hidden, _copies(shape)).seconds(given.tokens, given.network)
    return exchange, device_layer_seconds(shape, given.tokens, given.sequence, given.memory)


def _copies(shape: ModelShape) -> int:
    """Devices that a token goes to: of its routed experts and of the shared one."""
    return 0 if shape.experts is None else shape.experts.per_token + bool(shape.experts.shared_feed_forward)

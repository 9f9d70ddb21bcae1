"""`ff plan model`: what a model needs, from its config.json."""

from __future__ import annotations

from typing import Any, Final

import click

from fireflyer.cli.completion import complete_file
from fireflyer.cli.numbers import WholeNumber

__all__ = ["model_command"]

TRAINING_BYTES: Final = {
    "bf16 weights and gradients, fp32 master and two moments": 16,
    "bf16 weights, fp32 moments": 10,
}


@click.command(
    "model",
    short_help="Parameters, FLOPs, KV cache and bytes of a model.",
    epilog="""\b
Examples:
  ff plan model config.json
  ff plan model config.json --sequence 32768 --bandwidth 3350""",
)
@click.argument("config", metavar="CONFIG", shell_complete=complete_file)
@click.option("--sequence", metavar="TOKENS", type=WholeNumber(min=1, max=1 << 24), default=4096, show_default=True,
              help="Tokens of a sequence.")  # fmt: skip
@click.option("--bandwidth", metavar="GB/S", type=click.FloatRange(min=0.0, min_open=True), default=1555.0,
              show_default=True, help="Of the memory from which a single token is decoded.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def model_command(*, config: str, sequence: int, bandwidth: float, as_json: bool) -> int:
    """Print what the model of the Hugging Face CONFIG needs: parameters, FLOPs of a token by both conventions, KV
    cache, bytes of its weights by format and of its training state, and the most tokens per second that one request
    can get from memory of a bandwidth."""
    from fireflyer.cli.model_config import read_shape
    from fireflyer.codesign.model import (
        count_parameters,
        dense_flops,
        kv_bytes_per_sequence,
        kv_bytes_per_token,
        training_flops,
    )

    shape = read_shape(config)
    count = count_parameters(shape)
    cache = kv_bytes_per_sequence(shape, sequence)
    shown: dict[str, Any] = {
        "parameters": count.total,
        "parameters that a token uses": count.active,
        "training FLOPs of a token, causal": training_flops(shape, sequence),
        "training FLOPs of a token, non-causal": training_flops(shape, sequence, causal=False),
        "training FLOPs of a token, 6 (12 L h^2 + V h)": dense_flops(shape),
        "KV cache bytes of a token": kv_bytes_per_token(shape),
        f"KV cache bytes of {sequence} tokens": cache,
        "bytes of weights, bf16": 2 * count.total,
        "bytes of weights, fp8": count.total,
    }
    shown |= {f"bytes of training state: {name}": size * count.total for name, size in TRAINING_BYTES.items()}
    for name, size in (("bf16", 2), ("fp8", 1)):
        read = size * count.active + cache
        shown[f"most tokens per second of one request at {bandwidth:g} GB/s, {name}"] = bandwidth * 1e9 / read
    if as_json:
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode(shown), indent=2))
    else:
        for what, value in shown.items():
            click.echo(f"{what}: {value:,.0f}" if value >= 100 else f"{what}: {value:.1f}")
    return 0

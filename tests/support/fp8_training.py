"""A small GPT trained on real text with and without FP8 products, for comparisons of the held-out loss."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from fireflyer.recipes.gpt import GPTConfig, GPTModel
from fireflyer.training.fp8 import Fp8Config, convert

__all__ = ["held_out_loss"]

LENGTH: Final = 64
BATCH: Final = 2
LEARNING_RATE: Final = 2e-3
HELD_OUT: Final = 16
OUTLIER_TOKENS: Final = 128
OUTLIERS: Final = 1e6
SOURCES: Final = ("argparse.py", "ast.py", "decimal.py", "_pydecimal.py", "inspect.py", "tarfile.py", "typing.py")


def held_out_loss(config: Fp8Config | None, *, steps: int, seed: int = 0, outliers: bool = False) -> float:
    """Nats per byte after training on sources of the standard library, in bfloat16, or FP8 where `config` is given.

    `outliers`: each linear layer also gets tokens of magnitude 1e6, whose results are dropped.
    """
    model = GPTModel(GPTConfig(vocab_size=256, context=LENGTH, seed=seed))
    if config is not None:
        convert(model, config=config)
    if outliers:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                _plant_outliers(module)
    trained, held_out = _text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    chosen = torch.Generator().manual_seed(seed)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 20)
        begins = torch.randint(len(trained) - LENGTH - 1, (BATCH,), generator=chosen)
        optimizer.zero_grad()
        torch.autograd.backward(_loss(model, trained, begins))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with torch.no_grad():
        begins = torch.linspace(0, len(held_out) - LENGTH - 2, HELD_OUT).long()
        return float(_loss(model, held_out, begins))


def _loss(model: nn.Module, text: Tensor, begins: Tensor) -> Tensor:
    windows = text[begins[:, None] + torch.arange(LENGTH + 1)]
    with torch.autocast("cpu", torch.bfloat16):
        summed: Tensor = model(windows[:, :-1], windows[:, 1:])
    return summed / (len(begins) * LENGTH)


def _text() -> tuple[Tensor, Tensor]:
    library = Path(sysconfig.get_paths()["stdlib"])
    content = b"".join((library / name).read_bytes() for name in SOURCES)
    text = torch.frombuffer(bytearray(content), dtype=torch.uint8).long()
    return text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]


def _plant_outliers(module: nn.Linear) -> None:
    extra = OUTLIERS * torch.randn(OUTLIER_TOKENS, module.in_features, generator=torch.Generator().manual_seed(1))

    def add(_: nn.Module, arguments: Any) -> Any:
        return (torch.cat((arguments[0].flatten(0, -2), extra.to(arguments[0].dtype))),)

    def drop(_: nn.Module, arguments: Any, result: Tensor) -> Tensor:
        return result[: len(arguments[0]) - OUTLIER_TOKENS].view(-1, LENGTH, result.shape[-1])

    module.register_forward_pre_hook(add)
    module.register_forward_hook(drop)

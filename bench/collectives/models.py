"""What the training step is measured with: the recipes' GPT, and a convolutional network in the manner of VGG.

The GPT has 11 million parameters (42 MiB) and computes long for each byte of gradient; the VGG has 28 million
(107 MiB), most of them in three dense layers, which are the first to be ready in a backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from fireflyer.recipes.gpt import GPTConfig, GPTModel

__all__ = ["MODELS", "Step", "build"]

Step = Callable[[nn.Module], torch.Tensor]
"""The loss of a batch, by a model or by what wraps it."""

MODELS: Final = ("gpt", "vgg", "tiny")
_GPT: Final = GPTConfig(layers=6, heads=6, width=384, context=128, vocab_size=1024)
_GPT_BATCH: Final = 4
_TINY: Final = GPTConfig(layers=1, heads=2, width=32, context=16, vocab_size=64)
_VGG: Final = (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool")  # configuration A
_VGG_BATCH: Final = 16
_VGG_CLASSES: Final = 10


def build(name: str, rank: int) -> tuple[nn.Module, Step]:
    """The same weights on every rank, and a batch of this rank's own."""
    torch.manual_seed(1)
    if name == "vgg":
        return _vgg(), _images(rank)
    config = _GPT if name == "gpt" else _TINY
    return GPTModel(config), _tokens(config, rank)


def _tokens(config: GPTConfig, rank: int) -> Step:
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(0, config.vocab_size, (_GPT_BATCH, config.context + 1), generator=generator)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss(model: nn.Module) -> torch.Tensor:
        total: torch.Tensor = model(inputs, targets)
        return total / targets.numel()

    return loss


def _images(rank: int) -> Step:
    generator = torch.Generator().manual_seed(rank)
    images = torch.randn(_VGG_BATCH, 3, 32, 32, generator=generator)
    classes = torch.randint(0, _VGG_CLASSES, (_VGG_BATCH,), generator=generator)
    return lambda model: functional.cross_entropy(model(images), classes)


def _vgg() -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for step in _VGG:
        if isinstance(step, int):
            layers += [nn.Conv2d(channels, step, 3, padding=1), nn.ReLU()]
            channels = step
        else:
            layers.append(nn.MaxPool2d(2))
    dense: list[Any] = [nn.Flatten(), nn.Linear(channels, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU()]
    return nn.Sequential(*layers, *dense, nn.Linear(4096, _VGG_CLASSES))

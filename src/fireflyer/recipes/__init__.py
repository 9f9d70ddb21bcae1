"""Complete runs as Python functions: the corpus, a small GPT, the script that trains it, and the demonstration.

`python -m fireflyer.recipes.train_gpt` is the script; it is meant to be copied. Names are imported on their first use:
the model needs torch, the demonstration does not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fireflyer.recipes.corpus import Corpus, build_corpus, open_corpus
    from fireflyer.recipes.demo import DemoResult, DemoSpec, run_demo
    from fireflyer.recipes.gpt import PRESETS, GPTConfig, GPTModel

__all__ = [
    "PRESETS",
    "Corpus",
    "DemoResult",
    "DemoSpec",
    "GPTConfig",
    "GPTModel",
    "build_corpus",
    "open_corpus",
    "run_demo",
]

_HOME = {
    "Corpus": "corpus",
    "DemoResult": "demo",
    "DemoSpec": "demo",
    "GPTConfig": "gpt",
    "GPTModel": "gpt",
    "PRESETS": "gpt",
    "build_corpus": "corpus",
    "open_corpus": "corpus",
    "run_demo": "demo",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)

"""Configurations of published models, with the keys of their `config.json` that decide their dimensions: those that the
package ships."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Final

__all__ = [
    "DEEPSEEK_MOE_16B",
    "DEEPSEEK_V2",
    "DEEPSEEK_V3",
    "GPT2_MEDIUM",
    "LLAMA_13B",
    "LLAMA_405B",
    "MISTRAL_7B",
    "QWEN2_72B",
    "Config",
]

Config = dict[str, object]


def _config(name: str) -> Config:
    found: Config = json.loads(files("fireflyer.planning").joinpath("models", f"{name}.json").read_bytes())
    return found


GPT2_MEDIUM: Final = _config("gpt2-medium")
LLAMA_13B: Final = _config("llama-13b")
LLAMA_405B: Final = _config("llama-3.1-405b")
MISTRAL_7B: Final = _config("mistral-7b")
QWEN2_72B: Final = _config("qwen-2.5-72b")
DEEPSEEK_MOE_16B: Final = _config("deepseek-moe-16b")
DEEPSEEK_V2: Final = _config("deepseek-v2")
DEEPSEEK_V3: Final = _config("deepseek-v3")

"""Logits are those of `transformers` on small random models, in both directions of loading."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from fireflyer.recipes.deepseek import DeepseekModel
from fireflyer.recipes.deepseek.model import PredictionModule
from fireflyer.recipes.deepseek.weights import load_weights, read_config, save_weights

pytestmark = pytest.mark.slow  # importing transformers takes seconds

SMALL = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "intermediate_size": 48,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LATENT = {
    "model_type": "deepseek_v3",
    **SMALL,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "num_nextn_predict_layers": 0,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
    "original_max_position_embeddings": 16,
}
LLAMA = {"model_type": "llama", **SMALL, "num_key_value_heads": 2}
CONFIGS = {
    "deepseek": LATENT,
    "no query latent, biases, tied": LATENT
    | {"q_lora_rank": None, "attention_bias": True, "tie_word_embeddings": True},
    "halves rotated": LATENT | {"rope_interleave": False, "norm_topk_prob": False, "routed_scaling_factor": 1.5},
    "yarn": LATENT | {"rope_parameters": YARN},
    "llama": LLAMA,
    "llama with biases, multi-query, tied": LLAMA
    | {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
}


def theirs(config: dict[str, Any]) -> Any:
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config)).eval()
    for name, tensor in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            tensor.uniform_(-0.2, 0.2)
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "bias")):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def tokens() -> torch.Tensor:
    return torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(1))


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one - other).abs().max() <= 2e-5 * other.abs().max())


@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
@torch.no_grad()
def test_logits_are_equal(config: dict[str, Any], tmp_path: Path) -> None:
    other = theirs(config)
    other.save_pretrained(tmp_path / "theirs")
    model = DeepseekModel(read_config(str(tmp_path / "theirs"))).eval()
    load_weights(model, str(tmp_path / "theirs"))
    wanted = other(tokens()).logits
    assert wanted.std() > 0.1
    assert close(model(tokens()), wanted)
    save_weights(model, str(tmp_path / "ours"))
    transformers: Any = importlib.import_module("transformers")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert torch.equal(again(tokens()).logits, wanted)


@pytest.mark.parametrize("hidden_first", [False, True])
@torch.no_grad()
def test_prediction_modules_are_equal(hidden_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers: Any = importlib.import_module("transformers")
    # By this it knows which layers are prediction modules; its own value is for a model of 61 layers.
    later = [r"model\.layers\.[34]\..*"]
    monkeypatch.setattr(transformers.DeepseekV3ForCausalLM, "_keys_to_ignore_on_load_unexpected", later)
    layers: Any = importlib.import_module("transformers.modeling_layers")
    caches: Any = importlib.import_module("transformers.cache_utils")
    config = LATENT | {"num_nextn_predict_layers": 2, "mtp_hidden_states_first": hidden_first}
    main = theirs(config)
    main.save_pretrained(tmp_path)
    ours = DeepseekModel(read_config(str(tmp_path))).eval()
    assert ours.config.mtp_hidden_first is hidden_first
    save_weights(ours, str(tmp_path))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    other = layers.MtpModel.from_pretrained(loaded).eval()
    cache = caches.MtpCache(config=loaded.config.get_mtp_config())
    sequence = tokens()[:, :12]
    hidden = ours.hidden(sequence[:, :10])
    their_hidden = loaded.model(sequence[:, :10]).last_hidden_state
    for depth, module in enumerate(ours.mtp, start=1):
        assert isinstance(module, PredictionModule)
        following = sequence[:, depth : depth + 10]
        hidden = module(hidden, ours.embed_tokens(following), ours.rotation(0, 10))
        positions = torch.arange(10).unsqueeze(0)
        their_hidden = other.forward_layer(depth - 1, their_hidden, positions, cache, input_ids=following)
        assert close(hidden, their_hidden), depth

"""Parameters, FLOPs and KV cache of published models are those of the papers and of `transformers`."""

from __future__ import annotations

import importlib
import re
from typing import Any

import msgspec
import pytest
from tests.support.model_configs import (
    DEEPSEEK_MOE_16B,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GPT2_MEDIUM,
    LLAMA_13B,
    LLAMA_405B,
    MISTRAL_7B,
    QWEN2_72B,
    Config,
)

from fireflyer.base.errors import UsageError
from fireflyer.codesign.model import (
    count_parameters,
    dense_flops,
    kv_bytes_per_sequence,
    kv_bytes_per_token,
    kv_bytes_read,
    model_flops_utilization,
    shape_from_config,
    training_flops,
)
from fireflyer.codesign.parallel import ParallelPlan
from fireflyer.codesign.parallel.plan import shape_refusals
from fireflyer.codesign.parallel.stages import balance_model


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [
        (GPT2_MEDIUM, 354_823_168, 354_823_168),
        (LLAMA_13B, 13_015_864_320, 13_015_864_320),
        (LLAMA_405B, 405_853_388_800, 405_853_388_800),
        (MISTRAL_7B, 7_241_732_096, 7_241_732_096),
        (QWEN2_72B, 72_706_203_648, 72_706_203_648),
        (DEEPSEEK_MOE_16B, 16_375_728_128, 2_828_650_496),
        (DEEPSEEK_V2, 235_741_434_880, 21_375_800_320),
        (DEEPSEEK_V3, 671_026_404_352, 37_552_282_624),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_parameters(config: Config, total: int, active: int) -> None:
    count = count_parameters(shape_from_config(config))
    assert (count.total, count.active) == (total, active)


GEMMA_3_4B: Config = {
    "model_type": "gemma3_text",
    "hidden_size": 2560,
    "intermediate_size": 10_240,
    "num_hidden_layers": 34,
    "sliding_window": 1024,
}
GPT_OSS_20B: Config = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "vocab_size": 201_088,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
}
QWEN3_30B: Config = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151_936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
FALCON_7B: Config = {
    "model_type": "falcon",
    "hidden_size": 4544,
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "vocab_size": 65_024,
}
STARCODER: Config = {
    "model_type": "gpt_bigcode",
    "n_embd": 6144,
    "n_layer": 40,
    "n_head": 48,
    "n_inner": 24_576,
    "n_positions": 8192,
    "vocab_size": 49_152,
}
BLOOM: Config = {
    "model_type": "bloom",
    "n_embed": 14_336,
    "n_layer": 70,
    "num_attention_heads": 112,
    "vocab_size": 250_880,
}
GPT_J_6B: Config = {"model_type": "gptj", "n_embd": 4096, "n_layer": 28, "n_head": 16, "vocab_size": 50_400}
GPT_NEO_2_7B: Config = {
    "model_type": "gpt_neo",
    "hidden_size": 2560,
    "num_layers": 32,
    "num_heads": 20,
    "attention_types": [[["global", "local"], 16]],
    "vocab_size": 50_257,
}
MPT_7B: Config = {
    "model_type": "mpt",
    "d_model": 4096,
    "n_layers": 32,
    "n_heads": 32,
    "vocab_size": 50_432,
    "attn_config": {"alibi": True, "attn_type": "multihead_attention", "clip_qkv": None},
    "no_bias": True,
}
OLMO_1B: Config = {
    "model_type": "olmo",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "vocab_size": 50_304,
    "tie_word_embeddings": True,
}
OPT_6_7B: Config = {
    "model_type": "opt",
    "hidden_size": 4096,
    "ffn_dim": 16_384,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "word_embed_proj_dim": 4096,
    "vocab_size": 50_272,
}
DEEPSEEK_V32: Config = DEEPSEEK_V3 | {"model_type": "deepseek_v32", "index_n_heads": 64, "index_head_dim": 128}
INDEX_V32 = 61 * (1536 * 64 * 128 + 7168 * (128 + 64) + 2 * 128)
"""Queries from their latent, one key and the weights of the heads from the hidden state, and a LayerNorm of the key."""


@pytest.mark.parametrize(
    ("config", "total", "active", "bytes_per_token"),
    [
        (GEMMA_3_4B, 3_880_263_168, 3_880_263_168, 34 * 2 * 4 * 256 * 2),
        (GPT_OSS_20B, 20_914_757_184, 4_187_440_704, 24 * 2 * 8 * 64 * 2),
        (QWEN3_30B, 30_532_122_624, 3_353_032_704, 48 * 2 * 4 * 128 * 2),
        (FALCON_7B, 6_921_720_704, 6_921_720_704, 32 * 2 * 64 * 2),
        (STARCODER, 15_517_456_384, 15_517_456_384, 40 * 2 * 128 * 2),
        (BLOOM, 176_247_271_424, 176_247_271_424, 70 * 2 * 14_336 * 2),
        (GPT_J_6B, 6_050_882_784, 6_050_882_784, 28 * 2 * 4096 * 2),
        (GPT_NEO_2_7B, 2_651_307_520, 2_651_307_520, 32 * 2 * 2560 * 2),
        (MPT_7B, 6_649_286_656, 6_649_286_656, 32 * 2 * 4096 * 2),
        (OLMO_1B, 1_176_764_416, 1_176_764_416, 16 * 2 * 2048 * 2),
        (OPT_6_7B, 6_658_473_984, 6_658_473_984, 32 * 2 * 4096 * 2),
        (DEEPSEEK_V32, 671_026_404_352 + INDEX_V32, 37_552_282_624 + INDEX_V32, 61 * (576 + 128) * 2),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_further_families(config: Config, total: int, active: int, bytes_per_token: int) -> None:
    shape = shape_from_config(config)
    count = count_parameters(shape)
    assert (count.total, count.active) == (total, active)
    assert kv_bytes_per_token(shape) == bytes_per_token


def test_some_layers_have_a_window_and_others_see_all() -> None:
    gemma, oss = shape_from_config(GEMMA_3_4B), shape_from_config(GPT_OSS_20B)
    assert [layer for layer in range(34) if gemma.attention.window_of(layer) is None] == [5, 11, 17, 23, 29]
    assert kv_bytes_per_sequence(gemma, 8192) == (29 * 1024 + 5 * 8192) * kv_bytes_per_token(gemma) // 34
    assert [oss.attention.window_of(layer) for layer in range(4)] == [128, None, 128, None]
    named = shape_from_config(GPT_OSS_20B | {"layer_types": ["full_attention"] * 23 + ["sliding_attention"]})
    assert [layer for layer in range(24) if named.attention.window_of(layer) is not None] == [23]


LLAMA_4_MAVERICK: Config = {
    "model_type": "llama4_text",
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16_384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "vocab_size": 202_048,
    "num_local_experts": 128,
    "interleave_moe_layer_step": 2,
}


def test_experts_in_every_other_layer_and_chunks_in_three_of_four() -> None:
    shape = shape_from_config(LLAMA_4_MAVERICK)
    assert [shape.has_experts(layer) for layer in range(4)] == [False, True, False, True]
    assert [shape.attention.window_of(layer) for layer in range(4)] == [8192, 8192, 8192, None]
    named = {"moe_layers": list(range(1, 48, 2)), "no_rope_layers": [0, 1] * 24}  # as `save_pretrained` writes them
    saved = shape_from_config(LLAMA_4_MAVERICK | named)
    assert saved.expert_layers == 24
    assert [saved.attention.window_of(layer) for layer in range(3)] == [None, 8192, None]
    count = count_parameters(shape)
    assert (round(count.total / 1e9), round(count.active / 1e9)) == (401, 17)  # "400B" with 17B active, and vision


@pytest.mark.parametrize("pattern", ["LLLG", 4, None])
def test_patterns_of_windows_are_numbers_or_letters(pattern: object) -> None:
    config = LLAMA_13B | {"model_type": "exaone4", "sliding_window": 4096, "sliding_window_pattern": pattern}
    attention = shape_from_config(config).attention
    assert [attention.window_of(layer) for layer in range(5)] == [4096, 4096, 4096, None, 4096]


def test_a_model_that_sees_is_counted_by_its_language_model() -> None:
    whole = {"model_type": "gemma3", "text_config": GEMMA_3_4B, "vision_config": {"hidden_size": 1152}}
    assert shape_from_config(whole) == shape_from_config(GEMMA_3_4B)
    untied = count_parameters(shape_from_config(whole | {"tie_word_embeddings": False}))
    assert untied.total == 3_880_263_168 + 262_208 * 2560


def test_an_index_chooses_the_tokens_that_a_query_sees() -> None:
    whole, chosen = shape_from_config(DEEPSEEK_V3), shape_from_config(DEEPSEEK_V32 | {"index_topk": 2048})
    keys = sum(min(i, 2048) for i in range(32_768)) / 32_768
    matrices = 6 * 61 * (1536 * 64 * 128 + 7168 * (128 + 64))
    scores = 3 * 61 * 2 * 32_768 / 2 * 64 * 128
    seen = 3 * 61 * 2 * 128 * (192 + 128) * (keys - 32_768 / 2)
    difference = training_flops(chosen, 32_768) - training_flops(whole, 32_768)
    assert difference == pytest.approx(matrices + scores + seen, rel=1e-3)
    assert difference < 0, "what is not seen saves more than the index takes"
    assert kv_bytes_read(chosen, 1000) == 1000 * kv_bytes_per_token(chosen), "all are chosen"
    assert kv_bytes_read(chosen, 100_000) == 61 * (2048 * 576 + 100_000 * 128) * 2
    assert kv_bytes_read(whole, 100_000) == kv_bytes_per_sequence(whole, 100_000)
    windowed = shape_from_config(MISTRAL_7B)
    assert kv_bytes_read(windowed, 100_000) == kv_bytes_per_sequence(windowed, 100_000)


def test_local_layers_of_gpt_neo_have_a_window() -> None:
    attention = shape_from_config(GPT_NEO_2_7B | {"window_size": 128}).attention
    assert [attention.window_of(layer) for layer in range(4)] == [None, 128, None, 128]


@pytest.mark.parametrize("config", [BLOOM, GPT_J_6B, OLMO_1B, OPT_6_7B, DEEPSEEK_V3], ids=lambda one: one["model_type"])
def test_stages_of_a_plan_have_all_parameters(config: Config) -> None:
    shape = shape_from_config(config)
    stages = balance_model(shape, 4, 2048)
    count = count_parameters(shape)
    held = sum(one.matrix + one.vector + one.routed - one.copies for one in stages)
    assert held == count.total + count.mtp


def test_biases_of_experts_are_no_matrix_products() -> None:
    with_biases = shape_from_config(GPT_OSS_20B)
    matrices = with_biases.layers * (2880 * 64 * (2 * 64 + 2 * 8) + 4 * 3 * 2880 * 2880) + 201_088 * 2880
    scores = training_flops(with_biases, 1) - 6 * matrices
    assert 0 < scores < 1e-4 * 6 * matrices


def test_the_prediction_module_of_v3_has_about_11_billion_parameters_of_its_own() -> None:
    assert count_parameters(shape_from_config(DEEPSEEK_V3)).mtp == 11_610_067_968


@pytest.mark.parametrize(
    ("config", "bytes_per_token"), [(DEEPSEEK_V3, 70_272), (QWEN2_72B, 327_680), (LLAMA_405B, 516_096)]
)
def test_table_1_kv_cache(config: Config, bytes_per_token: int) -> None:
    assert kv_bytes_per_token(shape_from_config(config)) == bytes_per_token


def test_a_window_bounds_the_cache_and_the_scores() -> None:
    windowed, whole = shape_from_config(MISTRAL_7B), shape_from_config(MISTRAL_7B | {"sliding_window": None})
    assert kv_bytes_per_sequence(windowed, 16_384) == 4096 * kv_bytes_per_token(windowed)
    assert kv_bytes_per_sequence(whole, 16_384) == 16_384 * kv_bytes_per_token(whole)
    assert training_flops(windowed, 4096) == training_flops(whole, 4096)
    keys = sum(min(i, 4096) for i in range(16_384)) / 16_384
    difference = training_flops(whole, 16_384) - training_flops(windowed, 16_384)
    assert difference == pytest.approx(3 * 2 * (16_384 / 2 - keys) * 32 * 256 * 32, rel=1e-3)


@pytest.mark.parametrize(
    ("config", "causal", "dense"),
    [
        (DEEPSEEK_V2, 155.01, None),
        (DEEPSEEK_V3, 249.81, None),
        (QWEN2_72B, 444.86, 394.02),
        (LLAMA_405B, 2473.22, 2447.85),
    ],
)
def test_table_2_training_cost_by_both_conventions(config: Config, causal: float, dense: float | None) -> None:
    shape = shape_from_config(config)
    assert training_flops(shape, 4096) / 1e9 == pytest.approx(causal, abs=0.006)
    if dense is not None:
        assert dense_flops(shape) / 1e9 == pytest.approx(dense, abs=0.006)


def test_table_4_utilization() -> None:
    shape = shape_from_config(DEEPSEEK_V3)
    tokens_per_s = 272.80e9 / 86_400
    for causal, tflops, mfu in ((True, 385.1, 38.94), (False, 432.5, 43.73)):
        flops = training_flops(shape, 4096, causal=causal)
        assert flops * tokens_per_s / 2048 / 1e12 == pytest.approx(tflops, abs=0.06)
        assert 100 * model_flops_utilization(flops, tokens_per_s, 2048, 989e12) == pytest.approx(mfu, abs=0.006)


def test_an_index_of_tokens_is_no_part_of_a_plan() -> None:
    refused = shape_refusals(ParallelPlan(sequence_tokens=4096, batch_sequences=8), shape_from_config(DEEPSEEK_V32))
    assert refused == ["what an index of tokens (model_type deepseek_v32) keeps in training is not known here"]


_LATENT = {name: DEEPSEEK_V3[name] for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}
_EXPERTS = _LATENT | {
    name: DEEPSEEK_V3[name] for name in ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not known; known are arcee, bloom, cohere, cohere2, deepseek"),
        ({"hidden_size": None}, "has no 'hidden_size'"),
        ({"hidden_size": 5121}, "hidden_size 5121 is no multiple of num_attention_heads 40"),
        ({"hidden_size": "5120"}, "'hidden_size' is '5120'; a whole number is needed"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' is 0; it must be 1 or more"),
        ({"num_hidden_layers": 1 << 16 | 1}, "'num_hidden_layers' is 65537; models of up to 65536 layers are"),
        ({"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 10**9}, "'n_layer' is 1000000000; models of up"),
        (
            {
                "model_type": "deepseek_v32",
                **_EXPERTS,
                "num_hidden_layers": (1 << 40) - 1,
                "mlp_layer_types": ["dense"],
            },
            "models of up to 65536 layers are understood",
        ),
        ({"model_type": "gpt_oss", "num_hidden_layers": (1 << 40) - 1}, "models of up to 65536 layers are understood"),
        ({"num_key_value_heads": 7}, "40 attention heads are no multiple of the 7 key-value heads"),
        ({"tie_word_embeddings": 1}, "'tie_word_embeddings' is 1; true or false is needed"),
        ({"model_type": None}, "has no 'model_type'"),
        ({"model_type": "gpt_oss", "layer_types": ["full_attention"]}, "1 of them for 40 layers"),
        ({"model_type": "gpt_oss", "layer_types": ["linear_attention"] * 40}, "'linear_attention' is not known"),
        ({"model_type": "gpt_oss", "layer_types": 3}, "'layer_types' is 3; a list of strings is needed"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, "experts in every layer are understood"),
        ({"model_type": "qwen2_moe", "decoder_sparse_step": 2}, "experts in every layer are understood"),
        (
            {"model_type": "exaone4", "sliding_window_pattern": "LLG"},
            "is 'LLG'; a whole number is needed",
        ),
        ({"model_type": "stablelm", "qk_layernorm": True}, "norms of queries and keys are not understood"),
        ({"model_type": "phi", "qk_layernorm": True}, "norms of queries and keys are not understood"),
        ({"model_type": "llama4_text", "moe_layers": [3]}, "experts in every interleave_moe_layer_step-th layer"),
        ({"model_type": "llama4_text", "no_rope_layers": [1, "0"]}, "a list of whole numbers is needed"),
        ({"model_type": "ernie4_5_moe", "moe_layer_end_index": 4}, "experts up to the last layer are understood"),
        ({"model_type": "ernie4_5_moe", "moe_layer_end_index": 99}, "a layer from 0 to 39 is needed, or -1"),
        ({"model_type": "ernie4_5_moe", "use_bias": True}, "models without biases are understood"),
        (
            {"model_type": "deepseek_v32", **_LATENT},
            "has no 'n_routed_experts', which a model of type 'deepseek_v32' needs",
        ),
        ({"model_type": "deepseek_v32", **_LATENT, "n_routed_experts": 0}, "'n_routed_experts' is 0; it must be 1 or"),
        ({"model_type": "deepseek_v32", **_EXPERTS, "q_lora_rank": None}, "and the model has none"),
        (
            {"model_type": "deepseek_v32", **_EXPERTS, "mlp_layer_types": ["sparse", "dense"] * 20},
            "dense layers and then",
        ),
        (
            {"model_type": "gpt_neo", "num_layers": 2},
            "has 24 layers of global, local; 2 of global and local are needed",
        ),
        ({"model_type": "gpt_neo", "num_layers": 2, "attention_types": [[["all"], 2]]}, "has 2 layers of all"),
        ({"model_type": "gpt_neo", "num_layers": 2, "attention_types": [[["local"], 1 << 30]]}, "'attention_types' is"),
        ({"model_type": "gpt_neo", "num_layers": 2, "attention_types": [["local", 2]]}, "'attention_types' is [["),
        ({"model_type": "gptj", "n_embd": 65, "n_layer": 2, "n_head": 4}, "n_embd 65 is no multiple of n_head 4"),
        ({"model_type": "mpt", "no_bias": False}, "models without biases are understood for this type"),
        ({"model_type": "mpt", "attn_config": {"qk_ln": True}}, "norms of queries and keys are not understood"),
        (
            {"model_type": "mpt", "attn_config": {"attn_type": "multiquery_attention"}},
            "multihead_attention with alibi is",
        ),
        ({"model_type": "mpt", "attn_config": {"alibi": False}}, "multihead_attention with alibi is understood"),
        ({"model_type": "opt", "word_embed_proj_dim": 512}, "embeddings as wide as hidden_size"),
        ({"model_type": "opt", "do_layer_norm_before": False}, "norms before attention"),
        ({"model_type": "smollm3", "use_sliding_window": True}, "windows are not understood for this type"),
    ],
)
def test_a_wrong_configuration_is_one_clear_line(change: Config, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        shape_from_config(LLAMA_13B | change)
    assert "\n" not in str(caught.value)


def test_a_shape_of_more_layers_than_anybody_sums_is_refused() -> None:
    with pytest.raises(UsageError, match="a model of 1000000000 layers; up to 65536 are understood"):
        msgspec.structs.replace(shape_from_config(LLAMA_13B), layers=10**9)


def test_more_experts_per_token_than_there_are() -> None:
    with pytest.raises(UsageError, match="a token goes to 65 of 64 routed experts"):
        shape_from_config(DEEPSEEK_MOE_16B | {"num_experts_per_tok": 65})


_SMALL = {"hidden_size": 64, "num_attention_heads": 8, "intermediate_size": 96, "vocab_size": 320}
_SMALL_LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}

_SMALL_EXPERTS = {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
}


SMALL_MODELS: tuple[Config, ...] = (
    {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 128, "vocab_size": 320},
    {"model_type": "llama", **_SMALL, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    {"model_type": "llama", **_SMALL, "num_key_value_heads": 1, "tie_word_embeddings": True},
    {"model_type": "mistral", **_SMALL, "num_key_value_heads": 4},
    {"model_type": "mixtral", **_SMALL, "num_key_value_heads": 4, "num_local_experts": 4},
    {"model_type": "qwen2", **_SMALL, "num_key_value_heads": 2},
    {"model_type": "qwen3", **_SMALL, "num_key_value_heads": 2, "head_dim": 16},
    {"model_type": "deepseek_v2", **_SMALL, **_SMALL_LATENT},
    {"model_type": "deepseek_v2", **_SMALL, **_SMALL_LATENT, "q_lora_rank": None},
    {"model_type": "deepseek_v3", **_SMALL, **_SMALL_LATENT},
    {"model_type": "deepseek_v3", **_SMALL, **_SMALL_LATENT, "attention_bias": True},
    {"model_type": "cohere", **_SMALL, "num_key_value_heads": 2, "use_qk_norm": True, "tie_word_embeddings": True},
    {"model_type": "falcon", **_SMALL, "bias": True, "parallel_attn": False, "tie_word_embeddings": True},
    {"model_type": "falcon", **_SMALL, "num_kv_heads": 2, "new_decoder_architecture": True},
    {"model_type": "gemma", **_SMALL, "num_key_value_heads": 2, "tie_word_embeddings": True},
    {"model_type": "gemma2", **_SMALL, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True},
    {"model_type": "gemma3_text", **_SMALL, "num_key_value_heads": 2, "tie_word_embeddings": True},
    {
        "model_type": "glm4_moe",
        **_SMALL,
        **_SMALL_EXPERTS,
        "num_key_value_heads": 2,
        "use_qk_norm": True,
        "attention_bias": True,
    },
    {"model_type": "bloom", "hidden_size": 64, "n_head": 8, "n_layer": 3, "vocab_size": 320},
    {"model_type": "deepseek_v32", **_SMALL, **_SMALL_LATENT, "index_n_heads": 4, "index_head_dim": 8},
    {"model_type": "glm4_moe_lite", **_SMALL, **_SMALL_LATENT, "attention_bias": True},
    {"model_type": "glm4_moe_lite", **_SMALL, **_SMALL_LATENT, "mlp_layer_types": ["dense", "dense", "sparse"]},
    {"model_type": "gpt_bigcode", "n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 128, "vocab_size": 320},
    {"model_type": "gpt_bigcode", "n_embd": 64, "n_head": 4, "n_layer": 3, "vocab_size": 320, "multi_query": False},
    {"model_type": "gptj", "n_embd": 64, "n_head": 4, "n_layer": 3, "vocab_size": 320},
    {
        "model_type": "gpt_neo",
        "hidden_size": 64,
        "num_heads": 4,
        "num_layers": 3,
        "attention_types": [[["global", "local"], 1], [["local"], 1]],
        "vocab_size": 320,
    },
    {"model_type": "mpt", "d_model": 64, "n_heads": 4, "n_layers": 3, "vocab_size": 320},
    {"model_type": "olmo", **_SMALL, "num_key_value_heads": 2, "attention_bias": True},
    {"model_type": "opt", **_SMALL, "ffn_dim": 96, "max_position_embeddings": 32},
    {"model_type": "opt", **_SMALL, "ffn_dim": 96, "enable_bias": False, "layer_norm_elementwise_affine": False},
    {"model_type": "gpt_neox", **_SMALL},
    {"model_type": "gpt_oss", **_SMALL, "num_key_value_heads": 2, "num_local_experts": 4},
    {"model_type": "granite", **_SMALL, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    {"model_type": "granitemoe", **_SMALL, "num_key_value_heads": 2, "num_local_experts": 4},
    {"model_type": "nemotron", **_SMALL, "num_key_value_heads": 2, "mlp_bias": True},
    {"model_type": "olmo2", **_SMALL, "num_key_value_heads": 2, "pad_token_id": 0},
    {"model_type": "olmoe", **_SMALL, "num_key_value_heads": 2, "num_experts": 8},
    {"model_type": "phi3", **_SMALL, "num_key_value_heads": 2, "pad_token_id": 0},
    {"model_type": "qwen2_moe", **_SMALL, "num_key_value_heads": 2, "num_experts": 8, "moe_intermediate_size": 40},
    {"model_type": "qwen3_moe", **_SMALL, "num_key_value_heads": 2, "num_experts": 8, "moe_intermediate_size": 40},
    {"model_type": "seed_oss", **_SMALL, "num_key_value_heads": 2},
    {"model_type": "smollm3", **_SMALL, "num_key_value_heads": 2, "pad_token_id": 0},
    {"model_type": "starcoder2", **_SMALL, "num_key_value_heads": 2, "tie_word_embeddings": True},
    {"model_type": "arcee", **_SMALL, "num_key_value_heads": 2, "mlp_bias": True, "attention_bias": True},
    {"model_type": "cohere2", **_SMALL, "num_key_value_heads": 2, "tie_word_embeddings": True},
    {
        "model_type": "dots1",
        **_SMALL,
        **_SMALL_EXPERTS,
        "num_key_value_heads": 2,
        "layer_types": ["full_attention"] * 3,
    },
    {"model_type": "ernie4_5", **_SMALL, "num_key_value_heads": 2, "use_bias": True},
    {"model_type": "ernie4_5_moe", **_SMALL, "num_key_value_heads": 2, "moe_layer_interval": 2},
    {"model_type": "exaone4", **_SMALL, "num_key_value_heads": 2, "sliding_window_pattern": 4},
    {"model_type": "glm4", **_SMALL, "num_key_value_heads": 2, "pad_token_id": 0},
    {"model_type": "hunyuan_v1_dense", **_SMALL, "num_key_value_heads": 2, "head_dim": 8},
    {"model_type": "hunyuan_v1_moe", **_SMALL, "num_key_value_heads": 2, "num_experts": 4, "head_dim": 8},
    {"model_type": "llama4_text", **_SMALL, "num_key_value_heads": 2, "interleave_moe_layer_step": 2},
    {"model_type": "minimax_m2", **_SMALL, "num_key_value_heads": 2, "num_local_experts": 8},
    {"model_type": "ministral3", **_SMALL, "num_key_value_heads": 2},
    {"model_type": "olmo3", **_SMALL, "num_key_value_heads": 2, "pad_token_id": 0},
    {"model_type": "phi", **_SMALL, "num_key_value_heads": 2},
    {"model_type": "phimoe", **_SMALL, "num_key_value_heads": 2, "num_local_experts": 4, "lm_head_bias": True},
    {"model_type": "stablelm", **_SMALL, "num_key_value_heads": 2, "use_qkv_bias": True},
)


@pytest.mark.slow  # importing transformers takes 20 s: one test, so that one process does
def test_transformers_makes_models_of_as_many_parameters() -> None:
    torch = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    different = []
    for config in SMALL_MODELS:
        layers = {} if {"n_layer", "n_layers", "num_layers"} & config.keys() else {"num_hidden_layers": 3}
        given = {"tie_word_embeddings": config["model_type"] == "gpt2"} | config | layers
        made = transformers.AutoConfig.for_model(**given)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(made)
        trained = sum(one.numel() for one in model.parameters() if one.requires_grad)  # without biases of routing
        counted = count_parameters(shape_from_config(given)).total
        if counted != trained:
            different.append((config, counted, trained))
    assert different == []

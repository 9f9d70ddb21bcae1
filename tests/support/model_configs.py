"""Configurations of published models, with the keys of their `config.json` that decide their dimensions."""

from __future__ import annotations

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

GPT2_MEDIUM: Final[Config] = {
    "model_type": "gpt2",
    "n_embd": 1024,
    "n_layer": 24,
    "n_head": 16,
    "n_positions": 1024,
    "vocab_size": 50257,
}
LLAMA_13B: Final[Config] = {
    "model_type": "llama",
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}
LLAMA_405B: Final[Config] = {
    "model_type": "llama",
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
MISTRAL_7B: Final[Config] = {
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}
QWEN2_72B: Final[Config] = {
    "model_type": "qwen2",
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
DEEPSEEK_MOE_16B: Final[Config] = {
    "model_type": "deepseek",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "vocab_size": 102400,
    "tie_word_embeddings": False,
}
DEEPSEEK_V2: Final[Config] = {
    "model_type": "deepseek_v2",
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 60,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 160,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "n_group": 8,
    "topk_group": 3,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "vocab_size": 102400,
    "tie_word_embeddings": False,
}
DEEPSEEK_V3: Final[Config] = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1,
    "vocab_size": 129280,
    "tie_word_embeddings": False,
}

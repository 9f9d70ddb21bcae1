"""DeepSeek-V3 in any size: MLA, mixture of experts, multi-token prediction; free of parallel code."""

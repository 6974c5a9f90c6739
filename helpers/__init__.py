"""Helpers of the tutorial series: GRPO of gpt-oss with Megatron as the trainer and SGLang as the rollout engine, on Ray."""

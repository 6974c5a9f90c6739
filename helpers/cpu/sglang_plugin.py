"""SGLang plugin: serve gpt-oss on a plain CPU.

SGLang finds `register` through the entry-point group `sglang.srt.plugins` (pyproject.toml) in each of its processes.
It does nothing unless the process was told GRPO_DEVICE=cpu. The pieces, reasons and upstream hashes: helpers/cpu/manifest.py.
"""

from __future__ import annotations

import os

from helpers.profiles import DEVICE_VARIABLE


def register() -> None:
    """Called by SGLang at the start of every server process."""
    if os.environ.get(DEVICE_VARIABLE) != "cpu":
        return
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    register_attention_backend("torch_native")(_sink_attention)
    HookRegistry.register(
        "sglang.srt.state_capturer.base.BaseHostCache.__init__", _unpinned_host_cache, HookType.REPLACE
    )
    HookRegistry.register("sglang.srt.models.gpt_oss.GptOssAttention.__init__", _fp32_sinks, HookType.AROUND)
    from helpers.cpu.sglang_sampling import murmur_hash32, seeds_of_requests

    HookRegistry.register(
        "sglang.kernels.ops.sampling.murmur_hash.murmur_hash32", murmur_hash32, HookType.REPLACE
    )
    HookRegistry.register(
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch",
        seeds_of_requests,
        HookType.AROUND,
    )


def _sink_attention(runner):
    from helpers.cpu.sglang_attention import SinkAttentionBackend

    return SinkAttentionBackend(runner)


def _unpinned_host_cache(self, num_tokens, num_layers, topk_size, name):
    """`return_routed_experts` keeps its results in pinned host memory, which only a CUDA driver can give."""
    import torch

    self.buffer = torch.zeros((num_tokens, num_layers, topk_size), dtype=torch.int32)
    self.num_tokens, self.num_layers, self.topk_size, self.name = num_tokens, num_layers, topk_size, name


def _fp32_sinks(upstream, self, *args, **kwargs):
    """SGLang keeps the sinks in bf16 whatever the dtype; trained fp32 sinks would differ from the trainer's by 1e-4 in logprob."""
    import torch

    result = upstream(self, *args, **kwargs)
    self.sinks = torch.nn.Parameter(torch.empty(self.num_heads, dtype=torch.float32), requires_grad=False)
    return result

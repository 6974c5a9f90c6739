"""SGLang plugin: let the memory saver own gpt-oss's KV cache, so that releasing it gives the memory back.

gpt-oss alternates sliding and full attention, so SGLang builds a hybrid pool (SWAKVPool) of two ordinary ones, and switches
the memory saver off for both (0.5.17: `kwargs["enable_memory_saver"] = False` in mem_cache/swa_memory_pool.py; public
threads: sglang 22807, 24661, 32213; miles 860). release_memory_occupation then reports success and keeps the cache.

Active only where the process environment says GRPO_KV_SAVER=1, which RolloutSettings.kv_saver = "hook" does for servers on
a GPU. The upstream source it was written against is in the patch manifest.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial

from helpers.profiles import KV_SAVER_VARIABLE

POOL = "sglang.srt.mem_cache.swa_memory_pool.SWAKVPool.__init__"


def register() -> None:
    """Called by SGLang at the start of every server process, through the entry-point group sglang.srt.plugins."""
    if os.environ.get(KV_SAVER_VARIABLE) != "1":
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(POOL, pools_under_the_saver, HookType.AROUND)
    restore_preload(os.environ)


def restore_preload(environment: Mapping[str, str]) -> bool:
    """Give torch_memory_saver back the mode that SGLang launched this process for; returns whether it was preloaded.

    SGLang preloads the saver's library into its scheduler. Where megatron-core is installed, sglang/srt/debug_utils/dumper.py
    imports it, and megatron/core/inference/contexts/dynamic_context.py (0.19.2) sets hook_mode = "torch" for the whole process;
    CUDA graphs can then not be put under the saver ("Only hook_mode=preload supports pauseable CUDA Graph").
    """
    if "torch_memory_saver" not in environment.get("LD_PRELOAD", ""):
        return False
    import sglang.srt.debug_utils.dumper  # noqa: F401  now, so that it does not come after this
    from torch_memory_saver import torch_memory_saver

    torch_memory_saver.hook_mode = "preload"
    return True


def pools_under_the_saver(upstream, self, *args, **kwargs):
    """SWAKVPool.__init__ with a pool class that puts the flag back: what is passed as the flag itself gets overwritten."""
    if "token_to_kv_pool_class" not in kwargs:
        raise TypeError(
            "SWAKVPool is no longer given its pool class by name: read sglang's swa_memory_pool.py anew"
        )
    kwargs["token_to_kv_pool_class"] = partial(_with_saver, kwargs["token_to_kv_pool_class"])
    return upstream(self, *args, **kwargs)


def _with_saver(pool_class, *args, **kwargs):
    return pool_class(*args, **{**kwargs, "enable_memory_saver": True})

"""The patch manifest: what is replaced or corrected in the engines, why, and the hash of the upstream source it was written for.

Nearly all of it is the CPU back end's. helpers/upstream_fixes.py holds on every device, helpers/sglang_saver.py on GPUs.

    python -m helpers.cpu.manifest check     # compare the installed packages with manifest.json; non-zero when one moved
    python -m helpers.cpu.manifest write     # after reading the upstream change and adapting the patch

Sources are read from the installed files and parsed, never imported, so a check takes a second or two.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import sys
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

MANIFEST = Path(__file__).with_name("manifest.json")


@dataclass(frozen=True)
class Patch:
    """One replaced symbol. module and name say where upstream defines it (name "" means the whole module)."""

    module: str
    name: str
    reason: str
    ours: str  # module.function that replaces it, in helpers/cpu or helpers
    thread: str = ""  # public thread, where there is one

    @property
    def symbol(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module


_CUDA = "Megatron calls it without asking whether there is a GPU; on a CPU it means the CPU or nothing"
_RENAME = "megatron_backend._rename_cuda_devices"
PATCHES = (
    Patch("megatron.bridge.peft.lora_layers", "", "imports TransformerEngine without a guard; it sees a stand-in while it loads",
          "megatron_backend._LoraLayersFinder"),
    Patch("megatron.bridge.models.gpt_oss.gpt_oss_bridge", "GPTOSSBridge.mapping_registry",
          "maps the input layernorm under TransformerEngine's fused name only; the local layer's name is added",
          "megatron_backend._map_local_input_layernorm"),
    Patch("megatron.bridge.models.conversion.utils", "is_modelopt_dynamic_module",
          "tries to import modelopt once a weight of every export; where it is absent each try searches the whole path",
          "upstream_fixes.remember_absent_packages"),
    Patch("megatron.core.dist_checkpointing.strategies.filesystem_async", "get_write_results_queue",
          "keeps results in a spawned process that imports torch and outlives a killed rank",
          "upstream_fixes.checkpoint_queue_ends_with_its_process"),
    Patch("megatron.core.dist_checkpointing.validation", "verify_integrity_manifest",
          "tells the other ranks of one kind of error only: a missing file leaves them waiting", "trainer._check_integrity"),
    Patch("megatron.core.transformer.moe.moe_utils", "maybe_move_tensor_to_cpu",
          "turns all-to-all split sizes into numbers only when they are CUDA tensors", "megatron_backend._numpy_alltoall_splits"),
    Patch("megatron.core.transformer.torch_norm", "WrappedTorchNorm",
          "refuses sequence parallelism, which MoE training with tensor parallelism demands",
          "megatron_backend._allow_sequence_parallel_norm"),
    Patch("megatron.core.transformer.mlp", "MLP.forward",
          "adds the expert bias in place to what may be a view; a forward hook gives it storage of its own (also needed on GPUs)",
          "megatron_backend.clone_expert_outputs"),
    Patch("megatron.core.transformer.dot_product_attention", "DotProductAttention.__init__",
          "does not mark the sinks as split over tensor-parallel ranks: the gradient norm misses those of other ranks",
          "upstream_fixes.sinks_are_sharded", "Megatron-LM 7452 (finding 8), 7530"),
    Patch("megatron.core.tensor_parallel.layers", "RowParallelLinear.__init__",
          "marks expert biases for a sum over the tensor-parallel group, though each rank holds experts of its own",
          "upstream_fixes.expert_biases_are_not_summed", "Megatron-LM 7452, 6099 (relatives)"),
    *(Patch("torch.cuda", name, _CUDA, _RENAME) for name in ("current_device", "set_device", "current_stream", "default_stream", "stream")),
    *(Patch("torch.cuda.streams", name, _CUDA, _RENAME) for name in ("Stream", "Event")),
    Patch("torch.cuda", "synchronize", _CUDA, _RENAME),
    Patch("torch.cuda.memory", "empty_cache", _CUDA, _RENAME),
    Patch("sglang.srt.layers.attention.attention_registry", "create_torch_native_backend",
          "the torch_native back end is registered anew with ours", "sglang_plugin._sink_attention"),
    Patch("sglang.srt.layers.attention.torch_native_backend", "TorchNativeAttnBackend",
          "has no attention sinks, reads the sliding-window pool with full-pool indices, loops over sequences",
          "sglang_attention.SinkAttentionBackend"),
    Patch("sglang.srt.state_capturer.base", "BaseHostCache.__init__",
          "pins host memory for returned experts, which needs a CUDA driver", "sglang_plugin._unpinned_host_cache"),
    Patch("sglang.srt.sampling.sampling_batch_info", "SamplingBatchInfo.from_schedule_batch",
          "takes a request's sampling_seed only with --enable-deterministic-inference, whose attention back ends need a GPU",
          "sglang_sampling.seeds_of_requests"),
    Patch("sglang.kernels.ops.sampling.murmur_hash", "murmur_hash32", "a Triton kernel, which needs a GPU",
          "sglang_sampling.murmur_hash32"),
    Patch("sglang.srt.mem_cache.swa_memory_pool", "SWAKVPool.__init__",
          "switches the memory saver off for the pools of a sliding-window model, so that releasing the cache frees nothing",
          "sglang_saver.pools_under_the_saver", "sglang 22807, 24661, 32213; miles 860"),
    Patch("sglang.srt.models.gpt_oss", "GptOssAttention.__init__",
          "keeps sinks in bf16 whatever the dtype: trained fp32 sinks differ from the trainer's", "sglang_plugin._fp32_sinks"),
)  # fmt: skip


@lru_cache
def _source(module: str) -> tuple[str, ast.Module]:
    """Text and syntax tree of an installed module, found through its top-level package without importing it."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None:
        raise ModuleNotFoundError(
            f"{top} is not installed: run `bash environment/run.sh` to set the environment up"
        )
    for root in spec.submodule_search_locations or []:
        base = Path(root).joinpath(*rest)
        for file in (base.with_suffix(".py") if rest else base / "__init__.py", base / "__init__.py"):
            if file.is_file():
                text = file.read_text()
                return text, ast.parse(text)
    raise ModuleNotFoundError(f"{module} is not in the installed {top}: the package has moved it")


def upstream_source(patch: Patch) -> str:
    """The upstream text that the patch replaces. Raises LookupError when the symbol is gone."""
    text, node = _source(patch.module)
    if not patch.name:
        return text
    for part in patch.name.split("."):
        kinds = (ast.FunctionDef, ast.ClassDef)
        found = [n for n in node.body if isinstance(n, kinds) and n.name == part]
        if not found:
            raise LookupError(
                f"{patch.symbol} is gone from the installed package; read what replaced it and adapt {patch.ours}"
            )
        node = found[-1]
    return ast.get_source_segment(text, node) or ""


def current() -> dict[str, dict]:
    """symbol -> the manifest entry as the installed packages make it."""
    return {
        p.symbol: asdict(p) | {"sha256": hashlib.sha256(upstream_source(p).encode()).hexdigest()}
        for p in PATCHES
    }


def recorded() -> dict[str, dict]:
    """The manifest that is in the repository."""
    return json.loads(MANIFEST.read_text())


def check() -> list[str]:
    """One sentence for each entry that no longer agrees with the installed packages; empty when all do."""
    now, before, problems = current(), recorded(), []
    for symbol in sorted(now.keys() | before.keys()):
        if symbol not in before or symbol not in now:
            problems.append(
                f"{symbol} is in the {'code' if symbol in now else 'manifest'} only: run python -m helpers.cpu.manifest write"
            )
        elif now[symbol]["sha256"] != before[symbol]["sha256"]:
            problems.append(
                f"{symbol} changed upstream: read it, adapt {now[symbol]['ours']}, then write the manifest anew"
            )
        elif now[symbol] != before[symbol]:
            problems.append(
                f"{symbol}: its reason or replacement changed: run python -m helpers.cpu.manifest write"
            )
    return problems


def main(arguments: list[str]) -> int:
    if arguments == ["write"]:
        MANIFEST.write_text(json.dumps(current(), indent=1, sort_keys=True) + "\n")
        print(f"wrote {len(PATCHES)} entries to {MANIFEST.name}")
        return 0
    if arguments == ["check"]:
        problems = check()
        print("\n".join(problems) or f"{len(PATCHES)} patches, every upstream source as it was")
        return 1 if problems else 0
    print("usage: python -m helpers.cpu.manifest check|write", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

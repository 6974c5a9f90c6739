"""Is this machine ready for the profile? Checks before anything heavy starts; imports no engine.

`prepare_kernel(settings)` is the second call of every notebook that touches an engine. `attention_report(settings)` is for
later, when TransformerEngine may be imported.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from helpers.anatomy import te_window
from helpers.profiles import ADDRESS_VARIABLE, PROJECT_ROOT, Profile

PINNED = ("torch", "transformers", "sglang", "megatron-core", "megatron-bridge", "ray", "transformer-engine")
_NEEDED_GIB = {  # memory, disk
    "cpu": (8, 2), "gpu": (24, 10), "gpu-20b": (100, 50), "cluster": (200, 100), "verl-4394": (200, 100),
}  # fmt: skip


class NotReady(RuntimeError):
    """This machine cannot run the profile; the message says why and what does fit."""


@dataclass(frozen=True)
class Check:
    """One line of the readiness table."""

    name: str
    found: str
    ok: bool
    advice: str = ""


def gpu_names() -> list[str]:
    """Names of the NVIDIA GPUs of this machine by nvidia-smi; empty where there is none."""
    if shutil.which("nvidia-smi") is None:
        return []
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def memory_gib() -> float:
    """Memory that is available now, in GiB."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / 2**20
    raise NotReady("/proc/meminfo has no MemAvailable: this course runs on Linux")


def installed_versions() -> dict[str, str]:
    """Version of each engine, "-" where it is not installed; nothing is imported."""
    return {name: _version(name) for name in PINNED}


@dataclass(frozen=True)
class Pin:
    """One exact requirement of environment/<cpu or gpu>.in, with the reason written there and what is installed."""

    package: str
    wanted: str
    found: str  # "-" where it is not installed
    reason: str

    @property
    def ok(self) -> bool:
        return self.found.split("+")[0] == self.wanted  # "2.11.0+cu130" is a build of 2.11.0


def pins(settings: Profile) -> list[Pin]:
    """Every `package==version  # reason` of this profile's requirements; a reason may go on in comment lines below."""
    text = (PROJECT_ROOT / "environment" / ("cpu.in" if settings.device == "cpu" else "gpu.in")).read_text()
    found = re.findall(r"^([\w-]+)(?:\[\w+\])?==(\S+)[ \t]+# (.*(?:\n[ \t]+# .*)*)", text, re.MULTILINE)
    return [
        Pin(name, wanted, _version(name), re.sub(r"\s*\n\s*# ", " ", reason))
        for name, wanted, reason in found
    ]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "-"


def fitting_profile(gpus: list[str] | None = None) -> str:
    """The largest profile that this machine's GPUs allow."""
    count = len(gpu_names() if gpus is None else gpus)
    return "cluster" if count >= 8 else "gpu" if count else "cpu"


def machine_checks(settings: Profile) -> list[Check]:
    """The readiness table for this profile: Python, plugin, memory, disk, shared memory, GPUs.

    With RAY_ADDRESS this machine has to be fit for the driver only.
    """
    attached = bool(os.environ.get(ADDRESS_VARIABLE))  # the engines are on the cluster's nodes; Ray counts their cards
    memory, disk = _NEEDED_GIB["cpu" if attached else settings.name]
    free_memory, gpus = memory_gib(), gpu_names()
    settings.runs.mkdir(parents=True, exist_ok=True)
    free_disk = shutil.disk_usage(settings.runs).free / 2**30
    shm = shutil.disk_usage("/dev/shm").free / 2**20
    plugins = [e.name for e in metadata.entry_points(group="sglang.srt.plugins")]
    version = sys.version.split()[0]
    checks = [
        Check(
            "Python",
            version,
            sys.version_info[:2] == (3, 12),
            "run `bash environment/run.sh`: it finds Python 3.12",
        ),
        Check(
            "memory available",
            f"{free_memory:.1f} GiB",
            free_memory >= memory,
            f"profile {settings.name} wants {memory} GiB",
        ),
        Check(
            "disk free",
            f"{free_disk:.1f} GiB",
            free_disk >= disk,
            f"free some space: {disk} GiB are wanted below {settings.runs}",
        ),
        Check("/dev/shm free", f"{shm:.0f} MiB", shm >= 256, "start the container with --shm-size=1g"),
        Check(
            "SGLang plugin",
            ", ".join(plugins) or "-",
            "gpt_oss_cpu" in plugins,
            "install the project: pip install --no-deps -e .",
        ),
    ]
    if settings.device == "cuda":
        wanted = max(settings.trainer.ranks, settings.rollout.engines)  # colocated, one card each
        advice = f"profile {settings.name} needs {wanted} GPU(s); this machine fits profile {fitting_profile(gpus)}"
        enough = attached or len(gpus) >= wanted
        checks.append(Check("GPUs", ", ".join(gpus) or "none", enough, advice))
        segments = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
        clean = "expandable_segments:True" not in segments
        checks.append(
            Check(
                "allocator",
                segments or "default",
                clean,
                "unset expandable_segments: it breaks SGLang's memory saver (torch_memory_saver 24)",
            )
        )
    return checks


def check_machine(settings: Profile) -> list[Check]:
    """machine_checks, raising NotReady with every failed line."""
    checks = machine_checks(settings)
    failed = [f"{c.name}: {c.found} ({c.advice})" for c in checks if not c.ok]
    if failed:
        raise NotReady(f"this machine is not ready for profile {settings.name!r}. " + "; ".join(failed))
    return checks


def prepare_kernel(settings: Profile) -> Profile:
    """Check the machine and give this process the profile's environment. Call it before anything imports torch.

    Raises NotReady, also when torch is there already and was told something else.
    """
    check_machine(settings)
    wanted = settings.process_environment("kernel")
    changed = [k for k, v in wanted.items() if os.environ.get(k) != v]
    if "torch" in sys.modules and "GRPO_DEVICE" in changed:
        raise NotReady(
            "torch was imported before prepare_kernel(settings): restart the kernel and run the cells in order"
        )
    os.environ.update(wanted)
    return settings


# --- the trainer's attention on a GPU ---------------------------------------------------------------------------------
LAYOUTS = {
    "SBHD": "sbhd_sbhd_sbhd",
    "THD": "thd_thd_thd",
}  # Megatron's own; THD: several sequences packed into one row
_LEARNABLE_SINCE = (
    2,
    8,
)  # megatron.core.extensions.transformer_engine asserts this TransformerEngine version
_THD_CUDNN = (9, 18, 0)  # TransformerEngine 2.20.2, get_attention_backend, "Filter: Softmax type"


@dataclass(frozen=True)
class AttentionReport:
    """What computes the trainer's attention with sinks (learnable softmax). layout: "SBHD", or "THD" for packed sequences.

    windows: TransformerEngine's (left, right) of the sliding and of the full layers; (-1, 0) is full causal attention.
    """

    backend: str
    layout: str
    transformer_engine: str  # "-" on a CPU
    cudnn: str
    windows: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        windows = " and ".join(
            "full" if left < 0 else f"window ({left}, {right})" for left, right in self.windows
        )
        versions = f"TransformerEngine {self.transformer_engine}, cuDNN {self.cudnn}"
        return f"{self.backend}, {versions}, {self.layout}, learnable softmax, {windows}"


def attention_report(settings: Profile, packed: bool = False, length: int = 1024) -> AttentionReport:
    """Ask TransformerEngine which backend it takes for this profile's attention; on a CPU nothing is imported or asked.

    packed: THD instead of SBHD. length: tokens of a sequence. Raises NotReady where the fused kernels are switched off for
    bfloat16: the unfused path computes the same, but holds the scores of all pairs of tokens.
    Source: transformer_engine.pytorch.attention.dot_product_attention.utils.get_attention_backend (2.20.2).
    """
    layout, windows = "THD" if packed else "SBHD", (te_window(settings.model.sliding_window), te_window(None))
    if settings.device == "cpu":
        return AttentionReport("Megatron's DotProductAttention in plain torch", layout, "-", "-", windows)
    engine, deterministic = _version("transformer-engine"), _deterministic()
    if _numbers(engine) < _LEARNABLE_SINCE:
        raise NotReady(attention_problem("no backend", layout, engine, (0,), deterministic))
    from transformer_engine.pytorch.utils import get_cudnn_version

    cudnn = get_cudnn_version()
    found = {_te_backend(settings, layout, window, length, deterministic) for window in windows}
    report = AttentionReport(" and ".join(sorted(found)), layout, engine, ".".join(map(str, cudnn)), windows)
    if settings.model.dtype != "float32" and found != {"FusedAttention"}:  # no fused kernel takes float32
        raise NotReady(attention_problem(report.backend, layout, engine, cudnn, deterministic))
    return report


def attention_problem(
    backend: str, layout: str, engine: str, cudnn: tuple[int, ...], deterministic: bool
) -> str:
    """One sentence: which gate keeps attention with sinks from the fused kernels, and what to do.

    >>> attention_problem("UnfusedDotProductAttention", "THD", "2.20.2", (9, 17, 1), False)
    'attention with sinks would run as UnfusedDotProductAttention in THD: cuDNN 9.17.1 has no learnable softmax for packed \
sequences (verl 5224): install nvidia-cudnn 9.18 or later, or do not pack'
    """
    if _numbers(engine) < _LEARNABLE_SINCE:
        why = f"TransformerEngine {engine} has no learnable softmax: install 2.8 or later"
    elif layout == "THD" and cudnn < _THD_CUDNN:
        why = (
            f"cuDNN {'.'.join(map(str, cudnn))} has no learnable softmax for packed sequences (verl 5224): install "
            "nvidia-cudnn 9.18 or later, or do not pack"
        )
    elif deterministic:
        why = (
            "TransformerEngine switches fused attention with sinks off in deterministic mode: set "
            "NVTE_ALLOW_NONDETERMINISTIC_ALGO=1 and torch.use_deterministic_algorithms(False)"
        )
    else:
        why = (
            "run it again with NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2, and TransformerEngine says which gate it was"
        )
    return f"attention with sinks would run as {backend} in {layout}: {why}"


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, () of "-": "2.20.2+abc" -> (2, 20, 2)."""
    return tuple(int(n) for n in re.findall(r"\d+", re.match(r"[\d.]*", version)[0]))


def _deterministic() -> bool:
    """Whether TransformerEngine will be in deterministic mode; as DotProductAttention.__init__ decides it."""
    import torch

    allowed = bool(int(os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")))
    return not allowed or torch.are_deterministic_algorithms_enabled()


def _te_backend(
    settings: Profile, layout: str, window: tuple[int, int], length: int, deterministic: bool
) -> str:
    """The backend that TransformerEngine selects for one kind of layer in training."""
    import torch
    from transformer_engine.pytorch.attention.dot_product_attention import utils

    m, share = settings.model, settings.trainer.tensor_parallel
    rows = min(settings.trainer.micro_batch, settings.batch.episodes)
    tokens = rows * length if layout == "THD" else 0
    flash, _, fused, _, unfused, _ = utils.get_attention_backend(
        utils.AttentionParams(
            qkv_dtype=getattr(torch, m.dtype), qkv_layout=LAYOUTS[layout], batch_size=rows,
            num_heads=m.num_attention_heads // share, num_gqa_groups=m.num_key_value_heads // share,
            max_seqlen_q=length, max_seqlen_kv=length, num_tokens_q=tokens, num_tokens_kv=tokens,
            head_dim_qk=m.head_dim, head_dim_v=m.head_dim, softmax_scale=m.head_dim**-0.5, window_size=window,
            attn_mask_type="padding_causal" if layout == "THD" else "causal", bottom_right_diagonal=False,
            softmax_type="learnable", deterministic=deterministic, is_training=True,
        )
    )  # fmt: skip
    taken = {"FlashAttention": flash, "FusedAttention": fused, "UnfusedDotProductAttention": unfused}
    return next((name for name, chosen in taken.items() if chosen), "no backend")

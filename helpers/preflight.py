"""Is this machine ready for the profile? Checks before anything heavy starts; imports no engine.

`prepare_kernel(settings)` is the second call of every notebook that touches an engine.
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

from helpers.profiles import PROJECT_ROOT, Profile

PINNED = ("torch", "transformers", "sglang", "megatron-core", "megatron-bridge", "ray", "transformer-engine")
_NEEDED_GIB = {"cpu": (8, 2), "gpu": (24, 10), "gpu-20b": (100, 100), "cluster": (200, 100)}  # memory, disk


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
    """The readiness table for this profile: Python, plugin, memory, disk, shared memory, GPUs."""
    memory, disk = _NEEDED_GIB[settings.name]
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
        checks.append(Check("GPUs", ", ".join(gpus) or "none", len(gpus) >= wanted, advice))
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

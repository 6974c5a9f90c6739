"""What no formula gives: seconds and bytes that engines, libraries and hosts add, fitted on recorded runs.

Two fits. "small": runs of profile gpu (315 million parameters) and of a 4-layer model in gpt-oss-20b's shape,
to be judged on the 20b runs. "all": also the 20b runs, to be judged on runs with several GPUs. Nothing is
copied by hand: the constants are computed from tests/gpu/recorded and notebooks/recorded each time. `assumed`
ones are not fitted; no recorded run shows them.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import median

from helpers.memory import PHASES, parameter_count
from helpers.profiles import PROJECT_ROOT, Profile, load_profile
from helpers.throughput import Rates, rollout_limit

MEASURED, NOTEBOOKS = PROJECT_ROOT / "tests/gpu/recorded", PROJECT_ROOT / "notebooks/recorded"
FITS = ("small", "all")
GPU_TOKENS, GPU_20B_TOKENS = 512 * 64, 4 * 1536  # of a micro-batch in the recorded runs of notebook 07
# Bytes that the loss reads and writes for each of the trainer's fp32 logits, counted in helpers/logprobs.py:
# scale 8, cross-entropy 32, its second time in the backward pass 40, entropy 8 + 36, gradient out 16
LOSS_BYTES = 140
# A trained parameter: gradient read twice, master and two moments read and written, bf16 weight written
ADAM_BYTES = 34


@dataclass(frozen=True, eq=False)
class Constants:
    """Seconds unless said otherwise. `SOURCES` says where each is from."""

    rates: Rates  # measured of the card of the fit: bytes/s of a copy, FLOP/s of a square product
    host_layer: float
    host_layer_frozen: float
    optimizer: float
    request: float
    decode_step: float
    episode: float
    sync_layer: float
    sync_rate: float  # bytes/s
    load_rate: float  # bytes/s
    switch: float
    host_link: float  # bytes/s
    contexts: Mapping[str, float]  # phase -> bytes
    server_rest: float  # bytes
    baseline: float  # bytes
    after_step: float  # bytes
    reserve: float  # share
    # --- assumed
    matrix_share: float = 0.5
    link_share: float = 0.7
    latency: float = 20e-6


SOURCES = {
    "host_layer": "Python and launches of a layer and micro-batch; throughput_trainer_rounds.csv",
    "host_layer_frozen": "the same with frozen experts; small: as host_layer, all: gpu-20b's 06_train",
    "optimizer": "an optimizer step beside the bytes it moves; throughput_update_parts.csv",
    "request": "a request to the server, whatever its length; throughput_rollout_rounds.csv",
    "decode_step": "a decode step beside its reads; throughput_rollout_rounds.csv",
    "episode": "score, advantages and collate of an answer; throughput_step.csv",
    "sync_layer": "a layer's conversion and hand-over; throughput_step.csv and sync_ways.csv",
    "sync_rate": "bytes/s of export and hand-over beside that; the same",
    "load_rate": "bytes/s at which one server after the other takes the weights; sync_ways.csv",
    "switch": "the server releases its memory and takes it back; footprint_cycles.csv",
    "host_link": "bytes/s between card and pinned host memory; sync_stages.csv",
    "contexts": "bytes of the trainer's CUDA context with libraries' workspaces, by phase; gpu's 07_memory",
    "server_rest": "bytes of the server's context, graphs and workspaces; gpu's 07_memory",
    "baseline": "bytes that the trainer holds beside its tensors; gpu's 07_memory",
    "after_step": "the same, more since the first optimizer step; gpu's 07_memory",
    "reserve": "what torch's allocator keeps, as a share of what is allocated at the peak; gpu's 07_memory",
    "matrix_share": "assumed: share of the card's product rate that training reaches where it is bound by it",
    "link_share": "assumed: share of a link's data sheet that a collective reaches",
    "latency": "assumed: start of a collective",
}


def table(path: Path) -> list[dict[str, str]]:
    """Rows of a recorded CSV. Raises FileNotFoundError that names the record."""
    try:
        with path.open(newline="") as file:
            return list(csv.DictReader(line for line in file if not line.startswith("#")))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path.relative_to(PROJECT_ROOT)} is missing: planning needs the recorded GPU runs; "
            "restore it from git"
        ) from None


def recorded_phases(profile: str) -> dict[str, dict[str, int]]:
    """Phase -> item -> bytes that NVML saw in the recorded notebook 07 of a GPU profile."""
    phases: dict[str, dict[str, int]] = {}
    for row in table(NOTEBOOKS / profile / "07_memory/measured_phases.csv"):
        if row["phase"] in PHASES:
            phases.setdefault(row["phase"], {})[row["item"]] = int(row["bytes"])
    return phases


def recorded_step(profile: str) -> dict[str, float]:
    """Part -> median seconds over the steps of the recorded notebook 06, the first left out: it compiles."""
    rows = table(NOTEBOOKS / profile / "06_train/steps.csv")[1:]
    names = {
        "rollout": "rollout_seconds",
        "score": "score_seconds",
        "update": "update_seconds",
        "sync": "sync_call_seconds",
    }
    return {
        part: median(float(r[name]) for r in rows)
        for part, name in (names | {"step": "step_seconds"}).items()
    }


def recorded_first_step(profile: str) -> dict[str, float]:
    """Part -> seconds of the one step of the recorded notebook 05, the first of its process."""
    rows = table(NOTEBOOKS / profile / "05_grpo_step/clock.csv")
    clock = {r["call"]: float(r["seconds"]) for r in rows}
    parts = {"rollout": clock["roll out"], "update": clock["update"], "sync": clock["sync"]}
    return parts | {"step": sum(clock.values())}


@lru_cache(maxsize=len(FITS))
def fitted(fit: str = "all") -> Constants:
    """The constants from the recorded runs of one of FITS."""
    if fit not in FITS:
        raise ValueError(f"there is no fit {fit!r}; take one of {', '.join(FITS)}")
    settings, rates = load_profile("gpu"), measured_rates()
    parts = {r["part"]: float(r["seconds"]) for r in table(MEASURED / "throughput_update_parts.csv")}
    host = _host_layer(settings, parts["optimizer"])
    optimizer = parts["optimizer"] - parameter_count(settings) * ADAM_BYTES / rates.bandwidth
    frozen = _host_layer_20b(rates, optimizer) if fit == "all" else host
    return Constants(
        rates, host, frozen, optimizer, *_rollout(settings, rates), _episode(), *_sync(settings), _switch(),
        _host_link(), *_memory(settings),
    )  # fmt: skip


def measured_rates() -> Rates:
    """Of the recorded H200: a large copy (bytes read and written), and square bf16 products."""
    row = table(MEASURED / "throughput_limits.csv")[0]
    return Rates(float(row["copy_terabytes_per_second"]) * 1e12, float(row["product_teraflops"]) * 1e12)


def _steady(file: str, **wanted: str) -> list[dict[str, str]]:
    rows = table(MEASURED / file)
    return [r for r in rows if r["warm_up"] == "False" and all(r[k] == v for k, v in wanted.items())]


def _host_layer(settings: Profile, optimizer: float) -> float:
    """32,768 and 65,536 tokens take equally long, and so do 4,096 in notebook 07: the host is what they wait
    for."""
    rows = _steady("throughput_trainer_rounds.csv", side="MegatronTrainer.update")
    return (median(float(r["seconds"]) for r in rows) - optimizer) / settings.model.num_hidden_layers


def _host_layer_20b(rates: Rates, optimizer: float) -> float:
    settings = load_profile("gpu-20b")
    passes = settings.batch.episodes // settings.trainer.micro_batch
    loss = GPU_20B_TOKENS * settings.model.vocab_size * LOSS_BYTES / rates.bandwidth
    left = recorded_step("gpu-20b")["update"] - optimizer
    return (left / passes - loss) / settings.model.num_hidden_layers


def _rollout(settings: Profile, rates: Rates) -> tuple[float, float]:
    """(seconds a request, seconds a decode step): least squares of relative errors over 1, 64 and 256
    requests at once."""
    rows = _steady("throughput_rollout_rounds.csv", side="RolloutServer.post /generate", logprobs="True")
    points = []
    for n in sorted({int(r["concurrent"]) for r in rows}):
        seconds = median(float(r["seconds"]) for r in rows if int(r["concurrent"]) == n)
        limit = n * 256 / rollout_limit(settings.model, n, 128, 256, rates)
        points.append((n / seconds, 256 / seconds, (seconds - limit) / seconds))
    return _least_squares(points)


def _least_squares(points: list[tuple[float, float, float]]) -> tuple[float, float]:
    """(a, b) that minimise the sum of (a x + b y - z)^2.

    >>> _least_squares([(1.0, 0.0, 2.0), (0.0, 1.0, 3.0), (1.0, 1.0, 5.0)])
    (2.0, 3.0)
    """
    xx, xy, yy = (sum(p[i] * p[j] for p in points) for i, j in ((0, 0), (0, 1), (1, 1)))
    xz, yz = (sum(p[i] * p[2] for p in points) for i in (0, 1))
    scale = xx * yy - xy * xy
    return (xz * yy - yz * xy) / scale, (yz * xx - xz * xy) / scale


def _episode() -> float:
    episodes = load_profile("gpu").batch.episodes
    calls = ("score", "advantages", "collate")
    return (
        sum(median(float(r["seconds"]) for r in _steady("throughput_step.csv", call=c)) for c in calls)
        / episodes
    )


def _sync(settings: Profile) -> tuple[float, float, float]:
    """(seconds a layer, bytes/s) from two models: many layers and few bytes, few layers and many bytes;
    bytes/s of a server."""
    small = median(float(r["seconds"]) for r in _steady("throughput_step.csv", call="sync"))
    rows = [r for r in table(MEASURED / "sync_ways.csv") if r["total_seconds"]]
    large = median(float(r["total_seconds"]) for r in rows if r["way"] == "ipc")
    load = median(float(r["send_seconds"]) for r in rows if r["way"] == "ipc, in turn")
    size = float(rows[0]["gigabytes"]) * 1e9
    layer, byte = _least_squares(
        [(settings.model.num_hidden_layers, 2.0 * parameter_count(settings), small), (4, size, large)]
    )
    return layer, 1 / byte, size / load


def _switch() -> float:
    rows = table(MEASURED / "footprint_cycles.csv")
    return sum(median(float(r[name]) for r in rows) for name in ("release_seconds", "resume_seconds"))


def _host_link() -> float:
    rows = {r["stage"]: r for r in table(MEASURED / "sync_stages.csv")}
    weights = rows["weights: in host memory"]
    return float(weights["gigabytes"]) * 1e9 / float(weights["seconds"])


def _memory(settings: Profile) -> tuple[dict[str, float], float, float, float, float]:
    """(contexts by phase, rest of the server, baseline, more after the optimizer's step, reserve's share)."""
    found = recorded_phases(settings.name)
    contexts = {phase: float(items["CUDA context"]) for phase, items in found.items()}
    rest = float(max(items["rest of server"] for items in found.values()))
    baseline = float(found["load"]["working memory"])
    after = found["resume"]["working memory"] - baseline
    peak = {name: size for name, size in found["forward-backward"].items() if name != "allocator's reserve"}
    allocated = sum(
        size for name, size in peak.items() if name.startswith("trainer") or name == "working memory"
    )
    return (
        contexts,
        rest,
        baseline,
        float(after),
        found["forward-backward"]["allocator's reserve"] / allocated,
    )

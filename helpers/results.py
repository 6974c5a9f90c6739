"""What a notebook leaves behind: metrics.json, CSV series, and the one list that says what each
metric means.

Left out on purpose: dashboards and experiment trackers. A run is a folder of small text files and
pictures,
the same schema for a live run and a recorded one.
Imports the standard library only, so that the runner, the report and the tests read results
without torch.
"""

from __future__ import annotations

import csv
import json
import logging
import math
import numbers
import os
import platform
import shutil
import subprocess
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from helpers.messages import one_line

log = logging.getLogger(__name__)

SCHEMA = 1
METRICS_FILE = "metrics.json"
SERIES_FILE = "series.json"
COMMIT_VARIABLE = "GRPO_COMMIT"
PROJECT_ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "torch", "transformers", "megatron-core", "megatron-bridge", "sglang", "ray", "transformer-engine",
    "papermill", "numpy", "matplotlib",
)  # fmt: skip
FIELDS: dict[str, type | tuple[type, ...]] = {
    "schema": int, "notebook": str, "profile": str, "status": str, "seed": int, "commit": str,
    "hardware": dict, "versions": dict, "command": str, "seconds": (int, float), "metrics": dict,
    "units": dict, "series": dict,
}  # fmt: skip
# of series.json and of its entries, one a notebook; float: any finite number
SERIES_FIELDS: dict[str, type] = {
    "status": str, "seconds": float, "peak_pss_gib": float, "peak_processes": list, "problem": str, "finished": str,
    "command": str, "commit": str, "processes_left": int,
}  # fmt: skip


class ResultError(ValueError):
    """A result is missing, broken, or not what its registration says. The message names the next
    command."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


@dataclass(frozen=True)
class Metric:
    """One number that a notebook may record.

    unit: "1" for a plain number or share.  meaning: one sentence, shown in README and report.
    low, high: healthy range, both ends included; None leaves that end open. It is a guide for
    reading; what a
    run MUST show stands in notebooks/expectations/<profile>.toml.
    """

    unit: str
    meaning: str
    low: float | None = None
    high: float | None = None

    def healthy(self, value: float) -> bool:
        """Whether `value` lies in the healthy range."""
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    def range_text(self) -> str:
        """The healthy range in words: "0", "0 to 1", "at least 0", "at most 3" or "any"."""
        if self.low is not None and self.low == self.high:
            return f"{self.low:g}"
        if self.low is not None and self.high is not None:
            return f"{self.low:g} to {self.high:g}"
        if self.low is not None:
            return f"at least {self.low:g}"
        return "any" if self.high is None else f"at most {self.high:g}"


METRICS: dict[str, Metric] = {
    # 00 environment
    "patches_checked": Metric("count", "upstream sources whose hash was compared with the patch manifest", 1),
    "patches_moved": Metric(
        "count", "patched upstream sources that are not what the patch manifest recorded", 0, 0
    ),
    "machine_checks_failed": Metric("count", "lines of the readiness table that failed", 0, 0),
    "versions_off_pin": Metric("count", "engines whose installed version is not the pinned one", 0, 0),
    # 01 gpt-oss
    "tiny_parameters": Metric(
        "count", "parameters of the tiny gpt-oss, counted from its config and in the model", 1
    ),
    "gpt_oss_20b_parameters": Metric(
        "count",
        "parameters of gpt-oss-20b, counted from its config",
        20_914_757_184,
        20_914_757_184,
    ),
    "gpt_oss_20b_bf16_gigabytes": Metric(
        "GB", "tensor data of a bfloat16 checkpoint of gpt-oss-20b", 41.82, 41.84
    ),
    "gpt_oss_20b_mxfp4_gigabytes": Metric(
        "GB", "tensor data of the MXFP4 checkpoint of gpt-oss-20b", 13.75, 13.77
    ),
    "sink_identity_max_abs": Metric(
        "1",
        "largest difference, outputs and gradients: softmax with a sink column, rescaled plain softmax",
        0,
        1e-10,
    ),
    "window_leak_max_abs": Metric(
        "1",
        "largest change of a sliding layer's output when a token outside its window changes",
        0,
        0,
    ),
    "mxfp4_decode_max_abs": Metric(
        "1", "largest difference of an MXFP4 weight, our decoder and transformers'", 0, 0
    ),
    # 02 bridge
    "export_missing": Metric("count", "tensors of the checkpoint that the exported model lacks", 0, 0),
    "export_extra": Metric("count", "exported tensors that the checkpoint does not have", 0, 0),
    "export_unequal": Metric("count", "exported tensors that differ from the checkpoint in any bit", 0, 0),
    "parity_megatron_hf_max_abs_logit": Metric(
        "logit",
        "largest difference of a logit, Megatron against Hugging Face, same weights and tokens",
        0,
        1e-4,
    ),
    "parity_gradient_max_relative": Metric(
        "1",
        "largest difference of a gradient, Megatron against Hugging Face, as a share of its tensor's largest",
        0,
        1e-3,
    ),
    "parity_trained_max_abs_logit": Metric(
        "logit",
        "the same difference of a logit after the warm start, through the exported checkpoint",
        0,
        1e-3,
    ),
    "parity_kinds": Metric(
        "count", "kinds of tensor (by layer kind) compared alone, Megatron against Hugging Face, forward and backward", 37
    ),
    "parity_kinds_failed": Metric(
        "count",
        "of these, kinds that differ by more than 1e-4 of the largest logit or 1e-3 of the size of their gradient's terms",
        0,
        0,
    ),
    "faults_planted": Metric("count", "known mistakes of other engines, put into the reference one at a time", 20),
    "faults_unseen": Metric("count", "of these, mistakes that the comparison of logits does not see (in bf16 more)", 0, 3),
    # 03 rollout
    "parity_sglang_hf_max_abs_logprob": Metric(
        "nat", "largest difference of a token's logprob, SGLang against Hugging Face", 0, 1e-3
    ),
    "rollout_tokens_per_second": Metric("token/s", "new tokens a second while SGLang generates", 1),
    "sync_kinds_checked": Metric(
        "count", "kinds of tensor changed alone, sent to the running server and compared", 20
    ),
    "sync_max_abs_logprob_error": Metric(
        "nat",
        "largest difference of a logprob after such a sync, SGLang against Hugging Face with the same change",
        0,
        1e-4,
    ),
    "sync_min_abs_logprob_change": Metric(
        "nat",
        "largest change of a logprob by a sync, of the kind that changes it least: above 0, none was dropped",
        1e-2,
    ),
    # 04 the maths
    "hand_vs_code_max_abs": Metric(
        "1", "largest difference of a value worked by hand and the code's", 0, 1e-6
    ),
    # 05 one step
    "sync_seconds_max": Metric("s", "slowest hand-over of new weights from trainer to rollout engine", 0, 5),
    "sync_follow_max_abs_logprob": Metric(
        "nat", "largest |server logprob - trainer logprob| after the server took the new weights", 0, 1e-4
    ),
    # 06 training
    "resume_max_abs_logprob": Metric(
        "nat", "largest change of a logprob by loading the trainer checkpoint back", 0, 1e-6
    ),
    "warm_start_loss": Metric("nat/token", "cross-entropy at the end of the supervised warm start", 0, 1.5),
    "heldout_before": Metric("1", "share of held-out questions answered right (greedy) before GRPO", 0, 1),
    "heldout_after": Metric("1", "share of held-out questions answered right (greedy) after GRPO", 0, 1),
    "heldout_gain": Metric("1", "heldout_after minus heldout_before", 0, 1),
    "reward_first10": Metric("1", "mean reward of the first ten steps", 0, 1),
    "reward_last10": Metric("1", "mean reward of the last ten steps", 0, 1),
    "completion_length_first10": Metric("token", "mean completion length of the first ten steps", 1),
    "completion_length_last10": Metric("token", "mean completion length of the last ten steps", 1),
    "entropy_last10": Metric("nat", "mean entropy of the policy's next-token choice, last ten steps", 0.01),
    "zero_variance_share": Metric(
        "1", "share of groups whose answers all got one reward: no gradient", 0, 0.6
    ),
    "step_seconds_median": Metric("s", "median wall time of one GRPO step", 0),
    "rollout_seconds_median": Metric("s", "median wall time of the rollout in a step", 0),
    "update_seconds_median": Metric("s", "median wall time of the trainer's update in a step", 0),
    # 07 memory
    "peak_pss_gib": Metric(
        "GiB", "peak memory of the notebook's processes, shared pages counted once (PSS)", 0
    ),
    "peak_gpu_gib": Metric("GiB", "peak GPU memory of the notebook's processes by NVML, CUDA contexts included", 0),
    "ledger_max_error": Metric(
        "1", "largest relative difference of a static tensor's bytes, predicted and measured", 0, 0.1
    ),
    "activation_bytes_halved": Metric(
        "1", "bytes kept for backward with half the micro-batch, as a share of those with the whole", 0.4, 0.6
    ),
    # 08 mismatch
    "logprob_gap_mean": Metric(
        "nat",
        "mean |trainer logprob - rollout logprob| right after a weight sync (of many steps: the largest)",
        0,
        1e-3,
    ),
    "logprob_gap_max": Metric(
        "nat", "largest |trainer logprob - rollout logprob| right after a weight sync", 0, 1e-2
    ),
    "generation_kl": Metric(
        "nat",
        "KL(rollout || trainer) a token, by k3, right after a weight sync (of many steps: the largest)",
        0,
        2e-3,
    ),
    "token_multiplier": Metric(
        "1",
        "mean of exp |trainer - rollout logprob|, right after a weight sync (of many steps: the largest)",
        1,
        1.05,
    ),
    "kept_share": Metric(
        "1",
        "share of trained tokens to which the recipe's correction leaves a weight (of many steps: the smallest)",
        0.5,
        1,
    ),
    # mismatch raised on purpose: no range is healthy but a wide one, notebooks/expectations says what must show
    "mismatch_kl_bf16": Metric("nat", "generation KL when the rollout's weights are rounded to bfloat16", 0),
    "mismatch_kl_int8": Metric("nat", "generation KL when its attention and experts are on an int8 grid", 0),
    "mismatch_kl_mxfp4": Metric("nat", "generation KL when its experts are in MXFP4", 0),
    "mismatch_kl_int4": Metric("nat", "generation KL when its attention and experts are on an int4 grid", 0),
    "mismatch_kl_routers": Metric("nat", "generation KL when its routers carry noise of a tenth of their size", 0),
    "mismatch_kl_temperature": Metric(
        "nat", "generation KL when the trainer does not know of the rollout's temperature, 0.7", 0
    ),
    "mismatch_kl_stale4": Metric("nat", "generation KL when the rollout's weights are four GRPO steps old", 0),
    "router_kl_left": Metric(
        "1", "of the noisy routers' generation KL, the share left when the trainer replays the experts", 0, 1
    ),
    "heldout_no_mismatch": Metric("1", "held-out accuracy (greedy) after an arm without mismatch", 0, 1),
    "heldout_off": Metric("1", "the same with a rollout four steps behind and no remedy", 0, 1),
    "heldout_ratio": Metric("1", "the same with the mismatch inside the clipped ratio", 0, 1),
    "heldout_tis": Metric("1", "the same with truncated importance sampling", 0, 1),
    # 09 planning
    "planner_memory_max_error": Metric(
        "1", "largest relative error of predicted GPU memory over the phases of a recorded run that the planner was not fitted on", 0, 0.1
    ),
    "planner_step_max_error": Metric(
        "1", "largest relative error of a predicted step's seconds among recorded runs that the planner was not fitted on", 0, 0.25
    ),
    # every notebook that starts processes
    "processes_left": Metric("count", "processes of the notebook still alive after its teardown", 0, 0),
}


def _registered(name: str) -> Metric:
    if name not in METRICS:
        raise ResultError(
            f"metric {name!r} is not registered. Known: {', '.join(sorted(METRICS))}. "
            "Correct the name, or add it with unit and meaning to METRICS in helpers/results.py."
        )
    return METRICS[name]


def _finite(name: str, value: Any) -> int | float:
    """`value` as a plain finite number; 0-d arrays and tensors go through their item()."""
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ResultError(f"metric {name!r} needs one number, got {type(value).__name__} {value!r:.60}")
    if not math.isfinite(value):
        raise ResultError(
            f"metric {name!r} is {value}: something upstream diverged or was divided by zero. "
            "Look at the cell that computed it; a result that is not finite is never stored."
        )
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old text or the whole new text, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)


def write_csv(path: Path, columns: Mapping[str, Iterable[Any]], note: str = "") -> None:
    """Write named columns of one length as CSV with a header line; note: a line "# ..." above it."""
    lists = {name: [_plain(v) for v in values] for name, values in columns.items()}
    lengths = {name: len(values) for name, values in lists.items()}
    if not lists or len(set(lengths.values())) > 1:
        raise ResultError(f"{path.name} needs columns of one length, got {lengths or 'none'}")
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with draft.open("w", newline="", encoding="utf-8") as file:
        if note:
            file.write(f"# {note}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(lists)
        writer.writerows(zip(*lists.values(), strict=True))
    os.replace(draft, path)


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]], note: str = "") -> None:
    """Write records as CSV with a header line; a name that a record lacks is an empty cell. note: as write_csv's.

    Raises ResultError without rows.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    write_csv(path, {name: [row.get(name, "") for row in rows] for name in names}, note)


def write_measured(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """write_rows of a measurement: the first line says date, commit and machine; numbers have six digits."""
    machine = hardware()
    place = ", ".join(machine["gpus"]) or f"{machine['cpu']}, {machine['cores']} cores"
    short = [{k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows]
    write_rows(path, short, f"{time.strftime('%Y-%m-%d', time.gmtime())}, commit {git_commit()}, {place}")


def _plain(value: Any) -> Any:
    """A Python scalar for a tensor or array element; anything else as it is."""
    return value.item() if hasattr(value, "item") and getattr(value, "shape", None) == () else value


def git_commit(root: Path = PROJECT_ROOT) -> str:
    """The commit of the tree, "+dirty" behind it when files differ from it, "unknown" without git.

    `runs/` does not count as a change: a run must not make its own record dirty.
    """
    commit = _output(["git", "-C", str(root), "rev-parse", "--verify", "-q", "HEAD"])
    if not commit:
        # a copy without its history (a GPU host): whoever copied a clean checkout says which one it was
        return os.environ.get(COMMIT_VARIABLE, "unknown")
    dirty = _output(["git", "-C", str(root), "status", "--porcelain", "--", ".", ":(exclude)runs"])
    return commit + ("+dirty" if dirty else "")


def _output(command: Sequence[str], seconds: float = 20) -> str:
    """What a command prints, stripped; "" when it is missing, fails or takes too long."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("%s gave no answer: %s", command[0], error)
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def hardware() -> dict[str, Any]:
    """CPU model, usable cores, memory in GiB, names of GPUs and their driver's version (empty without nvidia-smi)."""
    gpus = _output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])
    driver = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return {
        "cpu": _proc_field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(_memory_kib() / 2**20, 1),
        "gpus": [line.strip() for line in gpus.splitlines() if line.strip()],
        "driver": driver.splitlines()[0].strip() if driver.strip() else "",
        "system": f"{platform.system()} {platform.release()}",
    }


def _proc_field(path: str, field: str) -> str:
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(field)), "")


def _memory_kib() -> int:
    words = _proc_field("/proc/meminfo", "MemTotal").split()
    return int(words[0]) if words and words[0].isdigit() else 0


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Installed versions by distribution name, read from metadata: nothing is imported."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


class NotebookRun:
    """The results of one notebook while it runs.

        run = NotebookRun("04_grpo_math", settings)
        run.record("hand_vs_code_max_abs", 0.0)
        run.series("clip", {"ratio": [0.8, 1.0], "loss": [0.1, 0.2]})
        run.finish()

    name: "NN_name", the notebook's file name without suffix.  settings: a Profile (`name`, `seed`
    and
    `run_folder(name) -> Path` are used).  A metrics.json of an earlier run is removed at once, so
    that a run
    which stops half-way cannot pass for finished.
    """

    def __init__(self, name: str, settings: Any) -> None:
        self.name = name
        self.settings = settings
        self.folder = Path(settings.run_folder(name))
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / METRICS_FILE).unlink(missing_ok=True)
        self.metrics: dict[str, int | float] = {}
        self.series_files: dict[str, str] = {}
        self._start = time.monotonic()

    def record(self, name: str, value: Any) -> None:
        """Keep one finite number under a name registered in METRICS; a second value replaces the
        first."""
        _registered(name)
        self.metrics[name] = _finite(name, value)

    def series(self, name: str, columns: Mapping[str, Iterable[Any]]) -> None:
        """Write columns of one length to <name>.csv in the run folder and list it in
        metrics.json."""
        path = self.folder / f"{file_stem(name)}.csv"
        write_csv(path, columns)
        self.series_files[name] = path.name

    def finish(self) -> None:
        """Write metrics.json (status "ok") atomically. Call it in the last cell.

        It returns nothing, since a notebook would show a returned path of this machine in its
        stored output.
        """
        write_atomically(self.folder / METRICS_FILE, json.dumps(self._record(), indent=1) + "\n")

    def _record(self) -> dict[str, Any]:
        profile = str(self.settings.name)
        return {
            "schema": SCHEMA,
            "notebook": self.name,
            "profile": profile,
            "status": "ok",
            "seed": int(self.settings.seed),
            "commit": git_commit(),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "hardware": hardware(),
            "versions": versions(),
            "command": os.environ.get("SERIES_COMMAND") or command_for(profile, self.name),
            "seconds": round(time.monotonic() - self._start, 3),
            "metrics": dict(self.metrics),
            "units": {name: METRICS[name].unit for name in self.metrics},
            "series": dict(self.series_files),
        }


def command_for(profile: str, notebook: str) -> str:
    """The command that runs one notebook again."""
    return f"python -m helpers.series run --profile {profile} --only {notebook.split('_', 1)[0]}"


def file_stem(name: str) -> str:
    """`name` if it can be a file name everywhere, else ResultError."""
    if not name or not all(c.isalnum() or c in "_-" for c in name):
        raise ResultError(f"{name!r} cannot be a file name: use letters, digits, '_' and '-' only")
    return name


def read_metrics(path: Path | str) -> dict[str, Any]:
    """Read and validate a metrics.json (schema 1).

    Raises ResultError naming the file and the next command when it is missing, truncated, of
    another schema,
    lacks a field or holds a value that is not finite.
    """
    path = Path(path)
    if os.path.isdir(path):  # False, not an error, for a name that is too long
        path = path / METRICS_FILE
    record = _parse(path, _rerun(path))
    problem = _problem(record) or _unwritable(record)
    if problem:
        raise ResultError(f"{path}: {problem}. {_rerun(path)}")
    return record


def read_series_file(runs: Path | str) -> dict[str, Any]:
    """series.json of runs/<profile>: what the runner wrote down of each notebook.

    Raises ResultError naming the file when it is missing, truncated, or holds a value of a wrong type.
    """
    path = Path(runs) / SERIES_FILE
    again = f"Run the series again: python -m helpers.series run --profile {path.parent.name}"
    record = _parse(path, again)
    problem = _series_problem(record) or _unwritable(record)
    if problem:
        raise ResultError(f"{path}: {problem}. {again}")
    return record


def _series_problem(record: Any) -> str:
    """What is wrong with a parsed series.json, or ""."""
    if not isinstance(record, dict) or not isinstance(record.get("notebooks"), list):
        return "holds no list of notebooks"
    entries = record["notebooks"]
    if not all(isinstance(entry, dict) and isinstance(entry.get("notebook"), str) for entry in entries):
        return "has an entry without the name of its notebook"
    wrong = [name for entry in (record, *entries) for name in SERIES_FIELDS if not _fits(entry, name)]
    if not wrong and not all(_is_process(p) for entry in entries for p in entry.get("peak_processes", ())):
        wrong.append("peak_processes")
    return f"has a value of the wrong type in {', '.join(dict.fromkeys(wrong))}" if wrong else ""


def _is_process(item: Any) -> bool:
    return isinstance(item, dict) and isinstance(item.get("process"), str) and _is_finite_number(item.get("pss_mib"))


def _fits(entry: Mapping[str, Any], name: str) -> bool:
    """Whether a field of series.json has its type, where it is there at all."""
    if name not in entry:
        return True
    kind = SERIES_FIELDS[name]
    return _is_finite_number(entry[name]) if kind is float else isinstance(entry[name], kind)


def _unwritable(record: Any) -> str:
    """What keeps a parsed record from being written again, as the report does, or ""."""
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError) as error:
        return f"cannot be written as text again ({type(error).__name__})"
    return ""


def _rerun(path: Path) -> str:
    notebook, profile = path.parent.name, path.parent.parent.name or "cpu"
    return f"Run the notebook again: {command_for(profile, notebook)}"


def _parse(path: Path, again: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ResultError(
            f"{path} does not exist: the notebook has not finished yet. {again}"
        ) from None
    except json.JSONDecodeError as error:
        raise ResultError(
            f"{path} is not valid JSON (line {error.lineno}: {error.msg}); it may be truncated. {again}"
        ) from error
    except (OSError, ValueError, RecursionError) as error:  # no UTF-8, a number of 5,000 digits, nested too deeply
        raise ResultError(f"{path} cannot be read ({error}). {again}") from error


def _problem(record: Any) -> str:
    """What is wrong with a parsed record, or ""."""
    if not isinstance(record, dict):
        return "holds no JSON object"
    if record.get("schema") != SCHEMA:
        return f"has schema {record.get('schema')!r}, this code reads schema {SCHEMA}"
    missing = [field for field in FIELDS if field not in record]
    if missing:
        return f"lacks {', '.join(missing)}"
    wrong = [field for field, kind in FIELDS.items() if not isinstance(record[field], kind)]
    if wrong:
        return f"has a value of the wrong type in {', '.join(wrong)}"
    mixed = [field for field in ("units", "versions", "series") if not _all_text(record[field].values())]
    if mixed or not _all_text(record["hardware"].get("gpus", [])):
        return f"has something else than text in {', '.join(mixed) or 'hardware.gpus'}"
    bad = [name for name, value in record["metrics"].items() if not _is_finite_number(value)]
    if not _is_finite_number(record["seconds"]):
        bad.append("seconds")
    return f"holds metrics that are no finite numbers: {', '.join(bad)}" if bad else ""


def _all_text(values: Any) -> bool:
    return isinstance(values, Iterable) and all(isinstance(value, str) for value in values)


def _is_finite_number(value: Any) -> bool:
    """Whether it is a number that a float can hold: JSON may have NaN, or an int of 400 digits."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return math.isfinite(value) if isinstance(value, float) else abs(value) < 2**1023


def skipped_cells(notebook: Path | str) -> list[int]:
    """Numbers (from 1, markdown counted) of code cells with source that were never executed.

    notebook: an executed .ipynb.  Source of the rule: the kernel counts executions, so a cell that
    ran has an
    execution_count and one that was skipped has none.  Raises ResultError for a file that is no notebook.
    """
    path = Path(notebook)
    record = _parse(path, _rerun(path))
    try:
        return [
            number
            for number, cell in enumerate(record["cells"], start=1)
            if cell["cell_type"] == "code" and "".join(cell["source"]).strip() and not cell.get("execution_count")
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise ResultError(f"{path} is no notebook ({type(error).__name__}: {error}). {_rerun(path)}") from error


def check_expectations(runs_dir: Path | str, expectations: Path | str) -> list[str]:
    """Compare a profile's results with what they must show; returns one sentence for each failure.

    runs_dir: runs/<profile>.  expectations: a TOML file with one table a notebook, for example
        [06_train]
        heldout_gain = {min = 0.2}
        processes_left = {max = 0}
    An empty table asks only that the notebook finished.
    """
    path = Path(expectations)
    try:
        wanted = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ResultError(
            f"{path} cannot be read as expectations: {error}. Correct the TOML file."
        ) from error
    flat = [name for name, bounds in wanted.items() if not isinstance(bounds, dict)]
    if flat:
        raise ResultError(f"{path}: {flat[0]} is no table of bounds. Write [{flat[0]}] above them.")
    failures: list[str] = []
    for notebook, bounds in wanted.items():
        failures += _check_notebook(Path(runs_dir) / notebook, bounds)
    return failures


def _check_notebook(folder: Path, bounds: Mapping[str, Mapping[str, float]]) -> list[str]:
    try:
        record = read_metrics(folder / METRICS_FILE)
    except ResultError as error:
        return [f"{folder.name}: {error}"]
    failures = (
        [] if record["status"] == "ok" else [f"{folder.name}: status is {record['status']!r}, not 'ok'"]
    )
    executed = folder / f"{folder.name}.ipynb"
    try:
        skipped = skipped_cells(executed) if os.path.isfile(executed) else []
    except ResultError as error:
        failures.append(f"{folder.name}: {error}")
        skipped = []
    if skipped:
        failures.append(f"{folder.name}: code cells {skipped} were not run")
    for name, bound in bounds.items():
        failures += _check_bound(folder.name, name, bound, record["metrics"])
    return failures


def _check_bound(notebook: str, name: str, bound: Any, metrics: Mapping[str, float]) -> list[str]:
    where = f"{notebook}: {name}"
    if name not in METRICS:
        return [f"{where} is expected but not registered in METRICS (helpers/results.py)"]
    right = isinstance(bound, dict) and bound and not set(bound) - {"min", "max"}
    if not right or not all(map(_is_finite_number, bound.values())):
        return [f"{where}: a bound is written {{min = ..., max = ...}}, both numbers, got {bound!r:.200}"]
    if name not in metrics:
        return [f"{where} was not recorded"]
    value, unit = metrics[name], METRICS[name].unit
    shown = f"{value:g}" + ("" if unit == "1" else f" {unit}")
    failures = []
    if "min" in bound and value < bound["min"]:
        failures.append(f"{where} is {shown}, expected at least {bound['min']:g}")
    if "max" in bound and value > bound["max"]:
        failures.append(f"{where} is {shown}, expected at most {bound['max']:g}")
    return failures


def metrics_table_markdown(names: Iterable[str] | None = None) -> str:
    """The README's table: metric, unit, meaning, healthy range. `names` None takes all, in
    METRICS' order."""
    rows = ["| metric | unit | what it says | healthy |", "|---|---|---|---|"]
    for name in METRICS if names is None else names:
        metric = _registered(name)
        meaning = metric.meaning.replace("|", "\\|")
        rows.append(f"| `{name}` | {metric.unit} | {meaning} | {metric.range_text()} |")
    return "\n".join(rows)

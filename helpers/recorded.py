"""Keep a finished run in the repository: executed notebooks, figures, CSV and metrics under notebooks/recorded/<profile>.

    python -m helpers.recorded --profile cpu                    # also brings the README's tables up to date
    python -m helpers.recorded --profile gpu-20b --runs FOLDER --only 00 07   # a run that was brought here from a GPU host

Refuses a run that is incomplete (without --only), failed, mixed from several commits, or made with uncommitted changes: a
recorded figure must name the code that made it.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from helpers.messages import OneLineParser, one_line
from helpers.profiles import PROFILES, PROJECT_ROOT, load_profile
from helpers.results import METRICS, read_metrics, read_series_file

SIZE_LIMIT = 1_500_000  # bytes of one executed notebook
KEPT = (".csv", ".png", ".json", ".txt")


class RecordError(ValueError):
    """The run cannot be recorded; the message says why."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def record_run(runs: Path, target: Path, only: Sequence[str] = ()) -> list[Path]:
    """Copy every notebook's results from `runs` to `target`; returns the executed notebooks written. Raises RecordError.

    only: numbers ("00") of the notebooks that were run, where a profile does not run them all.
    """
    names = sorted(p.stem for p in (PROJECT_ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
    unknown = sorted(set(only) - {name[:2] for name in names})
    if unknown:
        raise RecordError(f"no notebook {', '.join(unknown)}; there are {', '.join(name[:2] for name in names)}")
    names = [name for name in names if not only or name[:2] in only]
    lost = {p.name for p in target.glob("[0-9][0-9]_*")} - set(names)
    if lost:
        raise RecordError(f"{target.name} holds {', '.join(sorted(lost))}, which this run does not replace: run them too")
    records = {name: read_metrics(runs / name / "metrics.json") for name in names}
    commits = {r["commit"] for r in records.values()}
    if len(commits) != 1 or any("dirty" in commit or commit == "unknown" for commit in commits):
        raise RecordError(
            f"the run was made at {sorted(commits)}: commit everything, run the whole series again, then record it"
        )
    fresh = target.with_name(f".{target.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        written = [_record_notebook(runs / name, fresh / name) for name in names]
        series = read_series_file(runs)
        (fresh / "series.json").write_text(json.dumps(series, indent=1) + "\n")
        shutil.rmtree(target, ignore_errors=True)
        fresh.rename(target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return [target / path.relative_to(fresh) for path in written]


def _record_notebook(source: Path, target: Path) -> Path:
    target.mkdir(parents=True)
    for file in sorted(source.iterdir()):
        if file.suffix in KEPT and file.is_file():
            shutil.copy(file, target / file.name)
    executed = json.loads((source / f"{source.name}.ipynb").read_text())
    _slim(executed)
    path = target / f"{source.name}.ipynb"
    path.write_text(json.dumps(executed, indent=1, ensure_ascii=False) + "\n")
    if path.stat().st_size > SIZE_LIMIT:
        raise RecordError(
            f"{path.name} is {path.stat().st_size / 1e6:.1f} MB, the limit is {SIZE_LIMIT / 1e6:.1f}: use fewer dots an inch"
        )
    return path


def _slim(notebook: dict) -> None:
    """Drop each picture's HTML twin (GitHub shows the PNG), and what the runner adds about its own machine."""
    notebook["metadata"].pop("papermill", None)
    for cell in notebook["cells"]:
        cell["metadata"].pop("papermill", None)
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                output["data"].pop("text/html", None)


def recorded_label(profile: str, notebook: str, root: Path | None = None) -> str:
    """Where, when and with what a recorded notebook ran, in one line; "" where there is no such record."""
    folder = (root or PROJECT_ROOT / "notebooks" / "recorded") / profile / notebook
    if not (folder / "metrics.json").is_file():
        return ""
    record = read_metrics(folder / "metrics.json")
    return f"RECORDED, not run here: profile {profile}, {_where_and_when(record, load_profile(profile).trainer.ranks)}"


def _where_and_when(record: Mapping, used: int) -> str:
    """Card, versions, date and commit of a record. used: how many of the machine's cards took part."""
    hardware, packages = record["hardware"], record["versions"]
    lacking = {"gpus", "cores", "driver"} - hardware.keys()
    if lacking:
        raise RecordError(f"the record does not say what it ran on: its hardware lacks {', '.join(sorted(lacking))}")
    names = ("torch", "sglang", "megatron-core", "transformer-engine")
    stack = ", ".join(f"{name} {packages[name]}" for name in names if name in packages)
    cards = hardware["gpus"]
    if not isinstance(cards, list):
        raise RecordError(f"the record does not say what it ran on: its gpus are {type(cards).__name__}, not a list")
    others = f" of {len(cards)} in the machine" if len(cards) > used else ""
    card = f"{used} {cards[0]}{others} (driver {hardware['driver']})" if cards else f"{hardware['cores']} CPU cores"
    return f"{card}, {stack}, {record.get('date', 'date unknown')}, commit {record['commit'][:7]}"


def show_recorded(profile: str, notebook: str, name: str) -> None:
    """Show a figure (name.png) or a table (name.txt) of a recorded run below its label, or say that there is none."""
    from IPython.display import Image, display

    folder = PROJECT_ROOT / "notebooks" / "recorded" / profile / notebook
    label, picture, table = recorded_label(profile, notebook), folder / f"{name}.png", folder / f"{name}.txt"
    if not label or not (picture.is_file() or table.is_file()):
        print(f"no recorded run of profile {profile}, notebook {notebook}, with {name}")
        return
    print(label)
    if picture.is_file():
        display(Image(filename=str(picture)), metadata={"image/png": {"alt": f"{name}: {label}"}})
    else:
        print(table.read_text())


def recorded_rows(name: str) -> list[dict[str, str]]:
    """Rows of tests/gpu/recorded/<name>; prints first where, when and by which command they were measured."""
    folder = PROJECT_ROOT / "tests" / "gpu" / "recorded"
    about = json.loads((folder / "about.json").read_text())
    facts = about[name] if "same as" not in about[name] else about[about[name]["same as"]]
    print(f"RECORDED, not run here: {_where_and_when(facts, used=1)}\n  {facts['command']}\n  {facts['note']}")
    with (folder / name).open(newline="") as file:
        return list(csv.DictReader(file))


QUESTIONS = {  # what each page answers, for the README's table
    "00_environment": "is this machine ready, and which versions fit together?",
    "01_gpt_oss": "what is inside gpt-oss, and where do its 20.9 billion parameters sit?",
    "02_bridge": "how do Hugging Face weights become a Megatron model and come back bit-exact?",
    "03_rollout": "how does SGLang sample groups of answers, and take new weights while it is up?",
    "04_grpo_math": "what do advantages, clipping, KL and the two ratios do?",
    "05_grpo_step": "what happens in one GRPO step?",
    "06_train": "does GRPO teach the policy anything on questions it never saw?",
    "07_memory": "where does memory go in a GRPO step, and what does a smaller micro-batch cure?",
    "08_mismatch": "why do rollout and trainer disagree, and what do TIS, MIS and routing replay do about it?",
    "09_planning": "which parallel layout fits which cluster, what does a step cost there, and why?",
}


def notebook_table(recorded: Path) -> str:
    """The README's table of notebooks, from a recorded run: question, seconds, peak memory of all processes.

    Raises ResultError for a series.json that cannot be read, RecordError for one that lacks what the table shows.
    """
    entries = read_series_file(recorded)["notebooks"]
    bare = [e["notebook"] for e in entries if not {"seconds", "peak_pss_gib"} <= e.keys() or e["notebook"] not in QUESTIONS]
    if bare or not entries:
        raise RecordError(f"{recorded / 'series.json'} lacks seconds, peak_pss_gib or a known notebook: {bare or 'no entry'!r:.200}")
    rows = ["| notebook | question it answers | seconds | peak GiB |", "|---|---|---|---|"]
    for e in entries:
        name = e["notebook"]
        link = f"[{name}](notebooks/recorded/{recorded.name}/{name}/{name}.ipynb)"
        rows.append(f"| {link} | {QUESTIONS[name]} | {e['seconds']:.0f} | {e['peak_pss_gib']:.1f} |")
    rows.append(
        f"| all | | {sum(e['seconds'] for e in entries):.0f} | {max(e['peak_pss_gib'] for e in entries):.1f} |"
    )
    return "\n".join(rows)


def figures_table(recorded: Path, chosen: Mapping[str, Sequence[str]] | None = None) -> str:
    """The README's table of key figures: metric, value, unit, meaning, from the recorded metrics.json files.

    chosen: notebook -> metrics; KEY_METRICS unless given.
    """
    chosen = KEY_METRICS if chosen is None else chosen
    rows = ["| notebook | metric | value | unit | what it is |", "|---|---|---|---|---|"]
    for folder in sorted(p for p in recorded.iterdir() if p.is_dir()):
        record = read_metrics(folder / "metrics.json")
        for name in chosen.get(folder.name, ()):
            if name not in record["metrics"]:  # a run with SAVE_EVERY = 0 resumes nothing
                continue
            metric = METRICS[name]
            rows.append(
                f"| {folder.name[:2]} | `{name}` | {record['metrics'][name]:.4g} | {metric.unit} | {metric.meaning.replace('|', chr(92) + '|')} |"
            )
    return "\n".join(rows)


KEY_METRICS = {
    "02_bridge": (
        "parity_megatron_hf_max_abs_logit", "parity_gradient_max_relative", "parity_kinds", "parity_kinds_failed",
        "faults_planted", "faults_unseen", "export_unequal", "warm_start_loss",
    ),
    "03_rollout": ("parity_sglang_hf_max_abs_logprob", "sync_kinds_checked", "sync_max_abs_logprob_error", "rollout_tokens_per_second"),
    "06_train": (
        "heldout_before", "heldout_after", "reward_first10", "reward_last10", "completion_length_first10",
        "completion_length_last10", "zero_variance_share", "logprob_gap_mean", "logprob_gap_max", "sync_seconds_max",
        "step_seconds_median", "rollout_seconds_median", "update_seconds_median", "resume_max_abs_logprob", "processes_left",
    ),
    "07_memory": ("peak_pss_gib", "ledger_max_error"),
    "08_mismatch": (
        "generation_kl", "mismatch_kl_bf16", "mismatch_kl_int8", "mismatch_kl_mxfp4", "mismatch_kl_int4",
        "mismatch_kl_routers", "router_kl_left", "mismatch_kl_temperature", "mismatch_kl_stale4", "heldout_no_mismatch",
        "heldout_off", "heldout_ratio", "heldout_tis",
    ),
}  # fmt: skip


def gpu_tables(root: Path) -> str:
    """For each GPU profile with a record in `root`: its label and the key figures of its notebooks."""
    parts = []
    for profile in (p for p in PROFILES if load_profile(p).device == "cuda" and (root / p).is_dir()):
        folders = sorted(p for p in (root / profile).iterdir() if p.is_dir())
        parts += [f"**{recorded_label(profile, folders[-1].name, root)}**", "", figures_table(root / profile, GPU_METRICS), ""]
    return "\n".join(parts).rstrip() or "No GPU run is recorded."


GPU_METRICS = {
    "02_bridge": ("export_unequal", "warm_start_loss"),
    "03_rollout": ("sync_kinds_checked", "rollout_tokens_per_second"),
    "06_train": (
        "heldout_before", "heldout_after", "reward_first10", "reward_last10", "completion_length_first10",
        "completion_length_last10", "logprob_gap_mean", "logprob_gap_max", "sync_seconds_max", "step_seconds_median",
        "rollout_seconds_median", "update_seconds_median", "rollout_tokens_per_second", "resume_max_abs_logprob",
    ),
    "07_memory": ("ledger_max_error", "peak_gpu_gib"),
}  # fmt: skip


def fill_readme(text: str, recorded: Path) -> str:
    """README text with the parts between its markers made anew from the recorded runs; recorded: that of profile cpu."""
    tables = {
        "notebooks": notebook_table(recorded),
        "figures": figures_table(recorded),
        "GPU figures": gpu_tables(recorded.parent),
    }
    for name, table in tables.items():
        start, end = f"<!-- {name}: made by helpers.recorded -->", f"<!-- end of {name} -->"
        if start not in text or end not in text:
            raise RecordError(f"README.md has lost its markers for the table of {name}")
        head, rest = text.split(start, 1)
        text = f"{head}{start}\n{table}\n{end}{rest.split(end, 1)[1]}"
    return text


def main(argv: Sequence[str] | None = None) -> int:
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profile", default="cpu", choices=PROFILES)
    parser.add_argument("--runs", type=Path, help="folder of the run, where it is not this machine's own")
    parser.add_argument("--only", nargs="+", default=[], metavar="NN", help="the notebooks that were run")
    options = parser.parse_args(argv)
    settings = load_profile(options.profile)
    try:
        root = PROJECT_ROOT / "notebooks" / "recorded"
        written = record_run(options.runs or settings.runs, root / settings.name, options.only)
        readme = PROJECT_ROOT / "README.md"
        readme.write_text(fill_readme(readme.read_text(), root / "cpu"))
    except (ValueError, OSError) as error:
        print(f"not recorded: {error}", file=sys.stderr)
        return 1
    print("\n".join(f"{p.stat().st_size / 1e3:7.0f} kB  {p.relative_to(PROJECT_ROOT)}" for p in written))
    return 0


if __name__ == "__main__":
    sys.exit(main())

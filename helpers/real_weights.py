"""One command for someone who has the real weights: are they whole, do both engines agree on them, does one GRPO step work?

    python -m helpers.real_weights --checkpoint DIR [--profile gpu-20b] [--questions FILE.jsonl] [--out FILE.json]

Checksums, the doctor's probes on the files and on a server of its own, then one GRPO step on GSM8K in harmony's template: roll
out, advantages, trainer against server, update, sync. Each step is an entry of the result file, which is written anew after
every step and holds neither paths nor the names of user and host, so that it can be shared.

Profile gpu-20b holds server and trainer on one GPU: 42 GB of weights each, and 25 GB of gradients and Adam for what is trained
(the experts are frozen), so it is meant for 141 GB; the server hands its memory over while the trainer takes its step. An MXFP4
checkpoint is copied to runs/ in bfloat16 (42 GB of disk) first.
Left out by default, and the result says so: the doctor's comparison with transformers (--max-reference-gb).

Exit code: 0 all of it is right, 1 something is wrong, 2 bad usage, 3 nothing is wrong, but something could not be compared.
"""

from __future__ import annotations

import argparse
import getpass
import hashlib
import json
import math
import os
import re
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from helpers.anatomy import (
    GPT_OSS_20B, GPT_OSS_120B, Architecture, layer_types, read_architecture, total_parameters,
)  # fmt: skip
from helpers.doctor import (
    CHECKPOINT_PROBES, FAIL, NUMBERS, PASS, UNKNOWN, BadUsage, Case, Finding, Parser, Scored, check_output,
    examine_checkpoint, examine_server, examine_trainer, quantisation, table,
)  # fmt: skip
from helpers.gsm8k import (
    Gsm8k, Gsm8kProblem, Graded, QuestionsError, check_prompts, grade_episodes, hub_questions, read_questions,
)  # fmt: skip
from helpers.preflight import machine_checks
from helpers.profiles import PROJECT_ROOT, PROFILES, Profile, load_profile
from helpers.records import Batch, Episode
from helpers.results import git_commit, hardware, versions, write_atomically
from helpers.rollout import RolloutServer, roll_out
from helpers.tensor_files import CheckpointReport, check_checkpoint

if TYPE_CHECKING:
    from torch import Tensor

    from helpers.trainer import MegatronTrainer

SCHEMA = 1
OK, FAILED, SKIPPED, RUNNING = "ok", "failed", "skipped", "running"
REPOSITORY = "openai/gpt-oss-20b"
RELEASES: dict[str, Mapping[str, Any]] = {REPOSITORY: GPT_OSS_20B, "openai/gpt-oss-120b": GPT_OSS_120B}
HASHED = ("*.safetensors", "*.json", "*.jinja")
NEEDED = ("config.json", "tokenizer.json", "model.safetensors.index.json")  # beside the weights
HUB_TIMEOUT = 20.0  # seconds
# One step moves each weight by about the learning rate. bfloat16 keeps 8 bits, so that 1e-6, a usual rate of GRPO, is rounded
# away on every weight above 5e-4: the server could not show that it took the step. These weights are thrown away.
BF16_LEARNING_RATE = 1e-5
DRAWS = 3  # sets of questions that are tried until one group has a right and a wrong answer
SCORED = 8  # episodes that the server scores again around the sync
GAP_AIM, KL_AIM = (
    0.02,
    0.002,
)  # nats a token, mean: what this project aims at with trained weights in bfloat16


class Failed(Exception):
    """A step found something wrong; one line."""


class Skipped(Exception):
    """A step could not be done, or could not come to a verdict; one line that says why."""


# --- the result file ----------------------------------------------------------------------------------------------------


@dataclass
class Entry:
    """One step. numbers: name -> number, units in the names. details: findings, examples, files."""

    name: str
    status: str = RUNNING
    reason: str = ""
    seconds: float = 0.0
    asked: bool = False  # skipped because the caller asked for it
    numbers: dict[str, Any] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)


class Report:
    """The result file. head: what stands above the steps.  secrets: text -> what is written in its place.  say: prints a line."""

    def __init__(self, file: Path, head: Mapping[str, Any], secrets: Mapping[str, str], say=print):
        self.file, self.head, self.secrets, self.say = file, dict(head), secrets, say
        self.entries: list[Entry] = []
        self._start = time.perf_counter()

    def run(self, name: str, step: Callable[[Entry], str | None]) -> Entry:
        """Do one step; its outcome is in the file when this returns. An error of any kind becomes its reason."""
        entry = Entry(name)
        self.entries.append(entry)
        self.write(RUNNING)
        self.say(f"[{name}]")
        start = time.perf_counter()
        try:
            entry.reason, entry.status = step(entry) or "", OK
        except Skipped as reason:
            entry.reason, entry.status = str(reason), SKIPPED
        except Failed as reason:
            entry.reason, entry.status = str(reason), FAILED
        except Exception as error:
            entry.reason, entry.status = f"{type(error).__name__}: {error}", FAILED
        except BaseException:
            entry.reason, entry.status = "interrupted", FAILED
            raise
        finally:
            entry.seconds = round(time.perf_counter() - start, 3)
            self.write(RUNNING)
        self.say(f"  {entry.status} in {entry.seconds:.1f} s" + (f": {entry.reason}" if entry.reason else ""))
        return entry

    def skip(self, name: str, reason: str, asked: bool = False) -> None:
        """Note a step that was not tried."""
        self.entries.append(Entry(name, SKIPPED, reason, asked=asked))
        self.say(f"[{name}]\n  {SKIPPED}: {reason}")
        self.write(RUNNING)

    @property
    def exit_code(self) -> int:
        if any(entry.status in (FAILED, RUNNING) for entry in self.entries):
            return 1
        return 3 if any(e.status == SKIPPED and not e.asked for e in self.entries) else 0

    @property
    def summary(self) -> str:
        """One line: the verdict, and the steps that stand in its way."""
        verdict = {
            0: "nothing is wrong",
            1: "something is wrong",
            3: "nothing is wrong in what could be compared",
        }
        names = {s: [e.name for e in self.entries if e.status == s] for s in (OK, FAILED, SKIPPED)}
        parts = [f"{status}: {', '.join(found)}" for status, found in names.items() if found]
        return f"{verdict[self.exit_code]} ({'; '.join(parts)})"

    def write(self, status: str = "finished") -> None:
        """The whole file anew. status: "running" until the last step is done, so that a crash cannot pass for the end."""
        record = {
            **self.head, "status": status, "seconds": round(time.perf_counter() - self._start, 3),
            "summary": self.summary if status == "finished" else f"not finished: {status}",
            "steps": [asdict(entry) for entry in self.entries],
        }  # fmt: skip
        write_atomically(
            self.file, json.dumps(redact(record, self.secrets), indent=1, allow_nan=False) + "\n"
        )


_PATH = re.compile(r"(?<![\w.:/~<>-])/(?:[^\s/'\"`,;:()<>|]+/)+(?=[^\s/'\"`,;:()<>|])")


def redact(value: Any, secrets: Mapping[str, str]) -> Any:
    """A copy that can be shared: `secrets` replaced, of other paths the last name, numbers that JSON lacks as text.

    >>> redact({"why": "/data/x/model.safetensors is cut", "loss": float("nan")}, {})
    {'why': 'model.safetensors is cut', 'loss': 'nan'}
    """
    if isinstance(value, Mapping):
        return {key: redact(item, secrets) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(v, secrets) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if not isinstance(value, str):
        return value
    for text in sorted(secrets, key=len, reverse=True):
        # whole words and whole paths only: user "ann" must not spoil "annotated", nor folder /data the URL host/data
        value = re.sub(rf"(?<![\w.~>-]){re.escape(text)}(?!\w)", lambda _: secrets[text], value)
    return _PATH.sub("", value)


def secrets_of(paths: Iterable[Path | None]) -> dict[str, str]:
    """What `redact` must not let through: given paths (their own name is left), this tree, home, user and host."""
    secrets = {str(PROJECT_ROOT): "<project>", str(Path.home()): "~"}
    for path in paths:
        if path is not None:
            name = path.resolve().name
            secrets |= {str(path.resolve()): name} | ({str(path): name} if "/" in str(path) else {})
    own_words = {"root", "localhost", *PROFILES, *(step.name for step in STEPS)}
    host = socket.gethostname()
    for name, word in ((host, "<host>"), (host.partition(".")[0], "<host>"), (_user(), "<user>")):
        if len(name) > 2 and name not in own_words:
            secrets[name] = word
    secrets.pop("/", None)
    return secrets


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in some containers
        return ""


# --- 1: checksums -------------------------------------------------------------------------------------------------------


class Sum(NamedTuple):
    """What a record says of a file. kind: "sha256", or "git" for the id of a git blob (small files on the hub)."""

    kind: str
    value: str


@dataclass(frozen=True)
class FileSums:
    """A file's own sums: sha256, and git's blob id (SHA-1 of a header and the content)."""

    bytes: int
    sha256: str
    git: str


def file_sums(file: Path, chunk: int = 1 << 24) -> FileSums:
    """Read a file once. Source of the blob id: git's hash-object, "blob <size>" and a zero byte before the content."""
    size = file.stat().st_size
    sha256, git = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with file.open("rb") as stream:
        while block := stream.read(chunk):
            sha256.update(block)
            git.update(block)
    return FileSums(size, sha256.hexdigest(), git.hexdigest())


def read_sums(file: Path) -> dict[str, Sum]:
    """name -> sum of a file that sha256sum wrote; names in sub-folders keep them. Raises BadUsage naming the line."""
    sums: dict[str, Sum] = {}
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadUsage(f"--sums: {file} cannot be read as text ({error})") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        match = re.fullmatch(r"([0-9a-fA-F]{64})[ \t]+\*?(?:\./)?(\S.*?)\s*", line)
        if not match:
            raise BadUsage(
                f"--sums: {file.name}, line {number} is not `<64 hex digits>  <name>`, as sha256sum writes"
            )
        known = sums.setdefault(match[2], Sum("sha256", match[1].lower()))
        if known.value != match[1].lower():
            raise BadUsage(f"--sums: {file.name} gives two sums for {match[2]}")
    if not sums:
        raise BadUsage(f"--sums: {file.name} holds no sum")
    return sums


def hub_sums(
    repository: str, revision: str | None = None, endpoint: str | None = None, timeout: float = HUB_TIMEOUT
) -> dict[str, Sum]:
    """name -> sum that the hub itself keeps: SHA-256 of large files (LFS), git blob ids of the others.

    timeout: seconds. Raises ConnectionError, one line, where the hub gives no such record.
    """
    from huggingface_hub import HfApi

    try:
        info = HfApi(endpoint=endpoint).model_info(
            repository, revision=revision, files_metadata=True, timeout=timeout
        )
    except Exception as error:  # httpx, OSError and the hub's own: in every case there is no record
        raise ConnectionError(f"the hub does not give {repository} ({type(error).__name__})") from error
    sums = {}
    for entry in info.siblings or []:
        if entry.lfs is not None:
            sums[entry.rfilename] = Sum("sha256", entry.lfs.sha256)
        elif entry.blob_id:
            sums[entry.rfilename] = Sum("git", entry.blob_id)
    return sums


def compare_sums(files: Mapping[str, FileSums], record: Mapping[str, Sum]) -> dict[str, str]:
    """name -> "equal", "different", "not in the record", or "missing": a file of the record that the model needs."""
    verdicts = {}
    for name, ours in files.items():
        theirs = record.get(name)
        equal = theirs and getattr(ours, theirs.kind) == theirs.value
        verdicts[name] = "not in the record" if theirs is None else "equal" if equal else "different"
    missing = [n for n in record if n not in files and "/" not in n and _matters(n)]
    return verdicts | dict.fromkeys(missing, "missing")


def _matters(name: str) -> bool:
    return name.endswith(".safetensors") or name in NEEDED


def judge_sums(verdicts: Mapping[str, str], source: str) -> str:
    """What to say of compared sums. Raises Failed for a wrong or missing file, Skipped where one that matters has no sum."""
    wrong = [f"{name} is {v}" for name, v in verdicts.items() if v in ("different", "missing")]
    if wrong:
        raise Failed(f"by {source}, {', '.join(wrong)}: fetch again what differs, or name the right revision")
    unknown = [name for name, v in verdicts.items() if v == "not in the record"]
    if vital := [name for name in unknown if _matters(name)]:
        raise Skipped(f"computed, not compared: {source} has no sum of {', '.join(vital)}")
    rest = f"; it has no sum of {', '.join(unknown)}" if unknown else ""
    return f"{len(verdicts) - len(unknown)} files are those of {source}{rest}"


def checksums(session: Session, entry: Entry) -> str:
    """Hash every file of the checkpoint and compare with --sums, else with the hub's own record."""
    folder = session.args.checkpoint
    names = sorted({file.name for pattern in HASHED for file in folder.glob(pattern) if file.is_file()})
    files = {}
    for number, name in enumerate(names, 1):
        session.say(f"  {number} of {len(names)}: {name}, {(folder / name).stat().st_size / 1e9:.2f} GB")
        files[name] = file_sums(folder / name)
    entry.numbers |= {"files": len(files), "bytes": sum(f.bytes for f in files.values())}
    entry.details["files"] = {name: {"bytes": f.bytes, "sha256": f.sha256} for name, f in files.items()}
    record, source = _record(session.args)
    verdicts = compare_sums(files, record)
    for name, verdict in verdicts.items():
        entry.details["files"].setdefault(name, {})["verdict"] = verdict
    return judge_sums(verdicts, source)


def _record(args: argparse.Namespace) -> tuple[dict[str, Sum], str]:
    """(what the sums are compared with, its name). Raises Skipped where there is nothing."""
    if args.sums:
        return read_sums(args.sums), args.sums.name
    if args.repository == "none":
        raise Skipped("computed, not compared: --repository none, and no --sums FILE")
    try:
        return hub_sums(args.repository, args.revision), f"the hub's {args.repository}"
    except ConnectionError as error:
        raise Skipped(f"computed, not compared: {error}; give --sums FILE") from error


# --- 2: the doctor ------------------------------------------------------------------------------------------------------


def examine_files(session: Session, entry: Entry) -> str:
    """Structure, the release's numbers and the doctor's probes of the files."""
    session.report = report = check_checkpoint(session.args.checkpoint)
    entry.numbers |= {
        "tensors": len(report.tensors), "shards": len(report.shards), "tensor_bytes": report.bytes,
        "parameters": total_parameters(report.config),
    }  # fmt: skip
    entry.details["form"] = "MXFP4" if report.quantised else "plain"
    # MXFP4 takes no updates; that is cured here by serving a plain copy
    probes = [probe for probe in CHECKPOINT_PROBES if not (report.quantised and probe is quantisation)]
    findings = list(examine_checkpoint(Case(report), probes))
    return all_of(
        partial(judge_release, report.config, session.args.repository),
        partial(judge_findings, session, entry, findings),
    )


def all_of(*verdicts: Callable[[], str]) -> str:
    """What all of them say. Raises Failed with everything that failed, not only the first."""
    fine, wrong = [], []
    for verdict in verdicts:
        try:
            fine.append(verdict())
        except Failed as reason:
            wrong.append(str(reason))
    if wrong:
        raise Failed("; ".join(wrong))
    return "; ".join(fine)


def judge_release(config: Mapping[str, Any], repository: str) -> str:
    """Whether the config is the release's. Raises Failed naming what differs."""
    release = RELEASES.get(repository)
    if release is None:
        return f"sizes not compared with a release (--repository {repository})"
    if other := release_differences(config, release):
        raise Failed(f"this is not {repository}: {', '.join(other)}")
    return f"{total_parameters(release):,} parameters, as {repository} has"


def release_differences(config: Mapping[str, Any], release: Mapping[str, Any]) -> list[str]:
    """What differs from a published config, as "hidden_size 64 instead of 2880"; empty for the same architecture."""
    ours, theirs = read_architecture(config), read_architecture(release)
    names = [f.name for f in fields(Architecture) if f.name != "layer_types"]
    pairs = {name: (getattr(ours, name), getattr(theirs, name)) for name in names}
    other = [f"{name} {a} instead of {b}" for name, (a, b) in pairs.items() if a != b]
    return other or (["layer_types"] if layer_types(ours) != layer_types(theirs) else [])


def judge_findings(session: Session, entry: Entry, findings: Sequence[Finding]) -> str:
    """Print and keep the doctor's findings. Raises Failed with those that failed; returns what was left open."""
    entry.details.setdefault("findings", []).extend(asdict(finding) for finding in findings)
    for verdict in (PASS, FAIL, UNKNOWN):
        count = sum(f.verdict == verdict for f in findings)
        entry.numbers[verdict.replace(" ", "_")] = entry.numbers.get(verdict.replace(" ", "_"), 0) + count
    session.say("\n".join(f"  {line}" for line in table(findings).splitlines()))
    wrong = [f"{f.probe}: {f.found}" for f in findings if f.verdict == FAIL]
    if wrong:
        raise Failed("; ".join(wrong))
    open_ = [f"{f.probe.partition(': ')[2]} ({f.found})" for f in findings if f.verdict == UNKNOWN]
    return "the doctor finds nothing wrong" + (f"; left open: {'; '.join(open_)}" if open_ else "")


def start_server(session: Session, entry: Entry) -> str:
    """A server of this command's own, from a plain copy where the checkpoint is in MXFP4; Megatron's imports meanwhile."""
    from helpers.bridge import prepare_process

    tight = require_machine(session.settings)
    if session.report.quantised:
        size = 2 * total_parameters(session.report.config) / 1e9
        session.say(
            f"  MXFP4 takes no updates: a plain copy, {size:.0f} GB, goes to runs/ unless it is there"
        )
    start = time.perf_counter()
    server = RolloutServer(session.settings, session.args.checkpoint)
    entry.numbers["copy_and_check_seconds"] = round(time.perf_counter() - start, 3)
    session.say("  the server starts, Megatron is imported meanwhile")
    session.started = server.start()
    entry.numbers["import_seconds"] = round(prepare_process(session.settings), 3)
    server.wait()
    session.server = server
    entry.numbers["start_seconds"] = round(server.start_seconds, 3)
    return f"tight: {'; '.join(tight)}" if tight else ""


def require_machine(settings: Profile) -> list[str]:
    """What is tight on this machine (memory, disk). Raises Skipped where the profile cannot run at all."""
    short = [check for check in machine_checks(settings) if not check.ok]
    tight = [c for c in short if c.name in ("memory available", "disk free")]
    blocking = [f"{c.name}: {c.found} ({c.advice})" for c in short if c not in tight]
    if blocking:
        raise Skipped(f"profile {settings.name} cannot run here: {'; '.join(blocking)}")
    return [f"{c.name} {c.found}, {c.advice}" for c in tight]


def examine_served(session: Session, entry: Entry) -> str:
    """The doctor's probes of the server. They may write into it, since it is this command's own."""
    session.case = Case(
        check_checkpoint(session.server.checkpoint), session.server, write=True,
        max_reference_gb=session.args.max_reference_gb,
    )  # fmt: skip
    entry.numbers["reference_gigabytes"] = round(session.case.reference_gb, 3)
    entry.numbers["reference_allowed_gigabytes"] = session.args.max_reference_gb
    findings = list(examine_server(session.case))
    note = judge_findings(session, entry, findings)
    if not NUMBERS["server"] & {f.probe for f in findings if f.verdict == PASS}:
        raise Skipped(f"no comparison of the server's numbers came to a verdict; {note}")
    return note


# --- 3: one GRPO step ---------------------------------------------------------------------------------------------------


def sample_answers(session: Session, entry: Entry) -> str:
    """Roll out and grade, with new questions up to DRAWS times until a group has a right and a wrong answer."""
    import torch

    from helpers.advantages import zero_variance_share

    for draw in range(DRAWS):
        problems = session.task.sample(session.settings.batch.prompts, step=draw)
        prompts = check_prompts(session.server.tokenizer, problems)
        start = time.perf_counter()
        episodes = roll_out(session.server, problems, session.settings)
        seconds = time.perf_counter() - start
        graded = grade_episodes(episodes, problems, session.server.tokenizer)
        session.episodes, session.rewards = episodes, torch.tensor([g.reward for g in graded])
        silent = zero_variance_share(session.rewards, torch.tensor([e.group for e in episodes]))
        entry.numbers |= rollout_numbers(episodes, graded, seconds) | {
            "draws": draw + 1,
            "silent_groups_share": silent,
            "prompt_tokens_longest": max(map(len, prompts)),
        }
        session.say(
            f"  draw {draw + 1}: mean reward {entry.numbers['reward_mean']:.3f}, silent groups {silent:.0%}"
        )
        if silent < 1:
            break
    entry.details["examples"] = _examples(problems, episodes, graded)
    return judge_answers(graded)


def rollout_numbers(
    episodes: Sequence[Episode], graded: Sequence[Graded], seconds: float
) -> dict[str, float]:
    """Reward, format and truncation rate (shares of the answers), lengths and speed of a rollout."""
    tokens, count = sum(len(e.completion_ids) for e in episodes), len(episodes)
    return {
        "answers": count,
        "reward_mean": sum(g.reward for g in graded) / count,
        "format_rate": sum(g.final is not None for g in graded) / count,
        "truncation_rate": sum(g.truncated for g in graded) / count,
        "completion_tokens": tokens,
        "completion_tokens_mean": tokens / count,
        "rollout_seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 1),
    }


def judge_answers(graded: Sequence[Graded]) -> str:
    """Raises Failed where no answer reached the final channel, or none of them was right."""
    cut = sum(g.truncated for g in graded) / len(graded)
    if all(g.final is None for g in graded):
        cure = (
            "raise --max-new-tokens"
            if cut >= 0.5
            else "see the examples, then the template and the stop tokens"
        )
        raise Failed(f"no answer reached the final channel, {cut:.0%} were cut off: {cure}")
    if not any(g.reward for g in graded):
        raise Failed(f"none of {len(graded)} answers was right, {cut:.0%} were cut off: see the examples")
    return f"mean reward {sum(g.reward for g in graded) / len(graded):.3f} of {len(graded)} answers"


def _examples(
    problems: Sequence[Gsm8kProblem], episodes: Sequence[Episode], graded: Sequence[Graded]
) -> list[dict]:
    """The first answer of each group: what was expected, the end of the final message, the reward."""
    first = {episode.group: index for index, episode in reversed(list(enumerate(episodes)))}
    return [
        {
            "question": problems[group].question[:60], "expected": problems[group].answer,
            "final": None if graded[i].final is None else graded[i].final[-160:], "reward": graded[i].reward,
            "tokens": len(episodes[i].completion_ids), "finish": episodes[i].finish_reason,
        }
        for group, i in sorted(first.items())
    ]  # fmt: skip


def group_advantages_of(session: Session, entry: Entry) -> str:
    """GRPO's advantages, and the batch. Where every group is silent, +1 and -1 in turn, and it says so."""
    import torch

    from helpers.advantages import group_advantages
    from helpers.checkpoints import tokenizer_and_pad
    from helpers.collate import collate

    groups = torch.tensor([e.group for e in session.episodes])
    advantages = group_advantages(session.rewards, groups, session.settings.algorithm.advantage)
    silent = not advantages.any()
    if silent:
        advantages = torch.tensor([(-1.0) ** i for i in range(len(groups))])
    pad = tokenizer_and_pad(session.server.checkpoint)[1]
    session.batch = collate(session.episodes, advantages, pad, session.settings.trainer.seq_length)
    entry.numbers |= {
        "rows": session.batch.size[0], "columns": session.batch.size[1],
        "trained_tokens": int(session.batch.loss_mask.sum()), "advantage_max": advantages.abs().max().item(),
    }  # fmt: skip
    if silent:
        raise Skipped(
            f"none of {len(groups.unique())} groups has a right and a wrong answer, so GRPO's advantages are all 0; +1 and -1 in "
            "turn stand in for them, to see update and sync at work"
        )


def compare_engines(session: Session, entry: Entry) -> str:
    """Load Megatron from the served checkpoint and compare its logprobs of the answers with those of the rollout."""
    from helpers.corrections import mismatch
    from helpers.trainer import MegatronTrainer

    trainer = MegatronTrainer(session.settings, session.server.checkpoint)
    entry.numbers |= {f"{name}_seconds": round(s, 3) for name, s in trainer.seconds.items()}
    start = time.perf_counter()
    session.before, session.trainer = trainer.logprobs(session.batch), trainer
    seconds = time.perf_counter() - start
    mask = session.batch.loss_mask.bool()
    ours, rollout = session.before[mask], session.batch.rollout_logprobs[mask]
    gap = (ours - rollout).abs()
    apart = mismatch(session.before, session.batch.rollout_logprobs, session.batch.loss_mask)
    entry.numbers |= {
        "logprob_gap_mean_nats": gap.mean().item(), "logprob_gap_max_nats": gap.max().item(), "tokens": gap.numel(),
        "generation_kl_k1_nats": apart.generation_kl_k1.item(),
        "generation_kl_k3_nats": apart.generation_kl_k3.item(),
        "logprob_seconds": round(seconds, 3), "tokens_per_second": round(session.batch.tokens.numel() / seconds, 1),
        **gpu_peak(session.settings),
    }  # fmt: skip
    session.case.trainer = completions_scored(session.episodes[:4], session.before)
    findings = list(examine_trainer(session.case))
    return all_of(
        partial(judge_gap, session.case, entry.numbers), partial(judge_findings, session, entry, findings)
    )


def completions_scored(episodes: Sequence[Episode], logprobs: Tensor) -> Scored:
    """The first rows of a batch's logprobs [B, S] in the doctor's form; NaN where the prompt is."""
    sequences, parts = [], []
    for row, e in enumerate(episodes):
        first, last = len(e.prompt_ids) - 1, len(e.prompt_ids) + len(e.completion_ids) - 1
        part = logprobs[row, :last].clone()
        part[:first] = math.nan
        sequences.append([*e.prompt_ids, *e.completion_ids])
        parts.append(part)
    return Scored(sequences, parts[0].new_tensor([v for part in parts for v in part.tolist()]))


def judge_gap(case: Case, numbers: Mapping[str, float]) -> str:
    """Whether two sound engines can differ so much. Raises Failed; names a gap above this project's aim."""
    mean, worst = numbers["logprob_gap_mean_nats"], numbers["logprob_gap_max_nats"]
    shown = f"trainer and server differ by {mean:.1e} nats a token on average, {worst:.1e} at most"
    if not case.small(worst, mean):
        raise Failed(
            f"{shown}: more than rounding explains; --max-reference-gb lets the doctor name the fault"
        )
    above = case.served_tolerance is None and (mean >= GAP_AIM or numbers["generation_kl_k3_nats"] >= KL_AIM)
    return shown + (f"; above the aim of {GAP_AIM} (KL {KL_AIM})" if above else "")


def update(session: Session, entry: Entry) -> str:
    """One optimizer step; what it says, whether sinks have gradients, and how far the answers' logprobs moved.

    Meanwhile the server's memory is the trainer's, where the profile has the memory saver; `sync` fills it again.
    """
    session.served = served_answers(session), served_answers(session)
    session.server.release_memory()
    stats = session.trainer.update(session.batch)
    entry.numbers |= {name: value for name, value in stats.items() if name != "seconds"} | {
        "update_seconds": round(stats["seconds"], 3),
        "tokens_per_second": round(session.batch.tokens.numel() / stats["seconds"], 1),
        **sink_gradients(session.trainer), **gpu_peak(session.settings),
    }  # fmt: skip
    session.after = session.trainer.logprobs(session.batch)
    session.server.resume_memory()
    moved = (session.after - session.before)[session.batch.loss_mask.bool()].abs().mean().item()
    entry.numbers["logprob_change_mean_nats"] = moved
    if not entry.numbers["grad_norm"] > 0:
        raise Failed("the gradient is 0, although the advantages are not")
    dead = entry.numbers["sink_layers"] - entry.numbers["sink_layers_with_gradient"]
    if dead or not entry.numbers["sink_layers"]:
        raise Failed(
            f"the sinks of {dead} of {entry.numbers['sink_layers']} layers have no gradient (pitfall 2)"
        )
    return f"gradient norm {stats['grad_norm']:.3g}, sinks of all layers have gradients, logprobs moved by {moved:.1e}"


def sink_gradients(trainer: MegatronTrainer) -> dict[str, float]:
    """How many layers' sinks have a gradient after `update`, and the largest one.

    Megatron adds gradients up in its own buffers (parameter.main_grad), which stay until the next update clears them: nothing
    is computed or exported for this. Clipping may have scaled them, which leaves zero zero.
    """
    sinks = [
        parameter for chunk in trainer.model.chunks for name, parameter in chunk.named_parameters()
        if name.endswith("softmax_offset")
    ]  # fmt: skip
    gradients = [getattr(parameter, "main_grad", None) for parameter in sinks]  # a frozen one has none
    peaks = [0.0 if gradient is None else gradient.abs().max().item() for gradient in gradients]
    return {
        "sink_layers": len(peaks),
        "sink_layers_with_gradient": sum(peak > 0 for peak in peaks),
        "sink_gradient_max": max(peaks, default=0.0),
    }


def gpu_peak(settings: Profile) -> dict[str, float]:
    """Largest memory that torch held in this process, in GB of 1e9 bytes; empty on a CPU."""
    if settings.device != "cuda":
        return {}
    import torch

    return {"trainer_gpu_peak_gigabytes": round(torch.cuda.max_memory_allocated() / 1e9, 2)}


@dataclass(frozen=True)
class SyncEvidence:
    """Mean |difference| in nats of the same answers' tokens; worst: largest, of the last one.

    noise: the server's two answers before the sync.  gap_before: server and trainer, both with old weights.
    change: the trainer's by its step.  moved: the server's by the sync.  gap_after: server and trainer, both with new ones.
    """

    noise: float
    gap_before: float
    change: float
    moved: float
    gap_after: float
    worst: float


def sync(session: Session, entry: Entry) -> str:
    """Send the new weights; the server's logprobs of the same answers have to move and to be the trainer's again."""
    from helpers.weight_sync import sync_weights

    before, again = session.served
    report = sync_weights(session.trainer, session.server, "step-1")
    after, rows = served_answers(session), _spread(session.episodes, SCORED)
    old, new = (_completion_values(t, session.episodes, rows) for t in (session.before, session.after))
    evidence = SyncEvidence(
        _mean_gap(before, again), _mean_gap(before, old), _mean_gap(new, old), _mean_gap(after, before),
        _mean_gap(after, new), (after - new).abs().max().item(),
    )  # fmt: skip
    entry.numbers |= {f"{name}_nats": value for name, value in asdict(evidence).items()} | {
        "sync_seconds": round(report.seconds, 3), "export_seconds": round(report.export_seconds, 3),
        "send_seconds": round(report.send_seconds, 3), "tensors": report.tensors, "megabytes": round(report.megabytes, 3),
        "tokens_compared": after.numel(),
    }  # fmt: skip
    version = roll_out(session.server, session.task.sample(1), session.settings)[0].weight_version
    if version != "step-1":
        raise Failed(f"answers still carry the weights' label {version!r}")
    return judge_sync(evidence, session.case.served_tolerance)


def judge_sync(e: SyncEvidence, tolerance: float | None) -> str:
    """Whether the server follows the trainer. tolerance: nats, in float32; None in 16 bits, where rounding is the yardstick.

    Raises Failed where it does not, Skipped where the step is too small to tell.
    """
    shown = f"the server moved by {e.moved:.1e} nats a token, the trainer by {e.change:.1e}; they differ by {e.gap_after:.1e}"
    limit = tolerance or 2 * max(e.gap_before, e.noise)
    if e.change <= (tolerance or 2 * e.noise) and e.moved <= (tolerance or 2 * e.noise):
        raise Skipped(f"{shown}: too small a step to tell; raise --learning-rate")
    if e.moved <= 0.1 * e.change or e.moved <= 2 * e.noise:
        raise Failed(f"{shown}: the update was dropped (pitfalls 15 and 26)")
    if (e.worst if tolerance else e.gap_after) > limit:
        raise Failed(f"{shown} (largest {e.worst:.1e}): not the trainer's weights")
    if not tolerance and e.change <= e.gap_before:
        return f"{shown}: as before the step; it is smaller than the engines' own gap, so that a part left behind might not show"
    return shown


def _spread(episodes: Sequence[Episode], count: int) -> list[int]:
    """Indices of `count` episodes, evenly over all groups."""
    return sorted({i * len(episodes) // count for i in range(count)})


def served_answers(session: Session) -> Tensor:
    """The server's present logprobs of SCORED of the answers."""
    return served_logprobs(session.server, [session.episodes[i] for i in _spread(session.episodes, SCORED)])


def served_logprobs(server: RolloutServer, episodes: Sequence[Episode]) -> Tensor:
    """The server's logprobs of the completions, one after the other. Two at a time: logits of long answers take gigabytes."""
    import torch

    values: list[float] = []
    for start in range(0, len(episodes), 2):
        pair = episodes[start : start + 2]
        rows = server.prompt_logprobs([[*e.prompt_ids, *e.completion_ids] for e in pair])
        for e, row in zip(pair, rows, strict=True):
            values += row[len(e.prompt_ids) - 1 :]
    return torch.tensor(values)


def _completion_values(logprobs: Tensor, episodes: Sequence[Episode], rows: Sequence[int]) -> Tensor:
    """The same tokens of the trainer's [B, S]."""
    import torch

    spans = [(i, len(episodes[i].prompt_ids) - 1, len(episodes[i].completion_ids)) for i in rows]
    return torch.cat([logprobs[i, first : first + count] for i, first, count in spans])


def _mean_gap(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().mean().item()


# --- the command --------------------------------------------------------------------------------------------------------


@dataclass
class Session:
    """What one step leaves for the next; None until then."""

    args: argparse.Namespace
    settings: Profile
    task: Gsm8k | None
    say: Callable[[str], None]
    report: CheckpointReport | None = None
    started: RolloutServer | None = None  # has to be stopped; `server` answers
    server: RolloutServer | None = None
    case: Case | None = None
    episodes: list[Episode] | None = None
    rewards: Tensor | None = None
    batch: Batch | None = None
    trainer: MegatronTrainer | None = None
    before: Tensor | None = None
    served: tuple[Tensor, Tensor] | None = None  # the server's logprobs of some answers before the update, twice
    after: Tensor | None = None


@dataclass(frozen=True)
class Step:
    """name, what does it, and the field of Session that it cannot do without. grpo: left out by --skip-step."""

    name: str
    work: Callable[[Session, Entry], str | None]
    needs: str = "args"
    grpo: bool = True


STEPS = (
    Step("checksums", checksums, grpo=False),
    Step("checkpoint", examine_files, grpo=False),
    Step("server", start_server, "report", grpo=False),
    Step("doctor", examine_served, "server", grpo=False),
    Step("roll out", sample_answers, "case"),
    Step("advantages", group_advantages_of, "episodes"),
    Step("trainer", compare_engines, "batch"),
    Step("update", update, "trainer"),
    Step("sync", sync, "after"),
)
_MADE_BY = {"report": "checkpoint", "server": "server", "case": "doctor", "episodes": "roll out", "batch": "advantages",
            "trainer": "trainer", "after": "update"}  # fmt: skip


def run_steps(session: Session, report: Report, steps: Sequence[Step] = STEPS) -> None:
    """Every step in turn; one whose need is not met is noted as skipped. The server ends with this call."""
    try:
        for step in steps:
            if step.grpo and session.args.skip_step:
                report.skip(step.name, "left out by --skip-step", asked=True)
            elif getattr(session, step.needs) is None:
                report.skip(step.name, f"needs step {_MADE_BY[step.needs]}, which did not come so far")
            else:
                report.run(step.name, partial(step.work, session))
    finally:
        if session.started is not None:
            session.started.stop()


def _parser() -> Parser:
    parser = Parser(
        prog="python -m helpers.real_weights", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, metavar="DIR", help="Hugging Face folder of the weights")
    add("--profile", default="gpu-20b", help=f"one of {', '.join(PROFILES)} (default gpu-20b)")
    add("--out", type=Path, default=Path("real_weights.json"), metavar="FILE", help="the result file")
    add("--sums", type=Path, metavar="FILE", help="checksums in sha256sum's form; goes before the hub's")
    add("--repository", default=REPOSITORY, metavar="NAME",
        help=f"whose record and config these are (default {REPOSITORY}); none: a checkpoint of your own")  # fmt: skip
    add("--revision", metavar="NAME", help="of the repository (default: its main branch)")
    add("--questions", type=Path, metavar="FILE", help="JSON lines in GSM8K's form; else from the hub")
    add(
        "--no-preamble",
        action="store_true",
        help="the user's turn alone, without system and developer message",
    )
    add("--prompts", type=int, default=8, metavar="N", help="questions of the step (default 8)")
    add("--group-size", type=int, default=4, metavar="N", help="answers a question (default 4)")
    add(
        "--max-new-tokens", type=int, default=512, metavar="N", help="length limit of an answer (default 512)"
    )
    add("--learning-rate", type=float, metavar="X",
        help=f"of the one step (default: {BF16_LEARNING_RATE:g} in bfloat16, else the profile's)")  # fmt: skip
    add("--max-reference-gb", type=float, default=16.0, metavar="GB",
        help="size of the doctor's float32 reference in host memory (default 16; gpt-oss-20b needs 84, and many minutes)")  # fmt: skip
    add("--skip-step", action="store_true", help="checksums and doctor only, no GRPO step")
    return parser


def _checked(args: argparse.Namespace) -> argparse.Namespace:
    """Raises BadUsage for what argparse cannot see: before minutes of work, not after them."""
    if not os.path.isdir(args.checkpoint):  # False, not an error, for a name that is too long
        raise BadUsage(f"--checkpoint: there is no folder {args.checkpoint}")
    if args.sums:
        read_sums(args.sums)
    for name in ("prompts", "group_size", "max_new_tokens", "learning_rate", "max_reference_gb"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise BadUsage(f"--{name.replace('_', '-')} {value} has to be a positive number")
    if args.revision is None and re.fullmatch(r"[0-9a-f]{40}", args.checkpoint.resolve().name):
        args.revision = (
            args.checkpoint.resolve().name
        )  # a snapshot in the hub's cache is named after its commit
    check_output("--out", args.out)
    return args


def step_settings(args: argparse.Namespace) -> Profile:
    """The profile for this one step. Raises BadUsage for an unknown profile or settings that contradict each other."""
    try:
        profile = load_profile(args.profile)
        rate = BF16_LEARNING_RATE if profile.model.dtype == "bfloat16" else profile.trainer.learning_rate
        changes = {
            "batch.prompts": args.prompts, "batch.group_size": args.group_size, "rollout.shared": False,
            "sampling.max_new_tokens": args.max_new_tokens, "trainer.warmup_steps": 0,
            "trainer.learning_rate": args.learning_rate or rate,
            "rollout.max_running_requests": max(8, args.prompts * args.group_size),
        }  # fmt: skip
        settings = load_profile(args.profile, **changes)
    except (ValueError, TypeError) as error:
        raise BadUsage(str(error)) from error
    if settings.trainer.ranks > 1:
        raise BadUsage(
            f"--profile {args.profile} trains on {settings.trainer.ranks} GPUs; this command has one: gpu-20b"
        )
    return settings


def load_task(args: argparse.Namespace, settings: Profile) -> Gsm8k | None:
    """The questions, or None where no step is wanted. Raises QuestionsError: too few, none, or a bad line."""
    if args.skip_step:
        return None
    preamble = not args.no_preamble
    problems = read_questions(args.questions, preamble) if args.questions else hub_questions(preamble)
    task = Gsm8k(problems, settings.seed)
    task.sample(args.prompts)
    return task


def result_head(
    args: argparse.Namespace, settings: Profile, task: Gsm8k | None, argv: Sequence[str]
) -> dict[str, Any]:
    """What stands above the steps: what was run, on what, with which versions."""
    return {
        "schema": SCHEMA, "kind": "real_weights", "checkpoint": args.checkpoint.resolve().name,
        "repository": args.repository, "revision": args.revision, "profile": settings.name, "seed": settings.seed,
        "date": time.strftime("%Y-%m-%d", time.gmtime()), "commit": git_commit(), "hardware": hardware(), "versions": versions(),
        "command": shlex.join(["python", "-m", "helpers.real_weights", *argv]),
        "questions": None if task is None else args.questions.name if args.questions else "GSM8K, hub",
        "prompt": "user turn only" if args.no_preamble else "system (effort low), developer and user message",
        "step": {"prompts": args.prompts, "group_size": args.group_size, "max_new_tokens": args.max_new_tokens,
                 "learning_rate": settings.trainer.learning_rate, "dtype": settings.model.dtype,
                 "frozen_experts": settings.trainer.freeze_experts},
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    say = partial(print, flush=True)
    try:
        args = _checked(_parser().parse_args(argv))
        settings = step_settings(args)
        task = load_task(args, settings)
    except (BadUsage, QuestionsError) as error:
        print(f"real_weights: {error} (--help shows the options)", file=sys.stderr)
        return 2
    head = result_head(args, settings, task, argv)
    secrets = secrets_of((args.checkpoint, args.sums, args.questions, args.out, settings.runs))
    report = Report(args.out, head, secrets, say)
    session = Session(args, settings, task, say)
    try:
        run_steps(session, report, STEPS[:1])  # asks the hub, which the environment of profile cpu forbids
        os.environ.update(settings.process_environment("kernel"))  # before anything imports torch
        run_steps(session, report, STEPS[1:])
        report.write()
    except KeyboardInterrupt:
        report.write("interrupted")
        return 130
    except OSError as error:  # steps keep their own; this is the result file's
        print(f"real_weights: --out: {args.out} cannot be written ({error.strerror})", file=sys.stderr)
        return 2
    say(f"{report.summary}; written to {args.out}")
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())

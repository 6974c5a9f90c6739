"""What does a GRPO step cost here, and what in TRL's GRPOTrainer, on the same work and the same machine?

    python tests/bench/grpo_step_vs_trl.py --trl-site DIR [--rounds 3] [--steps 10] [--warm-up 3] [--out FOLDER]

DIR holds the packages of tests/bench/requirements.txt, which says how to make it. The checkpoint is notebook 02's warm start.

Both sides do the whole step of `load_profile("cpu")`: sample 32 prompts x 8 answers of at most 24 tokens at temperature 1,
grade the token ids, update once with the same token-mean clipped loss (no KL) and the same AdamW schedule, fp32, one thread a
process. Ours samples in an SGLang server and trains in Megatron, so a step includes the weight sync; TRL samples with
transformers' generate from the weights that it trains. TRL's defaults that would cost it time without changing the work are
off: gradient checkpointing, bf16, the router's auxiliary loss, grouped experts, logging and saving.

Each side lives in a process of its own and the two take turns (ours, TRL, ours, TRL, ...); who waits is blocked on its stdin.
`idle_cpu_seconds` shows that it does wait: the processor time that the other side's processes used during a turn.
Both see the same questions step for step; sampling differs, so `tokens` (sampled in a step) shows how equal the work was.

Writes grpo_step_vs_trl.csv: one row a round and side, medians over the round's steps. For TRL, `update` is all but its
generation and its reward function. About three minutes on two cores.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TextIO

import psutil

from helpers.checkpoints import require_checkpoint
from helpers.profiles import Profile, load_profile
from helpers.results import git_commit, hardware

SIDES = ("ours", "trl")
PARTS = ("rollout", "score", "update", "sync")
COLUMNS = ("round", "side", "steps", "seconds", *PARTS, "tokens", "reward", "idle_cpu_seconds")
NAME = "grpo_step_vs_trl.csv"


# --- a side: a child process that runs as many steps as a line of its stdin says, and answers with one line of JSON ---------
class Turns:
    """The child's end of the conversation. Closing its stdin is the parent's way to say that all is done."""

    def __init__(self, answers: TextIO):
        self.answers = answers

    def next(self) -> int:
        """Block until the parent asks; the number of steps, 0 when there are no more."""
        line = sys.stdin.readline()
        return int(line) if line.strip() else 0

    def answer(self, steps: list[dict]) -> None:
        self.answers.write(json.dumps(steps) + "\n")
        self.answers.flush()


def private_stdout() -> TextIO:
    """Today's stdout, for answers alone; whatever a library prints from here on goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def run_ours(settings: Profile, turns: Turns, total: int) -> None:
    """The loop of notebook 05. Ready once the server and the trainer stand."""
    import torch

    from helpers.advantages import group_advantages
    from helpers.checkpoints import tokenizer_and_pad
    from helpers.collate import collate
    from helpers.rewards import score
    from helpers.rollout import RolloutServer, roll_out
    from helpers.tasks import load_task
    from helpers.trainer import MegatronTrainer
    from helpers.weight_sync import sync_weights

    checkpoint = settings.checkpoint("warm")
    tokenizer, pad = tokenizer_and_pad(checkpoint)
    task, done = load_task(settings.task, settings.seed), 0
    with RolloutServer(settings, checkpoint) as server:
        trainer = MegatronTrainer(settings, checkpoint)

        def step(number: int) -> dict:
            marks = [time.perf_counter()]
            problems = task.sample(settings.batch.prompts, number)
            episodes = roll_out(server, problems, settings)
            marks.append(time.perf_counter())
            rewards = score(episodes, problems, tokenizer)
            groups = torch.tensor([e.group for e in episodes])
            advantages = group_advantages(torch.tensor(rewards), groups, settings.algorithm.advantage)
            marks.append(time.perf_counter())
            trainer.update(collate(episodes, advantages, pad))
            marks.append(time.perf_counter())
            sync_weights(trainer, server, f"step-{number + 1}")
            marks.append(time.perf_counter())
            parts = {part: b - a for part, a, b in zip(PARTS, marks, marks[1:])}
            tokens = sum(len(e.completion_ids) for e in episodes)
            return {
                "seconds": marks[-1] - marks[0],
                **parts,
                "tokens": tokens,
                "reward": statistics.mean(rewards),
            }

        turns.answer([])
        while count := turns.next():
            turns.answer([step(done + i) for i in range(count)])
            done += count


def run_trl(settings: Profile, turns: Turns, total: int) -> None:
    """One GRPOTrainer.train() of `total` steps that pauses between turns. Ready once the trainer stands."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    from helpers.harmony import decode, load_tokenizer, stop_token_ids
    from helpers.rewards import grade
    from helpers.tasks import load_task

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    checkpoint = settings.checkpoint("warm")
    tokenizer, task = load_tokenizer(checkpoint), load_task(settings.task, settings.seed)
    problems = [p for step in range(total) for p in task.sample(settings.batch.prompts, step)]
    data = questions(problems, settings)
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=getattr(torch, settings.model.dtype), experts_implementation="eager"
    )
    model.generation_config.eos_token_id = list(
        stop_token_ids(tokenizer)
    )  # the ids that end an answer here, too
    now: dict = {}  # the present step's parts

    def reward(completion_ids, answer, **_) -> list[float]:
        """From the ids: TRL's decoded completions have lost their special tokens."""
        start = time.perf_counter()
        rewards = [grade(decode(tokenizer, ids), a) for ids, a in zip(completion_ids, answer, strict=True)]
        now.update(
            tokens=sum(map(len, completion_ids)),
            reward=statistics.mean(rewards),
            score=time.perf_counter() - start,
        )
        return rewards

    class Timed(GRPOTrainer):
        """TRL's own profiling of generation reports to tracking services only, so its wrapped call is timed here."""

        def _generate_single_turn(self, *args, **kwargs):
            start = time.perf_counter()
            result = super()._generate_single_turn(*args, **kwargs)
            now["rollout"] = time.perf_counter() - start
            return result

    class Pause(TrainerCallback):
        """Times a step from the end of the last one, and waits where a turn ends."""

        def wait(self) -> None:
            self.left, self.steps = turns.next(), []
            if not self.left:
                sys.exit(0)
            self.start = time.perf_counter()

        def on_train_begin(self, *_, **__) -> None:
            turns.answer([])
            self.wait()

        def on_step_end(self, *_, **__) -> None:
            seconds, self.start = time.perf_counter() - self.start, time.perf_counter()
            self.steps.append(
                {"seconds": seconds, **now, "update": seconds - now["rollout"] - now["score"], "sync": 0.0}
            )
            self.left -= 1
            if not self.left:
                turns.answer(self.steps)
                self.wait()

    trainer = Timed(
        model, reward, trl_config(settings, total), train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(checkpoint), callbacks=[Pause()],
    )  # fmt: skip
    trainer.train()


def questions(problems: list, settings: Profile):
    """The prompts as a datasets.Dataset.

    Its fingerprint is given, not computed: datasets would pickle a table with dill, and dill takes pyarrow for a module of
    the user's own, to be pickled whole (which fails), unless the folder it lies in is called site-packages.
    """
    from datasets import Dataset
    from datasets.table import InMemoryTable

    columns = {"prompt": [p.prompt for p in problems], "answer": [p.answer for p in problems]}
    return Dataset(
        InMemoryTable.from_pydict(columns), fingerprint=f"{settings.task}-{settings.seed}-{len(problems)}"
    )


def trl_config(settings: Profile, total: int):
    """settings in TRL's words."""
    from trl import GRPOConfig

    a, t = settings.algorithm, settings.trainer
    if (a.advantage, a.ratio, a.normaliser, a.dual_clip, t.decay_steps) != (
        "std",
        "token",
        "token",
        None,
        None,
    ):
        raise ValueError(
            f"this comparison says only the default loss and schedule in TRL's words, not {a}, {t}"
        )
    return GRPOConfig(
        output_dir=str(settings.runs / "logs" / "trl"), seed=settings.seed, max_steps=total,
        # the work
        per_device_train_batch_size=settings.batch.episodes, gradient_accumulation_steps=1,
        num_generations=settings.batch.group_size, max_completion_length=settings.sampling.max_new_tokens,
        temperature=settings.sampling.temperature, top_p=1.0, top_k=0, shuffle_dataset=False,
        # the loss: token mean over the batch, clip-higher, no KL, no auxiliary loss
        loss_type="dapo", scale_rewards="group", importance_sampling_level=a.ratio, epsilon=a.clip_low,
        epsilon_high=a.clip_high, beta=0.0, num_iterations=1, router_aux_loss_coef=0.0,
        # the optimizer
        learning_rate=t.learning_rate, adam_beta1=t.beta1, adam_beta2=t.beta2, weight_decay=t.weight_decay,
        max_grad_norm=t.clip_grad, lr_scheduler_type="constant_with_warmup", warmup_steps=t.warmup_steps,
        # nothing beside the work
        use_cpu=True, bf16=False, gradient_checkpointing=False, dataloader_pin_memory=False, report_to="none",
        logging_strategy="no", save_strategy="no", eval_strategy="no", disable_tqdm=True,
    )  # fmt: skip


RUN: dict[str, Callable[[Profile, Turns, int], None]] = {"ours": run_ours, "trl": run_trl}


# --- the parent ------------------------------------------------------------------------------------------------------------
class Side:
    """The parent's end of one child process."""

    def __init__(self, name: str, settings: Profile, total: int, trl_site: Path, log: Path):
        environment = {**os.environ, **settings.process_environment("trainer")}
        if name == "trl":
            environment["PYTHONPATH"] = os.pathsep.join(
                filter(None, [str(trl_site), environment.get("PYTHONPATH")])
            )
        self.name, self.log = name, log
        command = [sys.executable, "-W", "ignore", __file__, "--side", name, "--total", str(total)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            env=environment,
        )

    def receive(self) -> list[dict]:
        line = self.process.stdout.readline()
        if not line:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
            raise RuntimeError(
                f"side {self.name!r} ended with code {self.process.wait()}. Last lines of {self.log}:\n{tail}"
            )
        return json.loads(line)

    def take_turn(self, steps: int) -> list[dict]:
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        return self.receive()

    def cpu_seconds(self) -> float:
        """Processor time so far of the child and all processes below it."""
        child = psutil.Process(self.process.pid)
        times = [p.cpu_times() for p in [child, *child.children(recursive=True)]]
        return sum(t.user + t.system for t in times)

    def close(self) -> None:
        """Let the child end (it stops its server); kill it when it does not."""
        if self.process.stdin and not self.process.stdin.closed:
            self.process.stdin.close()
        try:
            self.process.wait(40)
        except subprocess.TimeoutExpired:
            self.process.kill()


def measure(
    sides: list[Side], rounds: int, steps: int, warm_up: int
) -> tuple[list[dict], dict[str, list[float]]]:
    """Warm up each side, then let them take turns. Returns the table's rows and all seconds of the timed steps by side."""
    rows, seconds = [], {side.name: [] for side in sides}
    for side in sides:
        side.receive()  # ready
        if warm_up:
            side.take_turn(warm_up)
    for number in range(1, rounds + 1):
        for side in sides:
            others = [s for s in sides if s is not side]
            before = sum(s.cpu_seconds() for s in others)
            taken = side.take_turn(steps)
            idle = sum(s.cpu_seconds() for s in others) - before
            medians = {
                k: statistics.median(s[k] for s in taken) for k in ("seconds", *PARTS, "tokens", "reward")
            }
            rows.append(
                {"round": number, "side": side.name, "steps": steps, **medians, "idle_cpu_seconds": idle}
            )
            seconds[side.name] += [s["seconds"] for s in taken]
            print_row(rows[-1])
    return rows, seconds


def print_row(row: dict) -> None:
    print("  ".join(f"{shown(row[c]):>{max(len(c), 6)}}" for c in COLUMNS), flush=True)


def shown(value) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def summary(rows: list[dict], seconds: dict[str, list[float]]) -> str:
    """The medians over all timed steps, their ratio, and the ratio's range over the rounds."""
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    by_round: dict[int, dict[str, float]] = {}
    for row in rows:
        by_round.setdefault(row["round"], {})[row["side"]] = row["seconds"]
    ratios = [r["ours"] / r["trl"] for r in by_round.values()]
    return (
        f"median seconds a step: ours {middle['ours']:.3f}, TRL {middle['trl']:.3f}; ratio ours / TRL "
        f"{middle['ours'] / middle['trl']:.3f} (by round {min(ratios):.3f} to {max(ratios):.3f})"
    )


def conditions(trl_site: Path, load: float) -> str:
    """Date, commit, versions and processor, in one line."""
    sys.path.insert(0, str(trl_site))
    names = ("trl", "transformers", "torch", "megatron-core", "sglang")
    versions = ", ".join(f"{n} {version(n)}" for n in names)
    machine = hardware()
    return (
        f"{time.strftime('%Y-%m-%d')}, commit {git_commit()}, {versions}, Python {sys.version.split()[0]}, "
        f"{machine['cpu']}, {machine['cores']} cores, load average at the start {load:.2f}"
    )


def write(path: Path, notes: list[str], rows: list[dict]) -> None:
    with path.open("w", newline="") as file:
        file.writelines(f"# {note}\n" for note in notes)
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        table.writerows(
            {k: f"{v:.4f}" if isinstance(v, float) else v for k, v in row.items()} for row in rows
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--trl-site", type=Path, help="folder that holds the packages of tests/bench/requirements.txt"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="steps of a side in a round")
    parser.add_argument(
        "--warm-up", type=int, default=3, help="untimed steps of each side before the first round"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("recorded"))
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)  # internal: be this side
    parser.add_argument("--total", type=int, help=argparse.SUPPRESS)
    a = parser.parse_args()
    settings = load_profile("cpu")
    if a.side:
        answers = private_stdout()
        RUN[a.side](settings, Turns(answers), a.total)
        return
    if a.trl_site is None or not (a.trl_site / "trl").is_dir():
        parser.error(
            "--trl-site must name a folder that holds TRL; tests/bench/requirements.txt says how to make it"
        )
    require_checkpoint(settings.checkpoint("warm"))
    load, site, folder = os.getloadavg()[0], a.trl_site.resolve(), settings.runs / "logs"
    total = a.warm_up + a.rounds * a.steps
    folder.mkdir(parents=True, exist_ok=True)
    sides = []
    try:
        for name in SIDES:
            sides.append(Side(name, settings, total, site, folder / f"bench-{name}.log"))
        print("  ".join(f"{c:>{max(len(c), 6)}}" for c in COLUMNS), flush=True)
        rows, seconds = measure(sides, a.rounds, a.steps, a.warm_up)
    finally:
        for side in sides:
            side.close()
    result = summary(rows, seconds)
    a.out.mkdir(parents=True, exist_ok=True)
    write(a.out / NAME, [conditions(site, load), result], rows)
    print(result)


if __name__ == "__main__":
    main()

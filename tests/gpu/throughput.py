"""How fast rollout and trainer are, beside the engines' own benchmarks and beside what the card allows.

    python tests/gpu/throughput.py --out DIR [--profile gpu] [--part all] [--layers N] [--checkpoint FOLDER]

Parts, each with its CSV; rows are printed and written as they come:
  limits   the card's copy bandwidth and matrix-product rate, measured in this run; every other part uses them (limits.csv)
  starts   a server started twice, the first with the kernel caches as they were found (starts.csv)
  rollout  our way, a RolloutServer over HTTP, against sglang's offline benchmark (rollout.csv, rollout_rounds.csv)
  step     the time split of GRPO steps, on profiles with room for server and trainer side by side (step.csv)
  trainer  MegatronTrainer.update against Megatron-Bridge's train_step, same model object (trainer.csv, trainer_rounds.csv)

rollout: theirs is sglang.benchmark.offline_throughput.throughput_test_once (what sglang.bench_offline_throughput runs) on one
Engine in a process of its own, with the ServerArgs that the same command line parses to. Its command line would start an Engine
for every number and needs a tokenizer, so token ids are handed to the Engine in the place of text. Both engines are up at the
same time and take turns; the idle one computes nothing. Both hold the same number of cache tokens.
trainer: theirs is megatron.bridge.training.train.train_step with gpt_step.forward_step, on our trainer's model, DDP buffers,
optimizer and schedule, so that only the step differs: theirs is next-token cross-entropy (fused), ours the GRPO loss on logprobs
with entropy and its other metrics. Turns alternate.

GPU time on one H200 for --part all with profile gpu: an estimate of 80 + 70 s for the two server starts, 75 s for the Engine,
35 s of rollouts, 20 s to build the trainer and take four steps, 10 s of training: just under 5 minutes. --part rollout: 3.
"""

import argparse
import dataclasses
import functools
import importlib.util
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from helpers.profiles import Profile, load_profile
from helpers.results import write_rows
from helpers.throughput import (
    Rates, forward_flops, model_flop_utilisation, rollout_limit, training_flops, training_limit,
)  # fmt: skip

PARTS = ("limits", "starts", "rollout", "step", "trainer")
REQUIRED = {False: 0.95, True: 0.90}  # ours / theirs without and with logprobs (issue 4)
OURS, THEIRS = "RolloutServer.post /generate", "sglang throughput_test_once"
UPDATE, TRAIN_STEP = "MegatronTrainer.update", "megatron.bridge train_step"
VALUE_BYTES = {"float32": 4, "bfloat16": 2}
# What theirs import beyond our locks, which leave out data loaders and trackers: for measuring only, never for the course.
THEIR_IMPORTS = {
    "rollout": ("datasets",),
    "trainer": (
        "datasets", "megatron.energon", "modelopt", "pulp", "orloge", "cpsat_logutils", "multistorageclient", "xattr", "wcmatch", "bracex",
        "braceexpand", "ryml", "deprecation", "lark", "jmespath", "filetype", "webdataset", "botocore", "opentelemetry",
        "tensorboard", "absl",
    ),
}  # fmt: skip
THEIR_PACKAGES = (
    "datasets multiprocess xxhash pandas pyarrow nvidia-modelopt pulp orloge cpsat-logutils megatron-energon "
    "multi-storage-client xattr wcmatch bracex braceexpand rapidyaml deprecation lark jmespath filetype webdataset botocore "
    "opentelemetry-api tensorboard absl-py"
)
KERNEL_CACHES = (".triton", ".cache/flashinfer", ".cache/tvm-ffi", ".cache/deep_gemm", ".nv/ComputeCache")


@dataclasses.dataclass
class Run:
    """What every part needs, and the tables it has written so far."""

    options: argparse.Namespace
    settings: Profile
    checkpoint: Path
    rates: Rates | None = None
    tables: dict[str, list[dict]] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def trainer(self):
        """The one trainer of this process: Megatron's parallel state is made once."""
        from helpers.trainer import MegatronTrainer

        return MegatronTrainer(self.settings, self.checkpoint)

    @property
    def cuda(self) -> bool:
        return self.settings.device == "cuda"

    def row(self, table: str, **values) -> dict:
        """Print a row and write its table anew."""
        rows = self.tables.setdefault(table, [])
        rows.append(values)
        print(table, {k: round(v, 4) if isinstance(v, float) else v for k, v in values.items()}, flush=True)
        write_rows(self.options.out / f"{table}.csv", rows)
        return values

    def synchronise(self) -> None:
        if self.cuda:
            import torch

            torch.cuda.synchronize()

    def seconds(self, call: Callable[[], object]) -> float:
        """Seconds of one call, with the GPU's work before and in it done."""
        self.synchronise()
        start = time.perf_counter()
        call()
        self.synchronise()
        return time.perf_counter() - start


# --- limits -----------------------------------------------------------------------------------------------------------
def card_rates(run: Run) -> Rates:
    """Copy bandwidth (a copy of n bytes reads n and writes n) and the rate of square products in the model's dtype."""
    import torch

    device, n = ("cuda", 8192) if run.cuda else ("cpu", 1024)
    size = (1 << 30) if run.cuda else (1 << 26)
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    copy = median_seconds(run, lambda: target.copy_(source))
    a, b, c = (
        torch.randn(n, n, device=device).to(getattr(torch, run.settings.model.dtype)) for _ in range(3)
    )
    product = median_seconds(run, lambda: torch.mm(a, b, out=c))
    return Rates(bandwidth=2 * size / copy, flops=2 * n**3 / product)


def median_seconds(run: Run, call: Callable[[], object], rounds: int = 10) -> float:
    """Median of `rounds` after two that warm up; by CUDA events, so that launching is not counted."""
    times = []
    for _ in range(rounds + 2):
        times.append(event_seconds(call) if run.cuda else run.seconds(call))
    return statistics.median(times[2:])


def event_seconds(call: Callable[[], object]) -> float:
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def require_theirs(wanted: set[str]) -> None:
    """End before any GPU time is spent where the engines' own benchmarks cannot be imported."""
    needed = {name for part, names in THEIR_IMPORTS.items() if part in wanted for name in names}
    absent = sorted(name for name in needed if importlib.util.find_spec(name) is None)
    if absent:
        raise SystemExit(
            f"{', '.join(absent)} cannot be imported, and sglang's benchmark or Megatron-Bridge's train_step need it: put "
            f"the packages into a folder (pip install --no-deps --target DIR {THEIR_PACKAGES}) and set PYTHONPATH=DIR, or "
            "measure ours alone with --only-ours"
        )


def limits(run: Run) -> None:
    import torch

    run.rates = card_rates(run)
    run.row(
        "limits", device=torch.cuda.get_device_name() if run.cuda else f"cpu, {torch.get_num_threads()} threads",
        dtype=run.settings.model.dtype, copy_terabytes_per_second=run.rates.bandwidth / 1e12,
        product_teraflops=run.rates.flops / 1e12,
    )  # fmt: skip
    if run.cuda:
        torch.cuda.empty_cache()  # the engines want the memory


# --- starts -----------------------------------------------------------------------------------------------------------
def cache_megabytes() -> float:
    """Kernel caches on this machine: what makes a start warm."""
    files = (f for name in KERNEL_CACHES for f in (Path.home() / name).rglob("*") if f.is_file())
    return sum(f.stat().st_size for f in files) / 1e6


def started(run: Run, name: str):
    """A server that has answered once; the row says how long both took."""
    from helpers.rollout import RolloutServer

    found = cache_megabytes()
    server = RolloutServer(run.settings, run.checkpoint).start().wait()
    try:
        start = time.perf_counter()
        ask(server, prompts(run, 4, "first"), 8, logprobs=True)
        run.row(
            "starts", start=name, start_seconds=server.start_seconds,
            first_answers_seconds=time.perf_counter() - start, kernel_cache_megabytes_before=found,
        )  # fmt: skip
    except BaseException:
        server.stop()
        raise
    return server


# --- rollout ----------------------------------------------------------------------------------------------------------
def prompts(run: Run, count: int, seed: str) -> list[list[int]]:
    """Random tokens: no two prompts share a prefix, and none was asked before (a prefix cache would answer it)."""
    rng, vocabulary = random.Random(seed), run.settings.model.vocab_size
    return [[rng.randrange(1, vocabulary) for _ in range(run.options.prompt)] for _ in range(count)]


def sampling(response: int) -> dict:
    """Every answer runs to its full length, so that both sides decode as many tokens."""
    return {"temperature": 1.0, "max_new_tokens": response, "ignore_eos": True}


def ask(server, asked: list[list[int]], response: int, logprobs: bool) -> list[dict]:
    """The request that RolloutServer.generate sends, with ignore_eos, which it does not offer."""
    from helpers.harmony import stop_token_ids

    return server.post(
        "/generate", input_ids=asked, return_logprob=logprobs,
        sampling_params=sampling(response) | {"stop_token_ids": stop_token_ids(server.tokenizer)},
    )  # fmt: skip


class EngineProcess:
    """SGLang's Engine with the server's own flags, in a process that runs their benchmark on request."""

    def __init__(self, run: Run):
        from helpers.rollout import LAUNCHER, free_port, server_command

        command = server_command(run.settings, run.checkpoint, free_port())
        arguments = command[command.index("sglang.launch_server") + 1 :]
        self.log, waits = run.options.out / "engine.log", run.settings.rollout
        self.start_timeout, self.timeout = waits.start_timeout, waits.request_timeout
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{folder}/engine")
            listener.listen()
            listener.settimeout(60)
            with self.log.open("w") as out:
                self.process = subprocess.Popen(
                    [sys.executable, "-S", str(LAUNCHER), sys.executable, "-W", "ignore", __file__, "--engine",
                     f"{folder}/engine", *arguments],
                    stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
                    env=self._environment(run),
                )  # fmt: skip
            self.connection = Connection(listener.accept()[0].detach())  # asked for before any import

    def _environment(self, run: Run) -> dict[str, str]:
        environment = {**os.environ, **run.settings.process_environment("server")}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        # profile cpu sets a path of its own for servers; keep the one that this process found its packages by
        paths = environment.get("PYTHONPATH"), os.environ.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join(path for path in dict.fromkeys(paths) if path)
        return environment

    def wait(self) -> float:
        """Seconds from the process's first line to a ready Engine, as it saw them itself."""
        return self._receive(self.start_timeout)

    def measure(self, asked: list[list[int]], response: int, logprobs: bool) -> dict:
        """throughput_test_once's results: total_latency, total_output_tokens, output_throughput and others."""
        self.connection.send((asked, response, logprobs))
        return self._receive(self.timeout)

    def _receive(self, timeout: float):
        try:
            if self.connection.poll(timeout):
                return self.connection.recv()
            problem = f"did not answer within {timeout:.0f} s"
        except (EOFError, ConnectionError):
            problem = "ended"
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-12:])
        raise RuntimeError(f"the Engine's process {problem}. Last lines of {self.log}:\n{tail}")

    def stop(self) -> None:
        """The launcher ends the Engine and all its processes. Seen on a CPU: a named semaphore of 32 bytes stays."""
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(10)
        self.connection.close()


class TokenIds:
    """The Engine as throughput_test_once sees it, with token ids where it hands over text: no tokenizer on either side."""

    def __init__(self, engine):
        self.engine = engine
        self.get_server_info = engine.get_server_info

    def generate(self, prompt: list[list[int]], **request):
        return self.engine.generate(input_ids=prompt, **request)


def build_engine(arguments: list[str]):
    """An Engine with the ServerArgs that sglang.launch_server parses from the same command line."""
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    # their main builds the arguments twice (Engine(**asdict(...))), which refuses gpt-oss on a CPU the second time
    return Engine(server_args=ServerArgs.from_cli_args(parser.parse_args(arguments)))


def engine_process(address: str, arguments: list[str]) -> None:
    """What EngineProcess starts: sends the seconds to a ready Engine, then a measurement for each request."""
    start, link = time.monotonic(), socket.socket(socket.AF_UNIX)
    link.connect(address)
    connection = Connection(link.detach())
    from sglang.benchmark.datasets import DatasetRow
    from sglang.benchmark.offline_throughput import throughput_test_once

    engine = build_engine(arguments)
    try:
        connection.send(time.monotonic() - start)
        while True:
            asked, response, logprobs = connection.recv()
            rows = [DatasetRow(prompt=ids, prompt_len=len(ids), output_len=response) for ids in asked]
            how = dict(ignore_eos=True, extra_request_body=sampling(response), profile=False)
            connection.send(
                throughput_test_once("engine", TokenIds(engine), rows, return_logprob=logprobs, **how)
            )
    except EOFError:  # the parent closed its end, or is gone
        pass
    finally:
        engine.shutdown()


def measure_ours(server, asked: list[list[int]], response: int, logprobs: bool) -> dict:
    """As in a GRPO step: the request, and its JSON read. transport: what the server's own clock of its slowest request lacks."""
    start = time.perf_counter()
    outputs = ask(server, asked, response, logprobs)
    seconds = time.perf_counter() - start
    outputs = outputs if isinstance(outputs, list) else [outputs]
    inside = max(output["meta_info"]["e2e_latency"] for output in outputs)
    tokens = sum(output["meta_info"]["completion_tokens"] for output in outputs)
    return {"seconds": seconds, "tokens": tokens, "transport_seconds": seconds - inside}


def measure_theirs(engine: EngineProcess, asked: list[list[int]], response: int, logprobs: bool) -> dict:
    found = engine.measure(asked, response, logprobs)
    return {
        "seconds": found["total_latency"], "tokens": found["total_output_tokens"], "transport_seconds": "",
    }  # fmt: skip


def rollout(run: Run, server, engine: EngineProcess | None) -> None:
    """Both sides in turn at every concurrency, without and with logprobs; the order changes from round to round."""
    sides = {OURS: (measure_ours, server)} | ({THEIRS: (measure_theirs, engine)} if engine else {})
    for concurrent in run.options.concurrent:
        for logprobs in (False, True):
            found: dict[str, list[dict]] = {side: [] for side in sides}
            for turn in range(run.options.rounds + 1):
                for side in list(sides)[:: 1 if turn % 2 else -1]:
                    measure, target = sides[side]
                    asked = prompts(run, concurrent, f"{concurrent} {logprobs} {turn}")
                    measured = measure(target, asked, run.options.response, logprobs)
                    run.row(
                        "rollout_rounds", side=side, concurrent=concurrent, logprobs=logprobs, round=turn,
                        warm_up=turn == 0, **measured, tokens_per_second=measured["tokens"] / measured["seconds"],
                    )  # fmt: skip
                    found[side] += [measured] if turn else []
            compare_rollout(run, concurrent, logprobs, found)


def compare_rollout(run: Run, concurrent: int, logprobs: bool, found: dict[str, list[dict]]) -> None:
    """Medians side by side, with what the card's rates allow."""
    options, model = run.options, run.settings.model
    rates = {
        side: statistics.median(m["tokens"] / m["seconds"] for m in rows) for side, rows in found.items()
    }
    ours, theirs = rates[OURS], rates.get(THEIRS)
    limit = rollout_limit(
        model, concurrent, options.prompt, options.response, run.rates, VALUE_BYTES[model.dtype]
    )
    run.row(
        "rollout", concurrent=concurrent, logprobs=logprobs, prompt=options.prompt, response=options.response,
        ours_tokens_per_second=ours, theirs_tokens_per_second=theirs, ratio=theirs and ours / theirs, required=REQUIRED[logprobs],
        transport_seconds=statistics.median(m["transport_seconds"] for m in found[OURS]),
        limit_tokens_per_second=limit, share_of_limit=ours / limit,
    )  # fmt: skip


# --- one GRPO step ----------------------------------------------------------------------------------------------------
def step(run: Run, server, trainer, steps: int = 3) -> None:
    """Seconds of each call of a step as notebook 05 makes them; the step before the first warms up."""
    from helpers.tasks import load_task

    task = load_task(run.settings.task, run.settings.seed)
    for number in range(steps + 1):
        problems = task.sample(run.settings.batch.prompts, number)
        seconds, episodes, batch = one_step(run, server, trainer, problems, number)
        worked = step_limits(run, episodes, batch)
        for call, took in seconds.items():
            tokens, limit = worked.get(call, (0, ""))
            run.row(
                "step", step=number, warm_up=number == 0, call=call, seconds=took, share=took / sum(seconds.values()),
                tokens_per_second=tokens / took if tokens else "", limit_tokens_per_second=limit,
            )  # fmt: skip


def step_limits(run: Run, episodes, batch) -> dict[str, tuple[int, float]]:
    """call -> (tokens it made or trained on, tokens/s that the card's rates allow for these lengths on average)."""
    model, count = run.settings.model, len(episodes)
    generated = sum(len(e.completion_ids) for e in episodes)
    prompt = round(sum(len(e.prompt_ids) for e in episodes) / count)
    rollouts = rollout_limit(
        model, count, prompt, max(round(generated / count), 1), run.rates, VALUE_BYTES[model.dtype]
    )
    frozen = run.settings.trainer.freeze_experts
    return {
        "roll out": (generated, rollouts),
        "update": (batch.tokens.numel(), training_limit(model, batch.size[1], run.rates, frozen)),
    }


def one_step(run: Run, server, trainer, problems, number: int):
    """Seconds by call, the episodes and the batch."""
    import torch

    from helpers.advantages import group_advantages
    from helpers.checkpoints import tokenizer_and_pad
    from helpers.collate import collate
    from helpers.rewards import score
    from helpers.rollout import roll_out
    from helpers.weight_sync import sync_weights

    tokenizer, pad_id = tokenizer_and_pad(run.checkpoint)
    seconds: dict[str, float] = {}

    def timed(name: str, call: Callable[[], object]):
        kept = []
        seconds[name] = run.seconds(lambda: kept.append(call()))
        return kept[0]

    episodes = timed("roll out", lambda: roll_out(server, problems, run.settings))
    rewards = timed("score", lambda: torch.tensor(score(episodes, problems, tokenizer)))
    groups = torch.tensor([e.group for e in episodes])
    advantages = timed(
        "advantages", lambda: group_advantages(rewards, groups, run.settings.algorithm.advantage)
    )
    batch = timed("collate", lambda: collate(episodes, advantages, pad_id, run.settings.trainer.seq_length))
    timed("update", lambda: trainer.update(batch))
    timed("sync", lambda: sync_weights(trainer, server, f"throughput-{number}"))
    return seconds, episodes, batch


# --- trainer ----------------------------------------------------------------------------------------------------------
def shapes(run: Run) -> list[tuple[int, int]]:
    """(episodes, sequence): as asked for, else the profile's own step and, on a GPU, a long one."""
    if run.options.shapes:
        return [tuple(int(n) for n in shape.split("x")) for shape in run.options.shapes]
    from helpers.harmony import encode, load_tokenizer
    from helpers.tasks import load_task

    settings = run.settings
    tokenizer = load_tokenizer(run.checkpoint)
    longest = max(len(encode(tokenizer, p.prompt)) for p in load_task(settings.task).sample(64))
    sequence = -(-(longest + settings.sampling.max_new_tokens) // 8) * 8
    # enough micro-batches to see their rate, not a whole step of the large profiles
    own = (min(settings.batch.episodes, 8 * settings.trainer.micro_batch), sequence)
    return [own, (min(64, own[0]), 1024)] if run.cuda and sequence < 1024 else [own]


def synthetic_batch(run: Run, episodes: int, sequence: int):
    """Full rows of random tokens, the first quarter the prompt; no padding, so every position is a trained shape."""
    import torch

    from helpers.collate import collate
    from helpers.records import Episode

    rng, vocabulary = random.Random(0), run.settings.model.vocab_size
    prompt = sequence // 4

    def episode(i: int) -> Episode:
        ids = tuple(rng.randrange(1, vocabulary) for _ in range(sequence))
        return Episode(ids[:prompt], ids[prompt:], (-2.0,) * (sequence - prompt), "length", i // 8)

    advantages = torch.tensor([1.0 if i % 2 else -1.0 for i in range(episodes)])
    return collate([episode(i) for i in range(episodes)], advantages, 0, sequence)


class BridgeStep:
    """Megatron-Bridge's own training step on our trainer's model, optimizer and schedule."""

    def __init__(self, trainer, micro_batch: int, episodes: int, sequence: int):
        from megatron.bridge.training import config as c
        from megatron.bridge.training.gpt_step import forward_step
        from megatron.bridge.training.state import GlobalState
        from megatron.bridge.training.tokenizers.config import TokenizerConfig
        from megatron.bridge.training.utils.pg_utils import get_pg_collection
        from megatron.bridge.training.utils.train_utils import prepare_forward_step_func
        from megatron.core import num_microbatches_calculator as calculator
        from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
        from megatron.core.utils import get_model_config

        model = trainer.model
        config = c.ConfigContainer(
            train=c.TrainingConfig(train_iters=1000, global_batch_size=episodes, micro_batch_size=micro_batch),
            model=model.provider, optimizer=trainer.optimizer.config, ddp=model.module.ddp_config,
            scheduler=c.SchedulerConfig(), logger=c.LoggerConfig(), tokenizer=TokenizerConfig(),
            checkpoint=c.CheckpointConfig(),
            dataset=c.MockGPTDatasetConfig(
                seq_length=sequence, dataloader_type="single", random_seed=0, reset_position_ids=False,
                reset_attention_mask=False, eod_mask_loss=False,
            ),
        )  # fmt: skip
        get_model_config(model.module).seq_length = model.provider.seq_length = sequence
        config.set_data_parallel_size()
        calculator.unset_num_microbatches_calculator()
        calculator.init_num_microbatches_calculator(0, None, episodes, micro_batch, config.data_parallel_size)
        self.trainer, self.state, self.groups = trainer, GlobalState(), get_pg_collection(model.chunks)
        self.state.cfg = config
        self.forward_step = prepare_forward_step_func(forward_step, self.state)
        self.p2p = P2PCommunicator(pp_group=self.groups.pp, config=get_model_config(model.module))

    def __call__(self, micro_batches: list[dict]) -> float:
        """One step; returns the mean loss. Raises RuntimeError where it was skipped."""
        from megatron.bridge.training.train import train_step
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.rerun_state_machine import RerunDataIterator

        losses, skipped, *_ = train_step(
            self.forward_step, RerunDataIterator(iter(micro_batches)), self.trainer.model.chunks,
            self.trainer.optimizer, self.trainer.scheduler, self.state, self.groups, get_forward_backward_func(),
            self.p2p,
        )  # fmt: skip
        if skipped:
            raise RuntimeError("Megatron-Bridge's train_step skipped its update")
        return losses["lm loss"].item()


def micro_batches(batch, size: int) -> list[dict]:
    """The rows as Megatron-Bridge's data loaders hand them over; without a mask, which the model makes itself."""
    parts = [batch.rows(slice(i, i + size)) for i in range(0, batch.size[0], size)]
    names = ("tokens", "labels", "loss_mask", "position_ids")
    return [{name: getattr(part, name) for name in names} | {"attention_mask": None} for part in parts]


def train(run: Run, trainer) -> None:
    for episodes, sequence in shapes(run):
        batch = synthetic_batch(run, episodes, sequence)
        size = min(run.settings.trainer.micro_batch, episodes)
        sides: dict[str, Callable] = {UPDATE: lambda: trainer.update(batch)}
        if not run.options.only_ours:
            bridge, parts = BridgeStep(trainer, size, episodes, sequence), micro_batches(batch, size)
            sides[TRAIN_STEP] = lambda: bridge(parts)
        found: dict[str, list[float]] = {side: [] for side in sides}
        for turn in range(run.options.rounds + 2):  # two warm up: kernels are chosen, then memory settles
            for side in list(sides)[:: 1 if turn % 2 else -1]:
                seconds = run.seconds(sides[side])
                run.row(
                    "trainer_rounds", side=side, episodes=episodes, sequence=sequence, micro_batch=size, round=turn,
                    warm_up=turn < 2, seconds=seconds, tokens_per_second=episodes * sequence / seconds,
                )  # fmt: skip
                found[side] += [seconds] if turn > 1 else []
        compare_training(run, episodes, sequence, size, found)
        for part, seconds in update_parts(run, trainer, batch).items():
            run.row("update_parts", episodes=episodes, sequence=sequence, part=part, seconds=seconds)


def compare_training(
    run: Run, episodes: int, sequence: int, size: int, found: dict[str, list[float]]
) -> None:
    """Medians side by side, with the FLOPs that they stand for and the rate that was measured for one product."""
    rates = {side: episodes * sequence / statistics.median(seconds) for side, seconds in found.items()}
    ours, theirs = rates[UPDATE], rates.get(TRAIN_STEP)
    frozen = run.settings.trainer.freeze_experts
    flops = sum(training_flops(run.settings.model, sequence, frozen).values())
    run.row(
        "trainer", episodes=episodes, sequence=sequence, micro_batch=size, ours_tokens_per_second=ours,
        theirs_tokens_per_second=theirs, ratio=theirs and ours / theirs, training_gigaflops_per_token=flops / 1e9,
        forward_gigaflops_per_token=sum(forward_flops(run.settings.model, sequence).values()) / 1e9,
        ours_mfu=model_flop_utilisation(ours, flops, run.rates),
        theirs_mfu=theirs and model_flop_utilisation(theirs, flops, run.rates),
        limit_tokens_per_second=training_limit(run.settings.model, sequence, run.rates, frozen),
    )  # fmt: skip


def update_parts(run: Run, trainer, batch, rounds: int = 2) -> dict[str, float]:
    """Mean seconds of each part of an update. A wait for the GPU at every boundary makes the whole a little slower."""
    whole = []
    with parts_timed(run, trainer) as seconds:
        for _ in range(rounds):
            whole.append(run.seconds(lambda: trainer.update(batch)))
    mean = {name: total / rounds for name, total in seconds.items()}
    passes = mean.pop("forward and backward")
    in_loss = ("logprobs", "entropy", "backward of logprobs")
    model = passes - sum(mean[name] for name in in_loss)
    update = sum(whole) / rounds
    rest = update - passes - mean["zero gradients"] - mean["optimizer"]
    return {
        "model forward and backward, rest of the loss": model,
        **mean,
        "rest": rest,
        "whole update": update,
    }


@contextmanager
def parts_timed(run: Run, trainer) -> Iterator[dict[str, float]]:
    """Clocks around the parts of trainer.update while the block runs: part -> seconds so far."""
    import helpers.trainer as module

    seconds: dict[str, float] = {}
    places = [
        (trainer, "_zero_gradients", "zero gradients"), (trainer, "_forward_backward", "forward and backward"),
        (trainer, "_optimizer_step", "optimizer"), (module, "token_entropy", "entropy"),
    ]  # fmt: skip
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
    logprobs = module.token_logprobs
    for owner, name, part in places:
        setattr(owner, name, clocked(run, seconds, part, getattr(owner, name)))
    module.token_logprobs = clocked(
        run, seconds, "logprobs", backward_clocked(run, seconds, "backward of logprobs", logprobs)
    )
    try:
        yield seconds
    finally:
        module.token_logprobs = logprobs
        for owner, name, original in kept:
            if owner is trainer:
                delattr(owner, name)  # back to the class's method
            else:
                setattr(owner, name, original)


def clocked(run: Run, seconds: dict[str, float], part: str, call: Callable) -> Callable:
    def timed(*args, **kwargs):
        kept = []
        took = run.seconds(lambda: kept.append(call(*args, **kwargs)))
        seconds[part] = seconds.get(part, 0.0) + took
        return kept[0]

    return timed


def backward_clocked(run: Run, seconds: dict[str, float], part: str, call: Callable) -> Callable:
    """From the arrival of the logprobs' gradient until that of the logits is there."""

    def timed(logits, *args):
        started = []

        def begin(gradient):
            run.synchronise()
            started.append(time.perf_counter())

        def end(gradient):
            run.synchronise()
            seconds[part] = seconds.get(part, 0.0) + time.perf_counter() - started.pop()

        logprobs = call(logits, *args)
        logits.register_hook(end)
        logprobs.register_hook(begin)
        return logprobs

    return timed


# --- all of it --------------------------------------------------------------------------------------------------------
def serve_parts(run: Run, wanted: set[str]) -> None:
    """starts and rollout; `step` too, where server and trainer fit side by side. One server at a time, each started once."""
    from helpers.bridge import prepare_process

    if "starts" in wanted:
        started(run, "server, first on this machine in this run").stop()
    server = started(run, "server, second" if "starts" in wanted else "server")
    try:
        if "rollout" in wanted:
            engine = None if run.options.only_ours else EngineProcess(run)
            try:
                if wanted & {"step", "trainer"}:
                    prepare_process(run.settings)  # imports, while the Engine starts
                if engine:
                    run.row(
                        "starts", start="Engine in a process", start_seconds=engine.wait(), first_answers_seconds="",
                        kernel_cache_megabytes_before="",
                    )  # fmt: skip
                rollout(run, server, engine)
            finally:
                if engine:
                    engine.stop()
        if "step" in wanted and run.settings.rollout.shared:
            step(run, server, run.trainer)
    finally:
        server.stop()


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--profile", default="gpu")
    parser.add_argument("--part", choices=[*PARTS, "all"], default="all")
    parser.add_argument("--layers", type=int, help="fewer layers than the profile's model")
    parser.add_argument(
        "--checkpoint", type=Path, help="a plain folder of that shape; default: random weights"
    )
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt (rollout)")
    parser.add_argument("--response", type=int, default=256, help="tokens of each answer (rollout)")
    parser.add_argument("--concurrent", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument(
        "--mem-fraction",
        type=float,
        help="of both engines; the second takes its share of what the first left",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only-ours", action="store_true", help="without sglang's and Megatron-Bridge's own")
    parser.add_argument("--shapes", nargs="+", help="episodes x sequence of the trainer, such as 64x1024")
    return parser.parse_args()


def make_run(options: argparse.Namespace) -> Run:
    """Settings and checkpoint. The cache size is set, since two engines that share a card would find different ones."""
    changes: dict[str, object] = {}
    if options.layers:
        changes["model.num_hidden_layers"] = options.layers
    if options.mem_fraction:
        changes["rollout.mem_fraction"] = options.mem_fraction
    if options.part in ("rollout", "all"):
        tokens = 2 * max(options.concurrent) * (options.prompt + options.response)
        changes["rollout.max_total_tokens"] = max(tokens, 16_384)
    settings = load_profile(options.profile, **changes)
    os.environ.update(settings.process_environment("kernel"))
    from helpers.checkpoints import starting_checkpoint, write_tiny_checkpoint

    if options.checkpoint:
        return Run(options, settings, options.checkpoint)
    if options.layers:
        folder = settings.checkpoint(f"random-{options.layers}-layers")
        return Run(options, settings, write_tiny_checkpoint(settings, folder))
    return Run(options, settings, starting_checkpoint(settings))


def main() -> None:
    options = parsed()
    wanted = set(PARTS) if options.part == "all" else {options.part}
    if not options.only_ours:
        require_theirs(wanted)
    options.out.mkdir(parents=True, exist_ok=True)
    run = make_run(options)
    limits(run)
    if wanted & {"starts", "rollout", "step"}:
        serve_parts(run, wanted)
    if "trainer" in wanted:
        train(run, run.trainer)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--engine"]:
        engine_process(sys.argv[2], sys.argv[3:])
    else:
        main()

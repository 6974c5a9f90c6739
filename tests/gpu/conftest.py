"""What the tests on a GPU share: one trainer in this process, one SGLang server (and two small ones), one result file.

    python -m pytest tests/gpu -q

Without a GPU every test is skipped with the reason, and nothing that takes time is imported. The results (value, unit, limit)
go to runs/gpu/gpu_tests.json, or to the file that GRPO_GPU_RESULTS names; also those of tests that fail.
GRPO_GPU_TESTS_PROFILE=cpu runs what needs no card with profile cpu: for whoever changes these tests without a GPU.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers.preflight import gpu_names
from helpers.profiles import load_profile
from helpers.results import git_commit, hardware, versions, write_atomically

HERE = Path(__file__).parent
PROFILE = os.environ.get("GRPO_GPU_TESTS_PROFILE", "gpu")
ON_CARD = PROFILE != "cpu"
PLUGIN = "gpu-results"
LONG_STEPS = {
    "warm": 80,
    "random": 300,
}  # supervised steps on long documents, from a warm-started or a random model


# --- is there a GPU? ----------------------------------------------------------------------------------------------------
def missing() -> str:
    """Why these tests cannot run here, "" where they can. Sets the trainer's environment before torch is imported."""
    if ON_CARD and not gpu_names():
        return f"no GPU: nvidia-smi lists none (profile {PROFILE})"
    os.environ.update(load_profile(PROFILE).process_environment("trainer"))
    os.environ.pop("GRPO_SHARED_SERVER", None)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # engines import twice as slowly without byte code
    if not ON_CARD:
        return ""
    # TransformerEngine asks cuBLAS for TF32 in every float32 product; cuBLAS reads this once. bfloat16 is not touched by it.
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
    import torch

    return "" if torch.cuda.is_available() else f"no GPU: torch sees none (profile {PROFILE})"


def pytest_collection_modifyitems(config, items):
    ours = [item for item in items if item.path.is_relative_to(HERE)]
    reason = missing() if ours else ""
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
    if ours and not reason:
        path = Path(os.environ.get("GRPO_GPU_RESULTS") or load_profile(PROFILE).runs / "gpu_tests.json")
        terminal = config.pluginmanager.get_plugin("terminalreporter")
        config.pluginmanager.register(
            Results(path, {item.nodeid for item in ours}, terminal.write_line), PLUGIN
        )


@pytest.fixture(scope="session")
def card():
    """Skips what only a GPU can show when these tests are tried with profile cpu."""
    if not ON_CARD:
        pytest.skip("needs a GPU: profile cpu was asked for by GRPO_GPU_TESTS_PROFILE")


# --- results ------------------------------------------------------------------------------------------------------------
class Results:
    """A pytest plugin that keeps every recorded number and every test's outcome, and writes them after each test."""

    def __init__(self, path: Path, tests: set[str], say: Callable[[str], None]):
        self.path, self.tests, self.say, self.start = path, tests, say, time.monotonic()
        self.date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.facts: dict[str, str] = {}
        self.rows: list[dict] = []
        self.outcomes: dict[str, str] = {}
        self.seconds: dict[str, float] = {}

    def add(self, test: str, name: str, value: float, unit: str, below: float | None, at_least: float | None):
        """One number; raises AssertionError where it breaks its limit. NaN breaks every limit."""
        value = float(value)
        low = at_least is None or value >= at_least
        high = below is None or value < below
        kept = value if math.isfinite(value) else str(value)  # JSON has no NaN
        limit = (
            {"below": below} if below is not None else {"at_least": at_least} if at_least is not None else {}
        )
        self.rows.append(
            {"test": test, "name": name, "value": kept, "unit": unit, "limit": limit, "ok": low and high}
        )
        self.say(f"  {name} = {value:.6g} {unit} {limit or ''}")
        assert low and high, f"{name} is {value:.6g} {unit}, the limit is {limit}"

    def pytest_runtest_logreport(self, report):
        if report.nodeid not in self.tests:
            return
        worst = self.outcomes.get(report.nodeid) == "failed" or report.failed
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid] = "failed" if worst else report.outcome
        self.seconds[report.nodeid] = round(self.seconds.get(report.nodeid, 0.0) + report.duration, 2)
        if report.when == "teardown":
            self.write()

    def write(self) -> None:
        record = {
            "schema": 1, "what": "tests/gpu", "profile": PROFILE, "date": self.date, "commit": git_commit(),
            "command": "python -m pytest tests/gpu", "hardware": hardware(), "versions": versions(), "facts": self.facts,
            "seconds": round(time.monotonic() - self.start, 1), "results": self.rows, "outcomes": self.outcomes,
            "test_seconds": self.seconds,
        }  # fmt: skip
        write_atomically(self.path, json.dumps(record, indent=1, allow_nan=False) + "\n")


@pytest.fixture(scope="session")
def say(request) -> Callable[[str], None]:
    """Prints a line at once, past pytest's capture: on a lent machine one wants to see where the minutes go."""
    return request.config.pluginmanager.get_plugin(PLUGIN).say


@pytest.fixture(scope="session")
def facts(request) -> dict[str, str]:
    """name -> text that goes to the result file beside the numbers."""
    return request.config.pluginmanager.get_plugin(PLUGIN).facts


@pytest.fixture
def record(request):
    """record(name, value, unit, below=..., at_least=...) keeps a number with its limit, and fails the test beyond it."""
    results = request.config.pluginmanager.get_plugin(PLUGIN)

    def keep(name: str, value: float, unit: str, below: float | None = None, at_least: float | None = None):
        results.add(request.node.nodeid, name, value, unit, below, at_least)

    return keep


# --- models -------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="session")
def settings():
    """The profile, with a server that can release its memory and a cache whose size does not hang on what else is there."""
    if not ON_CARD:
        cpu = load_profile("cpu")
        able = (*cpu.rollout.server_arguments, "--enable-return-routed-experts")  # one server for all
        return replace(cpu, rollout=replace(cpu.rollout, server_arguments=able))
    few_graphs = (*load_profile(PROFILE).rollout.server_arguments, "--cuda-graph-max-bs-decode", "64")
    return load_profile(
        PROFILE,
        **{
            "rollout.memory_saver": True,
            "rollout.max_total_tokens": 1_000_000,
            "rollout.max_running_requests": 256,
            "rollout.server_arguments": few_graphs,
        },
    )


@pytest.fixture(scope="session")
def start(settings) -> Path:
    """The profile's warm-started checkpoint where notebook 02 left one, else random weights."""
    from helpers.checkpoints import starting_checkpoint

    warm = settings.checkpoint("warm")
    return warm if (warm / "config.json").is_file() else starting_checkpoint(settings)


@pytest.fixture(scope="session")
def mxfp4_checkpoint(settings, tmp_path_factory) -> Path:
    """Two layers of the profile's shape in MXFP4: SGLang's path for such experts depends on no depth."""
    from helpers.checkpoints import write_tiny_checkpoint
    from helpers.mxfp4 import write_mxfp4_checkpoint

    folder = tmp_path_factory.mktemp("mxfp4")
    two = replace(settings, model=replace(settings.model, num_hidden_layers=2))
    return write_mxfp4_checkpoint(write_tiny_checkpoint(two, folder / "plain"), folder / "mxfp4")


@contextmanager
def started(settings, checkpoint: Path, served: Path | None = None) -> Iterator:
    """A server that is starting; served: what it loads, past the rule that MXFP4 is served through a plain copy."""
    from helpers.rollout import RolloutServer

    server = RolloutServer(settings, checkpoint)
    server.checkpoint = served or server.checkpoint
    tf32 = os.environ.pop("NVIDIA_TF32_OVERRIDE", None)  # a server as in a real run
    try:
        server.start()
    finally:
        if tf32 is not None:
            os.environ["NVIDIA_TF32_OVERRIDE"] = tf32
    try:
        yield server
    finally:
        server.stop()


def asked_for(request, fixture: str) -> bool:
    return any(fixture in item.fixturenames for item in request.session.items)


@pytest.fixture(scope="session", autouse=True)
def starting_mxfp4_server(request, settings):
    """Both servers start first and are waited for late: their starts overlap with each other and with the training."""
    if not (ON_CARD and asked_for(request, "mxfp4_server")):
        yield None
        return
    able = (*settings.rollout.server_arguments, "--enable-return-routed-experts")
    small = replace(
        settings,
        rollout=replace(
            settings.rollout, memory_saver=False, max_total_tokens=20_000, max_running_requests=16,
            server_arguments=able,
        ),
    )  # fmt: skip
    start, quantised = request.getfixturevalue("start"), request.getfixturevalue("mxfp4_checkpoint")
    with started(small, start, quantised) as server:
        yield server


@pytest.fixture(scope="session", autouse=True)
def starting_replay_server(request, settings):
    """A third one, whose kernel for experts says which ones a token took; SGLang's own choice on this card does not."""
    if not (ON_CARD and asked_for(request, "replay_server")):
        yield None
        return
    small = replace(
        settings,
        algorithm=replace(settings.algorithm, routing_replay=True),
        rollout=replace(
            settings.rollout, memory_saver=False, max_total_tokens=50_000, max_running_requests=64
        ),
    )
    with started(small, request.getfixturevalue("start")) as server:
        yield server


@pytest.fixture(scope="session", autouse=True)
def starting_server(request, settings):
    if not (asked_for(request, "server") or (asked_for(request, "replay_server") and not ON_CARD)):
        yield None
        return
    with started(settings, request.getfixturevalue("start")) as server:
        yield server


@pytest.fixture(scope="session")
def mxfp4_server(card, starting_mxfp4_server):
    """A server that loaded MXFP4, up; experts run in SGLang's own choice of kernels for gpt-oss."""
    return starting_mxfp4_server.wait()


@pytest.fixture(scope="session")
def quiet_card(card, server, starting_mxfp4_server, starting_replay_server):
    """All servers have started, or ended: nothing but a test itself moves the card's memory."""
    from helpers.rollout import RolloutError

    for starting in (starting_mxfp4_server, starting_replay_server):
        if starting is not None:
            with suppress(RolloutError):  # the test that needs this server says why it did not start
                starting.wait()


@pytest.fixture(scope="session")
def tokens(start) -> SimpleNamespace:
    """tokenizer and pad id."""
    from helpers.checkpoints import tokenizer_and_pad

    tokenizer, pad = tokenizer_and_pad(start)
    return SimpleNamespace(tokenizer=tokenizer, pad=pad)


@pytest.fixture(scope="session")
def documents(settings, tokens):
    """(count, length, seed) -> token lists of that length: demonstrations of the task one after the other.

    A trained model is at home in them past the window, where single questions never reach.
    """
    from helpers.harmony import encode
    from helpers.tasks import load_task

    w = settings.warm_start
    task = load_task(settings.task, settings.seed).demonstrations(4000, w.lazy_share, w.slip_rate)
    pool = [encode(tokens.tokenizer, d.prompt + d.completion) for d in task]

    def document(rng: random.Random, length: int) -> list[int]:
        document: list[int] = []
        while len(document) < length:
            document += rng.choice(pool)
        return document[:length]

    def make(count: int, length: int, seed: int) -> list[list[int]]:
        rng = random.Random(f"documents-{seed}")
        return [document(rng, length) for _ in range(count)]

    return make


@pytest.fixture(scope="session")
def trainer(settings, start, tokens, documents, say):
    """Megatron with trained weights: supervised steps on documents of three windows, from `start`. Tests change the weights
    and put them back with trainer.load_weights(trained)."""
    from helpers.losses import supervised_loss
    from helpers.parity import padded_batch
    from helpers.trainer import MegatronTrainer
    from helpers.warm_start import warm_start_settings

    w = replace(settings.warm_start, steps=LONG_STEPS["warm" if "warm" in start.name else "random"], batch=32)
    trainer = MegatronTrainer(warm_start_settings(replace(settings, warm_start=w)), start)
    begun = time.monotonic()
    for step in range(w.steps):
        batch = padded_batch(documents(w.batch, 3 * settings.model.sliding_window, step + 1), tokens.pad)
        stats = trainer.update(batch, supervised_loss)
        if step % 20 == 0 or step == w.steps - 1:
            say(f"  step {step}: loss {stats['loss']:.3f}, {time.monotonic() - begun:.0f} s")
    return trainer


@pytest.fixture(scope="session")
def trained(trainer, tmp_path_factory) -> Path:
    """The trainer's weights as a checkpoint."""
    return trainer.export_checkpoint(tmp_path_factory.mktemp("trained") / "checkpoint")


@pytest.fixture(scope="session")
def server(starting_server, trained, say):
    """The server, up, with the trained weights. Tests put them back with server.load_weights(trained)."""
    server = starting_server.wait()
    say(f"  server up after {server.start_seconds:.0f} s")
    server.load_weights(trained)
    return server


@pytest.fixture(scope="session")
def replay_server(request, starting_replay_server, trained):
    """A server that returns experts, up, with the trained weights. (On a CPU the one server does.)"""
    if starting_replay_server is None:
        server = request.getfixturevalue("server")
    else:
        server = starting_replay_server.wait()
    server.load_weights(trained)
    return server


@pytest.fixture(scope="session")
def reference(trained, device):
    """transformers, float32, eager, with the trained weights, on the trainer's device. Tests put back what they change."""
    from helpers.faults import load_reference

    return load_reference(trained).to(device)


@pytest.fixture(scope="session")
def device(settings) -> str:
    return settings.device


@pytest.fixture(scope="session")
def prompts(settings, documents) -> list[list[int]]:
    """Documents shorter than the window, at its edge, past it, and of three windows."""
    window = settings.model.sliding_window
    lengths = (window // 4, window - 1, window, window + 1, 2 * window, 3 * window)
    return [documents(1, length, -length)[0] for length in lengths]


@pytest.fixture(scope="session")
def ask(prompts):
    """(server, sequences) -> their logprobs [sum of lengths - 1]; one request a sequence, so that the shapes of the kernels,
    and with them the last bits, are the same at each call."""
    import torch

    def score(server, sequences=prompts):
        rows = [server.prompt_logprobs([sequence])[0] for sequence in sequences]
        return torch.tensor([x for row in rows for x in row])

    return score


@pytest.fixture(scope="session")
def trainer_logprobs(trainer, tokens, prompts):
    """sequences -> the trainer's logprobs of them [sum of lengths - 1]."""
    from helpers.parity import padded_batch

    def score(sequences=prompts):
        batch = padded_batch(sequences, tokens.pad)
        return trainer.logprobs(batch)[batch.loss_mask > 0]

    return score


@pytest.fixture(scope="session")
def used():
    """helpers.memory.settled_card_use. Of the whole card, since containers hide whose memory is whose: nothing else may run on it."""
    from helpers.memory import settled_card_use

    return settled_card_use


@pytest.fixture
def attention_path(monkeypatch):
    """(fused) -> from now on TransformerEngine takes the fused or the unfused path; afterwards as before.

    It reads the variable when it selects, and selects anew when told so (2.20.2, dot_product_attention.py).
    """

    def select(fused: bool) -> None:
        monkeypatch.setenv("NVTE_FUSED_ATTN", str(int(fused)))
        _select_again()

    yield select
    monkeypatch.undo()
    _select_again()


def _select_again() -> None:
    from transformer_engine.pytorch.attention.dot_product_attention import _attention_backends

    _attention_backends["backend_selection_requires_update"] = True


@pytest.fixture
def attention_taken():
    """() -> the backend that TransformerEngine took last."""

    def taken() -> str:
        from transformer_engine.pytorch.attention.dot_product_attention import _attention_backends

        names = {"use_flash_attention": "FlashAttention", "use_fused_attention": "FusedAttention"}
        picked = [name for key, name in names.items() if _attention_backends[key]]
        return picked[0] if picked else "UnfusedDotProductAttention"

    return taken

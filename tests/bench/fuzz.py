"""Does anything that reads text, settings or files from outside crash, hang or return nonsense on bad input?

    python tests/bench/fuzz.py [--inputs 100000] [--out tests/bench/recorded/fuzz.csv]

Hypothesis makes the inputs: arbitrary ones, and valid ones with fields of a wrong type, bytes flipped, cut off, nested deeply.
For each the property is the same: within a second of processor time there is either a result of the right types, or exactly the error that the
reader documents, with a message of one line that a log in UTF-8 can take. tests/unit/test_fuzz.py runs the same targets on fewer
inputs in every run of the tests. Writes one row a target. About five minutes for 100,000 inputs.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import io
import json
import logging
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache, partial
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from helpers import gsm8k, harmony, recorded, report, results, rewards, saves, series
from helpers.checkpoints import write_tiny_tokenizer
from helpers.messages import LIMIT
from helpers.profiles import PROFILES, Profile, load_profile
from helpers.tensor_files import (
    INDEX, ITEM_BYTES, CheckpointError, CheckpointReport, NotGptOss, StoredTensor, check_checkpoint, expected_tensors,
)  # fmt: skip

SECONDS = (
    1.0  # more processor time for one input is a hang; wall time would blame a reader for its neighbours
)
RESULTS = Path(__file__).parent / "recorded" / "fuzz.csv"


@dataclass(frozen=True)
class Target:
    """A reader. check: (input, folder) calls it and asserts the types of what it returns.

    errors: the classes that it documents, exactly: a UnicodeError is a ValueError and still nobody's message.
    """

    name: str
    inputs: st.SearchStrategy
    check: Callable[[Any, Path], None]
    errors: tuple[type[Exception], ...] = ()


@dataclass
class Tally:
    """What became of the inputs of one target: results, errors by class, the slowest input in seconds of processor time."""

    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0


def try_input(target: Target, value: Any, folder: Path, tally: Tally | None = None) -> None:
    """The property. Raises AssertionError, or what the reader raised and should not have."""
    tally, start = tally or Tally(), time.process_time()
    try:
        target.check(value, folder)
        tally.accepted += 1
    except Exception as error:
        if type(error) not in target.errors:
            raise
        message = str(error)
        assert message and len(message) <= LIMIT and message.isprintable(), (
            f"{type(error).__name__}: {message!r:.300}"
        )
        message.encode()
        tally.refused[type(error).__name__] += 1
    seconds = time.process_time() - start
    tally.slowest = max(tally.slowest, seconds)
    assert seconds < SECONDS, f"{target.name} took {seconds:.1f} s"


# --- nasty values and damaged files -----------------------------------------------------------------------------------
DEEP, HUGE = "@deep@", "@huge@"  # stand in a JSON text for what json.dumps cannot write
NASTY = (
    None, True, False, -1, 0, 1, 2, 3, 2**31, 2**63, 10**400, -(10**400), 0.5, 1e308, 1e-320, math.nan, math.inf, -math.inf,
    "", "x", "0", "-1", "NaN", "\ud800", "a\nb\r\x00\x1b[31m\u2028", "\u202e\U0001f600", "x" * 20_000, "../../x", "/", ".", DEEP,
    HUGE, [], {}, [None], [[]], [1, 2], ["a"], [{}], {"a": 1}, {"": None}, {"\ud800": "\ud800"}, {"a\nb": "\n"}, {"x" * 5000: 1},
    list(range(500)),
)  # fmt: skip
NEARBY = {
    "dtype": ("F32", "BF16", "U8", "F8_E4M3", "nothing"),
    "data_offsets": ([0, 0], [0, 2**62], [4, 0], [0]),
}
_spot = st.integers(0, 2**32 - 1)
_json_step = st.tuples(
    _spot, st.sampled_from(("set", "set", "drop", "again")), st.integers(0, len(NASTY) - 1)
)
_byte_step = st.tuples(_spot, st.sampled_from(("flip", "cut", "insert", "repeat")), _spot)
damage = st.one_of(
    st.tuples(st.lists(_json_step, min_size=1, max_size=3), st.just([])),
    st.tuples(st.just([]), st.lists(_byte_step, min_size=1, max_size=2)),
    st.tuples(st.lists(_json_step, max_size=2), st.lists(_byte_step, max_size=1)),
)
raw_files = st.one_of(
    st.binary(max_size=60), st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.sampled_from((DEEP, HUGE, "NaN", "null", '"', "[", "{}", "[]", '{"a": 1, "a": 2}', "\ufeff{}")).map(
        lambda text: filled(text).encode()
    ),
)  # fmt: skip


def filled(text: str) -> str:
    """The JSON text with a value nested 20,000 deep, and a number of 5,000 digits, in their places."""
    deep = "[" * 20_000 + "]" * 20_000
    return (
        text.replace(f'"{DEEP}"', deep)
        .replace(DEEP, deep)
        .replace(f'"{HUGE}"', "9" * 5000)
        .replace(HUGE, "9" * 5000)
    )


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything in a JSON tree."""
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield tree, key
        yield from places(tree[key])


def damaged_json(tree: Any, steps: list[tuple[int, str, int]]) -> Any:
    """A copy of the tree with values replaced by nasty ones, keys dropped, and items repeated."""
    tree = [copy.deepcopy(tree)]  # so that the whole can be replaced as well
    for number, kind, nasty in steps:
        spots = list(places(tree))
        holder, key = spots[number % len(spots)] if spots else (tree, 0)
        if kind == "set" or holder is tree:
            near = NEARBY.get(key) if isinstance(key, str) and nasty % 2 else None
            holder[key] = copy.deepcopy(near[nasty % len(near)] if near else NASTY[nasty])
        elif kind == "drop":
            del holder[key]
        elif isinstance(holder, list):
            holder.append(copy.deepcopy(holder[key]))
        else:
            holder[f"{key}-{nasty}"] = copy.deepcopy(holder[key])
    return tree[0]


def damaged_bytes(raw: bytes, steps: list[tuple[int, str, int]]) -> bytes:
    """Bits flipped, the end cut off, a byte inserted, the file repeated."""
    for place, kind, value in steps:
        at = place % max(len(raw), 1)
        if kind == "flip" and raw:
            raw = raw[:at] + bytes([raw[at] ^ 1 << value % 8]) + raw[at + 1 :]
        elif kind == "cut":
            raw = raw[:at]
        elif kind == "insert":
            raw = raw[:at] + bytes([value % 256]) + raw[at:]
        elif kind == "repeat":
            raw += raw
    return raw


def damaged_file(tree: Any, steps: tuple[list, list] | bytes) -> bytes:
    """A JSON file of the tree after `steps` of damage; bytes are a file already."""
    if isinstance(steps, bytes):
        return steps
    text = filled(json.dumps(damaged_json(tree, steps[0])))
    return damaged_bytes(text.encode(), steps[1])


def is_text(value: Any) -> bool:
    """Whether it is a string that can be written to a file in UTF-8."""
    return isinstance(value, str) and value == value.encode("utf-8", "ignore").decode()


# --- answers ----------------------------------------------------------------------------------------------------------
PIECES = (
    *harmony.FORMAT_TOKENS, "<|", "|>", "analysis", "final", "assistant", "commentary", " ", "\n", "-", "$", "€", "\\$", ",", ".", "#",
    "####", "\\boxed{", "{", "}", "^{2}", "^", "\u2212", "\u202f", "\u00a0", "0", "4", "18", "1,234", ",000", "1e999", "٣", "²", "\ud800",
    "\x00", "x", "<|channel|>final<|message|>", "<|channel|>analysis<|message|>", "<|end|><|start|>assistant", "<|return|>",
)  # fmt: skip
_runs = st.lists(st.tuples(st.sampled_from(PIECES), st.sampled_from((1, 1, 1, 2, 5))), max_size=12)
_long = st.lists(
    st.tuples(st.sampled_from(PIECES), st.sampled_from((1, 3, 2000, 20_000))), min_size=1, max_size=3
)
answers = st.one_of(
    st.text(max_size=40), _runs.map(lambda runs: "".join(piece * n for piece, n in runs)),
    _long.map(lambda runs: "".join(piece * n for piece, n in runs)[:100_000]),
)  # fmt: skip


def check_answer(text: str, folder: Path) -> None:
    answer = harmony.parse_completion(text)
    for part in (answer.analysis, answer.final):
        assert part is None or isinstance(part, str) and part in text
    assert not answer.well_formed or isinstance(answer.final, str)
    assert rewards.grade(text, "4") in (0.0, 1.0)
    number = gsm8k.final_number(text)
    assert number is None or isinstance(number, Decimal) and number.is_finite()
    assert gsm8k.grade(answer.final, "18") in (0.0, 1.0)
    if number is not None:
        assert gsm8k.grade(text, str(number)) == 1.0


@cache
def tiny_tokenizer():
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_tokenizer(Path(folder), 64)
        return harmony.load_tokenizer(folder)


token_ids = st.lists(
    st.one_of(st.integers(0, 63), st.integers(0, 63), st.sampled_from((64, 10**6, 2**32 - 1))), max_size=60
)


def check_ids(ids: list[int], folder: Path) -> None:
    answer = harmony.parse_ids(tiny_tokenizer(), ids)
    assert isinstance(answer, harmony.Answer) and isinstance(answer.well_formed, bool)
    assert all(part is None or is_text(part) for part in (answer.analysis, answer.final))


_text_or_worse = st.one_of(
    st.sampled_from((*harmony.ROLES, *harmony.CHANNELS, "functions.add", "a b", "\n", *NASTY)),
    st.text(max_size=8),
)
messages = st.lists(
    st.tuples(
        st.one_of(st.sampled_from(harmony.ROLES), _text_or_worse), st.one_of(answers, _text_or_worse),
        st.one_of(st.none(), st.sampled_from(harmony.CHANNELS), _text_or_worse), st.one_of(st.none(), _text_or_worse),
    ), max_size=3,
)  # fmt: skip


def check_messages(parts: list[tuple], folder: Path) -> None:
    conversation = [harmony.Message(*part) for part in parts]
    spans = harmony.render(conversation, open_assistant=bool(len(parts) % 2))
    ids, mask = harmony.encode_spans(tiny_tokenizer(), spans)
    assert len(ids) == len(mask) and all(type(i) is int for i in ids) and all(type(m) is bool for m in mask)


QUESTION = {"question": "1 + 2 = ?", "answer": "1 and 2 make 3.\n#### 3"}


def check_questions(steps: Any, folder: Path) -> None:
    file = folder / "questions.jsonl"
    file.write_bytes(damaged_file(QUESTION, steps))
    for problem in gsm8k.read_questions(file):
        assert is_text(problem.question) and Decimal(problem.answer).is_finite()
        assert gsm8k.grade(problem.answer, problem.answer) == 1.0


# --- settings ---------------------------------------------------------------------------------------------------------
def setting_names(record: Any = None, prefix: str = "") -> Iterator[str]:
    """All settings of a profile, dotted."""
    record = record or load_profile("cpu")
    for f in dataclasses.fields(record):
        yield prefix + f.name
        if dataclasses.is_dataclass(getattr(record, f.name)):
            yield from setting_names(getattr(record, f.name), f"{prefix}{f.name}.")


_setting_values = st.one_of(
    st.sampled_from([value for value in NASTY if value not in (DEEP, HUGE)]), st.integers(-2, 9), st.floats(), st.text(max_size=5),
    st.sampled_from(("cuda", "gspo", "dapo", "tis", "--host", ("--host", "0.0.0.0"), ("a", 1), ("--x",), load_profile("cpu").batch)),
)  # fmt: skip
changes = st.tuples(
    st.one_of(st.sampled_from(PROFILES), st.just("cpu"), _setting_values),
    st.dictionaries(
        st.one_of(st.sampled_from(sorted(setting_names())), st.text(max_size=12), st.sampled_from(("a" * 20_000, "batch." * 300))),
        _setting_values, max_size=3,
    ),
)  # fmt: skip


def check_profile(given_: tuple, folder: Path) -> None:
    name, changed = given_
    loaded = load_profile(name, **changed)
    assert isinstance(loaded, Profile)
    _assert_types(loaded)
    assert loaded.distributed_backend in ("gloo", "nccl") and loaded.process_environment("server")
    assert loaded.batch.episodes >= 2


def _assert_types(record: Any) -> None:
    """Each value has one of the types that its annotation names, numbers are finite, text can be written."""
    for f in dataclasses.fields(record):
        value = getattr(record, f.name)
        if dataclasses.is_dataclass(value):
            assert type(value).__name__ == f.type
            _assert_types(value)
            continue
        names = [word.split("[")[0].strip() for word in f.type.split("|")]
        assert ("None" if value is None else type(value).__name__) in names, f"{f.name} = {value!r:.80}"
        assert not isinstance(value, float) or math.isfinite(value), f"{f.name} = {value}"
        assert not isinstance(value, str) or is_text(value), f"{f.name} = {value!r:.80}"
        assert not isinstance(value, tuple) or all(map(is_text, value)), f"{f.name} = {value!r:.80}"


# --- results ----------------------------------------------------------------------------------------------------------
RECORD = {
    "schema": 1, "notebook": "06_train", "profile": "cpu", "status": "ok", "seed": 0, "commit": "0" * 40, "date": "2026-01-01",
    "hardware": {"cpu": "a cpu", "cores": 2, "memory_gib": 23.4, "gpus": ["card"], "driver": "1.2", "system": "Linux"},
    "versions": {"python": "3.12", "torch": "2.9"}, "command": "python -m helpers.series run", "seconds": 1.5,
    "metrics": {"heldout_gain": 0.25, "processes_left": 0}, "units": {"heldout_gain": "1", "processes_left": "count"},
    "series": {"steps": "steps.csv"},
}  # fmt: skip
SERIES = {
    "schema": 1, "profile": "cpu", "command": "python -m helpers.series run", "commit": "0" * 40, "seconds": 12.5, "processes_left": 0,
    "notebooks": [{"notebook": "06_train", "status": "ok", "seconds": 1.5, "peak_pss_gib": 0.5, "problem": "", "finished": "",
                   "peak_processes": [{"process": "kernel", "pss_mib": 120}]}],
}  # fmt: skip
EXECUTED = {
    "metadata": {"papermill": {}},
    "cells": [{"cell_type": "code", "source": ["STEPS: int = 3"], "metadata": {"tags": ["parameters"]}, "execution_count": 1,
               "outputs": [{"data": {"image/png": "", "text/html": ""}}]},
              {"cell_type": "markdown", "source": "# title", "metadata": {}}],
}  # fmt: skip


def _write(file: Path, raw: bytes) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(raw)
    return file


def check_metrics(steps: Any, folder: Path) -> None:
    """metrics.json, and all that read it: the report, the table at the end of a run, the expectations, the recorded label."""
    runs = folder / "cpu"
    file = _write(runs / "06_train" / "metrics.json", damaged_file(RECORD, steps))
    (folder / "wanted.toml").write_text("[06_train]\nheldout_gain = {min = 0.2}\n")
    results.check_expectations(runs, folder / "wanted.toml")  # says what is wrong, and raises nothing
    assert isinstance(series.key_figures(file.parent), str)
    assert is_text(report.write_report(runs).read_text(encoding="utf-8"))
    record = results.read_metrics(file)
    assert all(
        isinstance(value, (int, float)) and math.isfinite(value) for value in record["metrics"].values()
    )
    assert is_text(recorded.recorded_label("cpu", "06_train", folder))


def check_series(steps: Any, folder: Path) -> None:
    """series.json, and all that read it. A broken one counts as none, so that a run can go on."""
    runs = folder / "series" / "cpu"
    _write(runs / "series.json", damaged_file(SERIES, steps))
    _write(runs / "06_train" / "metrics.json", json.dumps(RECORD).encode())
    entries = series.read_series(runs)
    assert (
        all(is_text(name) and entry["notebook"] == name for name, entry in entries.items())
        and sorted(entries) is not None
    )
    assert is_text(report.write_report(runs).read_text(encoding="utf-8"))
    recorded.notebook_table(runs)


def check_expected(steps: Any, folder: Path) -> None:
    """An expectations file: TOML, made of the damaged JSON where that is possible."""
    text = (
        steps
        if isinstance(steps, bytes)
        else _toml(damaged_json({"06_train": {"heldout_gain": {"min": 0.2}}}, steps[0]))
    )
    raw = text if isinstance(text, bytes) else damaged_bytes(text.encode("utf-8", "surrogatepass"), steps[1])
    file = _write(folder / "expected" / "cpu.toml", raw)
    _write(folder / "expected" / "06_train" / "metrics.json", json.dumps(RECORD).encode())
    problems = results.check_expectations(file.parent, file)
    assert all(is_text(line) for line in problems)


def _toml(tree: Any) -> str:
    """A JSON tree as TOML, as far as the two agree."""
    if not isinstance(tree, dict):
        return json.dumps(tree)
    return "\n".join(f"{json.dumps(key)} = {_inline(value)}" for key, value in tree.items())


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_inline(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_inline, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    return {DEEP: "[" * 3000 + "]" * 3000, HUGE: "9" * 5000}.get(value) or json.dumps(value)


def check_notebook(steps: Any, folder: Path) -> None:
    """An executed notebook: its parameters cell, and the cells that were never run."""
    file = _write(folder / "06_train.ipynb", damaged_file(EXECUTED, steps))
    parameters = series.read_parameters(file)
    assert all(is_text(name) and isinstance(p.kind, str) for name, p in parameters.items())
    assert all(type(number) is int for number in results.skipped_cells(file))


def check_run(steps: Any, folder: Path) -> None:
    """run.json beside a trainer checkpoint; a damaged one must lead to the next older one."""
    root = folder / "saves"
    _write(root / "step-1" / saves.RUN_FILE, b"{}")
    file = _write(
        root / "step-2" / saves.RUN_FILE,
        damaged_file({"step": 2, "rows": [{"reward": 0.5}], "seconds": 1.5}, steps),
    )
    step, data = saves.resume_newest(root, lambda folder: 0)
    assert step in (1, 2) and isinstance(data, dict)
    assert isinstance(saves.read_run(file.parent), dict)


# --- checkpoints ------------------------------------------------------------------------------------------------------
CONFIG = {
    "model_type": "gpt_oss", "vocab_size": 8, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "num_local_experts": 2, "num_experts_per_tok": 1,
    "sliding_window": 4, "max_position_embeddings": 64, "tie_word_embeddings": False, "rope_theta": 150000.0,
    "layer_types": ["sliding_attention"], "eos_token_id": [3, 4], "pad_token_id": 0, "dtype": "bfloat16",
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
}  # fmt: skip
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@cache
def checkpoint_files(quantised: bool) -> dict[str, Any]:
    """File name -> JSON tree (config, index) or (header tree, data) of a whole small checkpoint in two shards."""
    config = CONFIG | ({"quantization_config": {"quant_method": "mxfp4"}} if quantised else {})
    forms = expected_tensors(config, quantised)
    homes = {name: SHARDS[number % 2] for number, name in enumerate(forms)}
    files: dict[str, Any] = {"config.json": config, INDEX: {"metadata": {}, "weight_map": homes}}
    for shard in SHARDS:
        header, place = {"__metadata__": {"format": "pt"}}, 0
        for name, (shape, dtypes) in forms.items():
            if homes[name] == shard:
                end = place + ITEM_BYTES[dtypes[0]] * math.prod(shape)
                header[name] = {"dtype": dtypes[0], "shape": list(shape), "data_offsets": [place, end]}
                place = end
        files[shard] = (header, bytes(place))
    return files


def shard_bytes(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def check_files(given_: tuple[str, Any, bool], folder: Path) -> None:
    """One file of a checkpoint is damaged: config.json, the index, or a shard (its header, or any byte of it)."""
    name, steps, quantised = given_
    folder = folder / f"checkpoint-{quantised}"
    folder.mkdir(exist_ok=True)
    for other, content in checkpoint_files(quantised).items():
        tree, data = content if isinstance(content, tuple) else (content, None)
        raw = json.dumps(tree).encode()
        if other == name and not (data is not None and isinstance(steps, bytes)):
            raw = damaged_file(
                tree, steps if isinstance(steps, bytes) or data is None or steps[0] else (steps[0], [])
            )
        whole = raw if data is None else shard_bytes(raw, data)
        if other == name and data is not None:
            whole = (
                steps if isinstance(steps, bytes) else whole if steps[0] else damaged_bytes(whole, steps[1])
            )
        _write(folder / other, whole)
    found = check_checkpoint(folder)
    assert isinstance(found, CheckpointReport) and found.bytes > 0 and set(found.shards) == set(SHARDS)
    assert all(isinstance(tensor, StoredTensor) and is_text(name) for name, tensor in found.tensors.items())


checkpoint_damage = st.tuples(
    st.sampled_from(("config.json", INDEX, *SHARDS)),
    st.one_of(damage, damage, damage, raw_files),
    st.booleans(),
)
file_damage = st.one_of(damage, damage, damage, damage, raw_files)

TARGETS = {
    target.name: target
    for target in (
        Target("answers: text", answers, check_answer),
        Target("answers: token ids", token_ids, check_ids),
        Target("harmony: messages", messages, check_messages, (ValueError, TypeError)),
        Target("questions: JSON lines", file_damage, check_questions, (gsm8k.QuestionsError,)),
        Target("profiles: names and settings", changes, check_profile, (ValueError, TypeError)),
        Target("metrics.json", file_damage, check_metrics, (results.ResultError, recorded.RecordError)),
        Target("series.json", file_damage, check_series, (results.ResultError, recorded.RecordError)),
        Target("expectations", file_damage, check_expected, (results.ResultError,)),
        Target("executed notebooks", file_damage, check_notebook, (series.SeriesError, results.ResultError)),
        Target("run.json", file_damage, check_run, (saves.SaveError,)),
        Target(
            "checkpoints: config, index, shards", checkpoint_damage, check_files, (CheckpointError, NotGptOss)
        ),
    )
}


def fuzz(target: Target, inputs: int, folder: Path, number: int | None = None) -> Tally:
    """Try `inputs` inputs, the same ones each time (number: other ones). Raises what the property raises, on the smallest input
    that hypothesis finds."""
    tally = Tally()

    @settings(
        max_examples=inputs, deadline=None, database=None, derandomize=number is None, print_blob=False,
        suppress_health_check=list(HealthCheck), phases=(Phase.explicit, Phase.generate, Phase.shrink),
    )  # fmt: skip
    @given(target.inputs)
    def run(value: Any) -> None:
        try_input(target, value, folder, tally)

    if number is not None:
        run = seed(number)(run)
    logger = logging.getLogger("helpers")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # a warning for each damaged save
    try:
        with redirect_stdout(io.StringIO()):
            run()
    finally:
        logger.setLevel(level)
    return tally


def tried(name: str, inputs: int, number: int) -> dict[str, Any]:
    """One row of the results."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        tally = fuzz(TARGETS[name], inputs, Path(folder), number)
    refused = ", ".join(f"{count} {kind}" for kind, count in sorted(tally.refused.items()))
    return {
        "target": name, "inputs": tally.accepted + tally.refused.total(), "accepted": tally.accepted,
        "refused": refused or "none", "slowest_seconds": round(tally.slowest, 3), "seconds": round(time.perf_counter() - start, 1),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=100_000, help="over all targets (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="targets at a time (default %(default)s)")
    parser.add_argument("--only", default="", help="targets whose name holds this text")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    chosen = [name for name in TARGETS if options.only in name]
    work = partial(tried, inputs=-(-options.inputs // len(chosen)), number=options.seed)
    with ProcessPoolExecutor(options.jobs) as pool:
        rows = []
        for row in pool.map(work, chosen):
            print(row, flush=True)
            rows.append(row)
    machine = results.hardware()
    note = f"{time.strftime('%Y-%m-%d')}, commit {results.git_commit()}, {machine['cpu']}, {machine['cores']} cores"
    results.write_rows(options.out, rows, note)
    return 0


if __name__ == "__main__":
    sys.exit(main())

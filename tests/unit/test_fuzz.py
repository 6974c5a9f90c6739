"""Bad input: every reader of tests/bench/fuzz.py on about 2,000 inputs (the bench tries 100,000), and what fuzzing has found."""

import importlib.util
import json
import pickle
import sys
import time
from pathlib import Path

import pytest

from helpers.gsm8k import QuestionsError, final_number, read_questions
from helpers.messages import LIMIT, one_line
from helpers.profiles import load_profile
from helpers.results import ResultError, read_metrics
from helpers.saves import SaveError, read_run
from helpers.series import read_series
from helpers.tensor_files import CheckpointError, check_checkpoint

BENCH = Path(__file__).parents[1] / "bench"


def _bench():
    spec = importlib.util.spec_from_file_location("fuzz", BENCH / "fuzz.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz"] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module


fuzz = _bench()


@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_bad_input_gives_a_result_or_one_line(name, tmp_path):
    tally = fuzz.fuzz(fuzz.TARGETS[name], 185, tmp_path)
    assert tally.accepted and (tally.refused or not fuzz.TARGETS[name].errors)


def _crash(kind):
    def check(value, folder):
        raise kind

    return check


@pytest.mark.parametrize(
    "planted",
    [KeyError("x"), UnicodeEncodeError("utf-8", "x", 0, 1, "no"), ValueError("two\nlines"), ValueError("x" * (LIMIT + 1)), ValueError("")],
    ids=lambda error: f"{type(error).__name__}-{len(str(error))}",
)  # fmt: skip
def test_the_property_sees_a_crash_and_a_bad_message(planted, tmp_path):
    target = fuzz.Target("planted", fuzz.answers, _crash(planted), (ValueError,))
    with pytest.raises((KeyError, UnicodeEncodeError, AssertionError)):
        fuzz.try_input(target, "", tmp_path)


def test_the_property_sees_a_hang(tmp_path, monkeypatch):
    def busy(value, folder):
        start = time.process_time()
        while time.process_time() - start < 0.05:
            pass

    monkeypatch.setattr(fuzz, "SECONDS", 0.02)
    with pytest.raises(AssertionError, match="slow took 0"):
        fuzz.try_input(fuzz.Target("slow", fuzz.answers, busy), "", tmp_path)


# --- found by fuzzing ---------------------------------------------------------------------------------------------------


def test_a_run_of_spaces_does_not_hold_the_verifier_up():
    start = time.process_time()
    assert final_number("18" + " " * 100_000) == 18
    assert time.process_time() - start < 0.5  # 20,000 spaces took 8 s
    assert final_number("- $ 18") == -18 and final_number("3 $18") == 18


def test_a_long_negative_number_is_not_rounded():
    assert final_number("-" + "7" * 40) == -int("7" * 40)


def test_a_line_separator_in_a_question_is_no_new_line(tmp_path):
    file = tmp_path / "questions.jsonl"
    file.write_text('{"question": "1 +\u2028 1?", "answer": "#### 2"}\n', encoding="utf-8")
    assert [p.question for p in read_questions(file)] == ["1 +\u2028 1?"]


@pytest.mark.parametrize(
    "text", ["[" * 20_000 + "]" * 20_000, "9" * 5000, "\ud800", "{"], ids=["deep", "huge", "surrogate", "cut"]
)
def test_json_that_cannot_be_read_is_named(text, tmp_path):
    raw = text.encode("utf-8", "surrogatepass")
    for name in ("metrics.json", "run.json", "series.json", "config.json", "questions.jsonl"):
        (tmp_path / name).write_bytes(raw)
    for reader, error in (
        (lambda: read_metrics(tmp_path), ResultError), (lambda: read_run(tmp_path), SaveError),
        (lambda: check_checkpoint(tmp_path), CheckpointError), (lambda: read_questions(tmp_path / "questions.jsonl"), QuestionsError),
    ):  # fmt: skip
        with pytest.raises(error) as refusal:
            reader()
        assert str(tmp_path) in str(refusal.value) or "questions.jsonl" in str(refusal.value)
        assert type(pickle.loads(pickle.dumps(refusal.value))) is error  # it crosses Ray
    assert read_series(tmp_path) == {}


def test_a_billion_layers_are_refused_before_they_are_listed(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps(fuzz.CONFIG | {"num_hidden_layers": 10**9, "layer_types": None})
    )
    with pytest.raises(
        CheckpointError,
        match="num_hidden_layers is 1000000000, it has to be a positive whole number up to 10000",
    ):
        check_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"trainer.tensor_parallel": 0}, ValueError, "trainer.tensor_parallel = 0 must be at least 1"),
        ({"algorithm": None}, TypeError, "setting 'algorithm' is a AlgorithmSettings"),
        ({"steps": None}, TypeError, "is a int"),
        ({"trainer.seq_length": "long"}, TypeError, "is a int or None"),
        ({"trainer.learning_rate": float("nan")}, ValueError, "finite"),
        ({"algorithm.clip_high": float("nan")}, ValueError, "finite"),
        ({"algorithm.dual_clip": "10"}, TypeError, "is a float or None"),
        ({"seed": 10**400}, ValueError, "64 bits"),
        ({"device": "tpu"}, ValueError, "it can be cpu or cuda"),
        ({"model.path": "\ud800"}, ValueError, "printable"),
        ({"rollout.server_arguments": ("--x", 1)}, TypeError, "is a tuple"),
        ({"x" * 50_000: 1}, ValueError, "unknown setting"),
    ],
)  # fmt: skip
def test_settings_that_no_run_can_have_are_refused(changes, error, words):
    with pytest.raises(error) as refusal:
        load_profile("cpu", **changes)
    assert words in str(refusal.value) and len(str(refusal.value)) <= LIMIT


def test_a_message_is_one_line():
    assert one_line("a\nb\x1b[31m\ud800") == "a\\nb\\x1b[31m\\ud800"
    assert len(one_line("\n" * 10_000)) <= LIMIT and one_line("é 漢") == "é 漢"

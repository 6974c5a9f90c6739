"""Recipe cards: settings exist and say the same, reasons are there, and what is rendered is current."""

import doctest
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import preflight, recipe_cards
from helpers.profiles import load_profile
from helpers.recipe_cards import (
    FOLDER, CardError, card_names, card_problems, card_profile, card_settings, main, missing_tests,
    read_bench, read_card, setting, stale_files, table,
)  # fmt: skip
from helpers.recipes import named_recipe

NAMES = card_names()


def test_doctests():
    assert doctest.testmod(recipe_cards).failed == 0


def test_the_three_projects_have_their_cards():
    assert set(NAMES) == {"verl_4394", "slime", "miles", "nemo_rl"}


@pytest.mark.parametrize("name", NAMES)
def test_a_card_is_sound(name):
    card = read_card(name)
    assert card_problems(card) == [] and missing_tests(card) == []
    keys = [row.key for row in card.rows]
    assert len(keys) == len(set(keys))
    for source in card.sources:
        assert re.fullmatch(r"[0-9a-f]{40}", source.commit) and "/" in source.repository


@pytest.mark.parametrize("name", NAMES)
def test_a_number_that_differs_says_why(name):
    """The script's numbers and ours, row by row; a word there (True, grpo) has its own word here."""
    for row in read_card(name).rows:
        numbers = [float(n) for n in re.findall(r"\d+(?:\.\d*)?(?:e-?\d+)?", row.value)]
        if row.ours and numbers and type(row.set) in (int, float) and row.set not in numbers:
            assert row.note, f"{row.key}: {row.value} there, {row.set} here"


@pytest.mark.parametrize("name", NAMES)
def test_a_card_takes_changes_like_a_profile(name):
    settings = card_profile(read_card(name), **{"batch.prompts": 128})
    assert settings.batch.prompts == 128
    with pytest.raises(ValueError, match="did you mean 'prompts'"):
        card_profile(read_card(name), **{"batch.prompt": 128})


def test_what_is_rendered_is_current():
    assert stale_files() == [], "python -m helpers.recipe_cards"
    assert main(["check"]) == 0


# --- verl's pull request as a profile ----------------------------------------------------------------------
def test_the_card_is_the_profile():
    assert card_profile(read_card("verl_4394")) == load_profile("verl-4394")


def test_what_the_card_does_not_set_is_as_in_the_other_20b_profile():
    """Else a difference between the two would be a flag that the card forgot."""
    card, verl, cluster = read_card("verl_4394"), load_profile("verl-4394"), load_profile("cluster")
    named = {*card_settings(card), "name", "algorithm.recipe"}
    assert {path for path in paths(verl) if setting(verl, path) != setting(cluster, path)} <= named


def paths(record, before=""):
    for name, value in vars(record).items():
        yield from (
            paths(value, f"{before}{name}.") if hasattr(value, "__dataclass_fields__") else [before + name]
        )


def test_its_algorithm_is_the_recipe_of_that_name():
    assert load_profile("verl-4394").algorithm == named_recipe("verl_gpt_oss")


def test_its_small_form_has_the_same_algorithm_on_the_tiny_model():
    small, full = load_profile("cpu", algorithm="verl_gpt_oss"), load_profile("verl-4394")
    assert small.algorithm == full.algorithm and small.device == "cpu"
    assert small.model == load_profile("cpu").model and small.trainer.ranks == 1


@pytest.mark.parametrize(("count", "fitting"), [(0, "cpu"), (1, "gpu"), (7, "gpu")])
def test_it_is_refused_without_eight_gpus(monkeypatch, tmp_path, count, fitting):
    monkeypatch.setenv("GRPO_RUNS", str(tmp_path))
    monkeypatch.setattr(preflight, "gpu_names", lambda: ["NVIDIA H100 80GB HBM3"] * count)
    with pytest.raises(preflight.NotReady) as refusal:
        preflight.check_machine(load_profile("verl-4394"))
    wanted = f"profile verl-4394 needs 8 GPU(s); this machine fits profile {fitting}"
    assert wanted in str(refusal.value)


def test_eight_gpus_are_enough(monkeypatch, tmp_path):
    monkeypatch.setenv("GRPO_RUNS", str(tmp_path))
    monkeypatch.setattr(preflight, "gpu_names", lambda: ["NVIDIA H100 80GB HBM3"] * 8)
    checks = {c.name: c.ok for c in preflight.machine_checks(load_profile("verl-4394"))}
    assert checks["GPUs"]


# --- mbridge -----------------------------------------------------------------------------------------------
def test_the_bench_says_what_the_card_says():
    conditions, sides = read_bench()
    ours, release, branch = (
        sides[k] for k in ("Megatron-Bridge", "mbridge 0.15.1", "mbridge branch gpt-oss")
    )
    assert "megatron-core 0.19.2" in conditions and "commit " in conditions
    assert release["registered"]["value"] == "0" and branch["registered"]["value"] == "1"
    assert "Unregistered model type" in release["refused: AutoBridge.from_pretrained"]["detail"]
    for side in (release, branch):
        assert "encoder_and_decoder" in side["refused: mbridge.core.util.get_model, any model"]["detail"]
    exports = [c for c in branch if c.endswith("differing")]
    assert len(exports) == 2 and all(s[c]["value"] == "0" for s in (ours, branch) for c in exports)
    gaps = {check: float(row["value"]) for check, row in branch.items() if check.startswith("logprob gap")}
    as_set, wide, narrow, yarn, unclamped, clamped = gaps.values()
    assert as_set > wide > narrow > 0.1 and yarn < 1e-5  # one wrong number after the other is put right
    assert unclamped > 1 and clamped < 1e-5
    assert max(float(r["value"]) for c, r in ours.items() if c.startswith("logprob gap")) < 1e-5


# --- what is no card ---------------------------------------------------------------------------------------
CARD = """
title = "a"
profile = "cpu"
columns = ["a", "b", "c"]
about = "a"
[[source]]
what = "a"
repository = "a/b"
path = "c"
commit = "d"
[[group]]
name = "a"
rows = [
  { key = "-n", value = "32", ours = "batch.prompts", set = 32 },
]
"""


def card_with(tmp_path, rows: str, more: str = ""):
    text = re.sub(r"rows = \[.*\]", f"rows = [{rows}]", CARD, flags=re.DOTALL) + more
    (tmp_path / "mine.toml").write_text(text)
    return read_card("mine", tmp_path)


def test_an_unknown_card_names_the_known_ones():
    with pytest.raises(CardError, match="there is no card 'verl'; cards: miles, nemo_rl, slime, verl_4394"):
        read_card("verl")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("title = ", "mine.toml is no TOML"),
        (CARD.replace('title = "a"', ""), "missing or unknown field .'title'"),
        (CARD.replace("set = 32", "sett = 32"), "missing or unknown field .*sett"),
    ],
)
def test_a_broken_card_is_named(tmp_path, text, words):
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(CardError, match=words):
        read_card("mine", tmp_path)


def test_a_setting_that_is_not_there_is_refused(tmp_path):
    card = card_with(tmp_path, '{ key = "-n", value = "1", ours = "batch.promts", set = 1 }')
    with pytest.raises(ValueError, match="did you mean 'prompts'"):
        card_profile(card)


def test_a_value_of_another_type_is_refused(tmp_path):
    card = card_with(tmp_path, '{ key = "-n", value = "1", ours = "batch.prompts", set = "1" }')
    with pytest.raises(TypeError, match="is a int"):
        card_problems(card)


def test_a_row_without_a_setting_or_a_reason_is_named(tmp_path):
    card = card_with(tmp_path, '{ key = "-n", value = "1" }')
    assert card_problems(card) == ["-n: none of ours, and no reason"]


def test_two_rows_that_want_different_values_are_refused(tmp_path):
    same = '{ key = "-%s", value = "1", ours = "batch.prompts", set = %d }'
    card = card_with(tmp_path, f"{same % ('a', 8)}, {same % ('b', 8)}, {same % ('c', 9)}")
    with pytest.raises(CardError, match="-c wants batch.prompts = 9, and another row 8"):
        card_settings(card)


def test_parts_of_a_tuple_setting_come_together(tmp_path):
    part = '{ key = "-%s", value = "1", ours = "rollout.server_arguments", has = ["--%s", "1"] }'
    card = card_with(tmp_path, f"{part % ('a', 'a')}, {part % ('b', 'b')}")
    assert card_settings(card) == {"rollout.server_arguments": ("--a", "1", "--b", "1")}
    assert card_problems(card) == []


def test_none_can_be_said(tmp_path):
    card = card_with(tmp_path, '{ key = "-n", value = "-", ours = "algorithm.dual_clip", set = "None" }')
    assert card_settings(card) == {"algorithm.dual_clip": None}


def test_a_test_that_does_not_exist_is_named(tmp_path):
    here, gone = (
        "tests/unit/test_recipe_cards.py::test_doctests",
        "tests/unit/test_recipe_cards.py::test_gone",
    )
    mistake = (
        f'[[mistake]]\nwhat = "a"\neffect = "b"\nours = "c"\ntests = ["{here}", "{gone}", "no.py::test_a"]\n'
    )
    assert missing_tests(card_with(tmp_path, "", mistake)) == [gone, "no.py::test_a"]


def test_files_are_written_once_and_stale_ones_named(tmp_path, capsys):
    assert main(["check"], tmp_path) == 1
    assert "verl_4394.md is out of date: python -m helpers.recipe_cards" in capsys.readouterr().out
    assert main([], tmp_path) == 0
    assert {p.name for p in tmp_path.iterdir()} == {p.name for p in FOLDER.glob("*.md")}
    (tmp_path / "slime.md").write_text("old")
    assert stale_files(tmp_path) == ["slime.md"]
    assert main([], tmp_path) == 0 and main(["check"], tmp_path) == 0
    assert main(["write"], tmp_path) == 2 and "unknown arguments" in capsys.readouterr().err


def test_a_bench_that_does_not_say_where_it_ran_is_refused(tmp_path):
    (tmp_path / "bench.csv").write_text("side,check,value,detail\n")
    with pytest.raises(CardError, match="does not say where it was measured"):
        read_bench(tmp_path / "bench.csv")


@given(st.lists(st.lists(st.text("ab|`", max_size=6), min_size=2, max_size=2), max_size=4))
def test_every_line_of_a_table_has_the_same_columns(rows):
    lines = table(["a", "b"], rows).splitlines()
    assert len(lines) == 2 + len(rows)
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {3}

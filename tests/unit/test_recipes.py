"""helpers.recipes: every recipe at every scale, contradictions refused in a line each, the maths' names."""

import csv
import dataclasses
import doctest
import itertools
from pathlib import Path

import pytest

from helpers import advantages, corrections, kl, losses, recipes
from helpers.profiles import PROFILES, AlgorithmSettings, load_profile
from helpers.recipes import CHOICES, RECIPES, contradictions, named_recipe


def test_doctests():
    assert doctest.testmod(recipes).failed == 0


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("profile", PROFILES)
def test_every_recipe_runs_at_every_scale(profile, name):
    settings = load_profile(profile, algorithm=name)
    assert settings.algorithm == dataclasses.replace(RECIPES[name].settings, recipe=name)
    plain = load_profile(profile)
    assert dataclasses.replace(settings, algorithm=plain.algorithm) == plain


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("name", RECIPES)
def test_a_mini_batch_divides_into_micro_batches(profile, name):
    settings = load_profile(profile, algorithm=name)
    t, rows = settings.trainer, settings.batch.episodes // settings.algorithm.mini_batches
    share, rest = divmod(rows, t.ranks // (t.tensor_parallel * t.pipeline_parallel))
    assert rest == 0 and share % min(t.micro_batch, share) == 0


def test_no_two_recipes_are_the_same_and_each_names_its_source():
    kinds = {name: recipe.settings for name, recipe in RECIPES.items()}
    assert len(set(kinds.values())) == len(kinds)
    assert kinds["default"] == AlgorithmSettings()
    assert all(recipe.source for recipe in RECIPES.values())


def test_a_recipes_parts_can_be_changed_in_any_order():
    changes = {"algorithm": "dapo", "algorithm.clip_high": 0.3, "algorithm.mini_batches": 2}
    made = {load_profile("cpu", **dict(order)) for order in itertools.permutations(changes.items())}
    (settings,) = made
    a = settings.algorithm
    assert (a.recipe, a.clip_high, a.mini_batches, a.extra_draws) == ("dapo", 0.3, 2, 4)


def test_settings_of_ones_own_are_taken_as_they_are():
    mine = AlgorithmSettings(advantage="mean")
    assert load_profile("cpu", algorithm=mine).algorithm is mine


def test_the_names_are_those_of_the_maths():
    assert CHOICES["advantage"] == advantages.KINDS
    assert CHOICES["ratio"] == losses.RATIOS and CHOICES["normaliser"] == losses.NORMALISERS
    assert CHOICES["correction_level"] == corrections.LEVELS
    assert CHOICES["trust_region"] == ("none", *corrections.RULES)
    assert {kind.rstrip("+") for kind in CHOICES["kl_kind"]} == set(kl.KINDS)
    assert all(getattr(AlgorithmSettings(), name) in known for name, known in CHOICES.items())


def test_unknown_recipes_name_the_nearest():
    with pytest.raises(
        ValueError, match=r"unknown algorithm 'gsop' \(did you mean 'gspo'\?\); recipes: default, grpo"
    ):
        load_profile("cpu", algorithm="gsop")


REFUSED = [
    ("default", {"loss": "clip"}, "loss = 'clip' (did you mean 'clipped'?); it can be clipped, cispo"),
    ("default", {"advantage": "rank"}, "advantage = 'rank'"),
    ("default", {"recipe": "gspo"}, None),
    ("default", {"recipe": "mine"}, "say algorithm='mine'"),
    ("default", {"clip_low": 1.5}, "use 0 to 1, and 0 or more"),
    ("default", {"clip_high": -0.1}, "use 0 to 1, and 0 or more"),
    ("default", {"dual_clip": 0.5}, "must be a number above 1"),
    ("default", {"ratio": "sequence"}, "take algorithm='gspo' or clips of a few 1e-4"),
    ("gspo", {"clip_high": 0.2}, "never gets so far"),
    ("cispo", {"dual_clip": 3.0}, "no effect with loss = 'cispo'"),
    ("cispo", {"ratio": "sequence"}, "whose weights are those of tokens"),
    ("on_policy", {"dual_clip": 3.0}, "makes every ratio 1"),
    ("on_policy", {"loss": "cispo"}, "makes every ratio 1"),
    ("on_policy", {"ratio": "sequence", "clip_low": 1e-4, "clip_high": 1e-4}, "makes every ratio 1"),
    ("on_policy", {"mini_batches": 2}, "from the second update on"),
    ("default", {"mini_batches": 0}, "does not divide batch.prompts = 32"),
    ("default", {"mini_batches": 5}, "does not divide batch.prompts = 32"),
    ("default", {"extra_draws": -1}, "must be 0"),
    ("default", {"correction": "tis"}, "counts the mismatch twice"),
    ("default", {"correction_level": "sequence"}, "without a correction"),
    ("default", {"correction_cap": 3.0}, "without a correction"),
    ("tis", {"correction_floor": 0.1}, "drops nothing"),
    ("tis", {"correction_cap": 0.0}, "is no range of ratios"),
    ("mis", {"correction_floor": 3.0}, "is no range of ratios"),
    ("tis", {"old_logprobs": "rollout"}, "counts the mismatch twice"),
    ("default", {"trust_region": "token"}, "give a rule and a bound above 0"),
    ("default", {"trust_region_bound": 1.0}, "give a rule and a bound above 0"),
    ("default", {"trust_region": "token", "trust_region_bound": -1.0}, "give a rule and a bound above 0"),
    ("default", {"kl_coefficient": -0.1}, "would reward distance"),
    ("default", {"kl_kind": "k2"}, "no effect with kl_coefficient = 0"),
    ("grpo", {"kl_kind": "k1"}, "use 'k1+'"),
    ("default", {"overlong_scale": 0.5}, "no effect with overlong_buffer = 0"),
    ("dapo", {"overlong_buffer": 1.5}, "a share of the token budget"),
    ("dapo", {"overlong_scale": 0.0}, "a share of the token budget"),
]


@pytest.mark.parametrize(("recipe", "changes", "words"), [case for case in REFUSED if case[2]])
def test_what_contradicts_itself_is_refused_in_one_line(recipe, changes, words):
    with pytest.raises(ValueError, match="contradicts itself: algorithm.") as refusal:
        load_profile(
            "cpu", algorithm=recipe, **{f"algorithm.{name}": value for name, value in changes.items()}
        )
    assert words in str(refusal.value) and "\n" not in str(refusal.value)
    assert len(contradictions(dataclasses.replace(named_recipe(recipe), **changes), 32)) == 1


def test_several_contradictions_are_all_named():
    with pytest.raises(ValueError) as refusal:
        load_profile(
            "cpu", algorithm="on_policy", **{"algorithm.mini_batches": 2, "algorithm.overlong_scale": 2.0}
        )
    assert "from the second update on" in str(refusal.value) and "overlong_scale" in str(refusal.value)


def test_groups_of_one_are_refused_with_every_recipe():
    for name in RECIPES:
        with pytest.raises(ValueError, match="group_size must be at least 2"):
            load_profile("cpu", algorithm=name, **{"batch.group_size": 1})


def test_every_recipe_was_tried_and_the_control_did_not_learn():
    """The recorded run of tests/bench/recipes.py; a recipe that is added or renamed has to be tried again."""
    file = Path(__file__).parents[1] / "bench" / "recorded" / "recipes.csv"
    with file.open() as lines:
        assert "commit " in next(lines)
        gains = {row["recipe"]: float(row["gain"]) for row in csv.DictReader(lines)}
    assert list(gains) == [*RECIPES, "shuffled"]
    assert gains.pop("shuffled") < 0 < 0.2 < min(gains.values())

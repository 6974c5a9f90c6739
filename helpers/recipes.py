"""The GRPO family by name, and what cannot be combined. `load_profile("cpu", algorithm="gspo")` picks one.

A recipe is an `AlgorithmSettings` with a paper's numbers. Where a number belongs to the paper's scale (batch,
token budget), `adapted` says what is different here. Imports no torch, like helpers/profiles.py.

Which logprobs are the old ones, pi_old of the ratio? Three answers, in `AlgorithmSettings.old_logprobs`:
    "rollout"  The engine's. The ratio pi / pi_rollout then corrects the mismatch itself, and the clips bound
               both at once.
    "trainer"  The trainer's, from a pass before the step's first update. The ratio holds the update alone,
               and the mismatch is left to a correction (decoupled PPO, arXiv 2110.00641).
    "current"  The same without a pass: with one update a batch the trainer's logprobs before it are the
               update's own. Exact where a second pass is not (experts at a tie), and the ratio is 1, so that
               no clip ever acts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from helpers.profiles import AlgorithmSettings, nearest_name

CHOICES = {
    "advantage": ("std", "mean", "leave_one_out"),
    "loss": ("clipped", "cispo"),
    "ratio": ("token", "sequence"),
    "normaliser": ("token", "sequence", "constant"),
    "old_logprobs": ("rollout", "trainer", "current"),
    "correction": ("none", "tis", "mis"),
    "correction_level": ("token", "sequence", "geometric"),
    "trust_region": ("none", "token", "any_token", "sequence_kl"),
    "kl_kind": ("k2", "k3", "k1+", "k3+"),
}
WIDEST_SEQUENCE_CLIP = (
    0.05  # a geometric mean over an answer hardly moves by as much; GSPO's are 3e-4 and 4e-4
)
_DEFAULT = AlgorithmSettings()


@dataclass(frozen=True)
class Recipe:
    """settings, where they come from, and what is not as there."""

    settings: AlgorithmSettings
    source: str
    adapted: str = ""


def _recipe(source: str, adapted: str = "", **changes) -> Recipe:
    return Recipe(replace(_DEFAULT, **changes), source, adapted)


RECIPES = {
    "default": _recipe(
        "GRPO's advantages (arXiv 2402.03300), DAPO's token mean and clips (2503.14476); one update a batch"
    ),
    "grpo": _recipe(
        "arXiv 2402.03300: means of answers, k3 against the start with 0.04, one update a batch",
        "clips 0.2 as in PPO: the paper names none",
        normaliser="sequence", clip_high=0.2, kl_coefficient=0.04,
    ),
    "dr_grpo": _recipe(
        "arXiv 2503.20783: no division by the spread or by the answer's length, no KL",
        advantage="mean", normaliser="constant", clip_high=0.2,
    ),
    "dapo": _recipe(
        "arXiv 2503.14476: clip-higher, token mean, dynamic sampling, overlong penalty over a fifth",
        "4 updates a batch (16 of 512 answers there); at most 4 extra draws a step (no limit there); "
        "penalty 0.5, since rewards are 0 and 1 (-1 and 1 there)",
        extra_draws=4, overlong_buffer=0.2, overlong_scale=0.5, mini_batches=4, old_logprobs="trainer",
    ),
    "gspo": _recipe(
        "arXiv 2507.18071: one ratio an answer, clips 3e-4 and 4e-4, 4 updates a batch",
        ratio="sequence", normaliser="sequence", clip_low=3e-4, clip_high=4e-4, mini_batches=4,
        old_logprobs="trainer",
    ),
    "cispo": _recipe(
        "arXiv 2506.13585 (MiniMax-M1): every token learns, with a clipped weight; "
        "largest weight 5 from 2510.13786 (ScaleRL)",
        "4 updates a batch (16 there); without the dynamic sampling and length penalty taken from DAPO",
        loss="cispo", clip_low=1.0, clip_high=4.0, mini_batches=4, old_logprobs="trainer",
    ),
    "dual_clip": _recipe(
        "arXiv 1912.09729: PPO's clips 0.2, and the ratio held below 3 where the advantage is negative",
        "group advantages in place of a critic's; 4 updates a batch",
        clip_high=0.2, dual_clip=3.0, mini_batches=4, old_logprobs="trainer",
    ),
    "rloo": _recipe(
        "arXiv 2402.14740: REINFORCE with the mean of the other answers as baseline, on-policy",
        "no KL in the reward; summed over tokens and divided by the token budget",
        advantage="leave_one_out", normaliser="constant", old_logprobs="current",
    ),
    "on_policy": _recipe(
        "LinkedIn's gpt-oss notes: one update a batch, old logprobs are the current ones without gradient",
        old_logprobs="current",
    ),
    "tis": _recipe(
        "the off-policy-rl notes (OpenReview 8MHqvb4lK9): a token's weight truncated at 2",
        old_logprobs="current", correction="tis",
    ),
    "mis": _recipe(
        "the rl-collapse notes: an answer whose ratio is above 2 teaches nothing",
        old_logprobs="current", correction="mis", correction_level="sequence", correction_floor=0.0,
    ),
    "verl_gpt_oss": _recipe(
        "verl pull request 4394: clips 0.2, 0.28 and 10, k3 against the start with 0.001, 2 updates a batch",
        dual_clip=10.0, kl_coefficient=0.001, mini_batches=2, old_logprobs="trainer",
    ),
}  # fmt: skip


def named_recipe(name: str) -> AlgorithmSettings:
    """The settings of recipe `name`, labelled with it. Raises ValueError with the nearest known name.

    >>> gspo = named_recipe("gspo")
    >>> gspo.recipe, gspo.ratio, gspo.clip_high
    ('gspo', 'sequence', 0.0004)
    """
    if name not in RECIPES:
        raise ValueError(
            f"unknown algorithm {name!r:.80}{nearest_name(name, RECIPES)}; recipes: {', '.join(RECIPES)}"
        )
    return replace(RECIPES[name].settings, recipe=name)


def contradictions(a: AlgorithmSettings, prompts: int) -> list[str]:
    """What is unknown in these settings or has no effect, a line each; [] when they mean what they say.

    prompts: questions a step, which mini-batches share.

    >>> contradictions(replace(named_recipe("cispo"), dual_clip=3.0), prompts=32)
    ["algorithm.dual_clip = 3.0 has no effect with loss = 'cispo': it bounds every weight; use None"]
    """
    lines = [*_unknown(a), *_numbers(a), *_steps(a, prompts), *_surrogate(a), *_mismatch(a), *_extras(a)]
    return [f"algorithm.{line}" for line in lines]


def _unknown(a: AlgorithmSettings) -> Iterator[str]:
    if a.recipe not in RECIPES:
        yield f"recipe = {a.recipe!r} is only a label; to pick a recipe say algorithm={a.recipe!r}"
    if a.kl_kind == "k1":
        yield "kl_kind = 'k1' has no gradient on average, so that as a loss it does nothing; use 'k1+'"
        return
    for name, known in CHOICES.items():
        value = getattr(a, name)
        if value not in known:
            yield f"{name} = {value!r}{nearest_name(value, known)}; it can be {', '.join(known)}"


def _numbers(a: AlgorithmSettings) -> Iterator[str]:
    if not (0 <= a.clip_low <= 1 and a.clip_high >= 0):
        yield f"clip_low = {a.clip_low}, clip_high = {a.clip_high}: use 0 to 1, and 0 or more"
    if a.dual_clip is not None and not (isinstance(a.dual_clip, (int, float)) and a.dual_clip > 1):
        yield f"dual_clip = {a.dual_clip!r} must be a number above 1 (3 in the paper), or None"
    if not a.kl_coefficient >= 0:
        yield f"kl_coefficient = {a.kl_coefficient} would reward distance from the start; use 0 or more"
    if not 0 <= a.overlong_buffer <= 1 or not a.overlong_scale > 0:
        yield (
            f"overlong_buffer = {a.overlong_buffer} is a share of the token budget, 0 to 1, and "
            f"overlong_scale = {a.overlong_scale} a reward above 0"
        )
    if not 0 <= a.correction_floor <= a.correction_cap or not a.correction_cap > 0:
        yield (
            f"correction_floor = {a.correction_floor} to correction_cap = {a.correction_cap} is no range of "
            "ratios; use e.g. 0.5 and 2"
        )


def _steps(a: AlgorithmSettings, prompts: int) -> Iterator[str]:
    if a.extra_draws < 0:
        yield f"extra_draws = {a.extra_draws} must be 0 (no dynamic sampling) or more"
    if a.mini_batches < 1 or prompts % a.mini_batches:
        yield f"mini_batches = {a.mini_batches} does not divide batch.prompts = {prompts}"
    if a.old_logprobs == "current" and a.mini_batches > 1:
        yield (
            f"mini_batches = {a.mini_batches} with old_logprobs = 'current': from the second update on the "
            "current policy is no longer the one before the step; use 'trainer'"
        )


def _surrogate(a: AlgorithmSettings) -> Iterator[str]:
    if a.loss == "cispo" and a.dual_clip is not None:
        yield (
            f"dual_clip = {a.dual_clip} has no effect with loss = 'cispo': it bounds every weight; use None"
        )
    if a.loss == "cispo" and a.ratio == "sequence":
        yield "ratio = 'sequence' has no effect with loss = 'cispo', whose weights are those of tokens"
    if a.loss == "clipped" and a.ratio == "sequence" and max(a.clip_low, a.clip_high) > WIDEST_SEQUENCE_CLIP:
        yield (
            f"clip_low = {a.clip_low}, clip_high = {a.clip_high} are clips for a token's ratio: an "
            "answer's is a geometric mean and never gets so far; take algorithm='gspo' or clips of a few 1e-4"
        )
    if a.old_logprobs == "current" and (a.loss, a.ratio, a.dual_clip) != ("clipped", "token", None):
        yield (
            "old_logprobs = 'current' makes every ratio 1, so that loss = 'cispo', ratio = 'sequence' and "
            "dual_clip have no effect; leave them at their defaults, or use 'trainer' and mini_batches"
        )


def _mismatch(a: AlgorithmSettings) -> Iterator[str]:
    if a.correction != "none" and a.old_logprobs == "rollout":
        yield (
            f"correction = {a.correction!r} with old_logprobs = 'rollout' counts the mismatch twice: "
            "the ratio holds it already; use 'current' (one update a batch) or 'trainer'"
        )
    if a.correction == "none" and _changed(a, "correction_level", "correction_cap", "correction_floor"):
        yield "correction_level, correction_cap and correction_floor have no effect without a correction"
    if a.correction == "tis" and _changed(a, "correction_floor"):
        yield f"correction_floor = {a.correction_floor} has no effect with 'tis', which drops nothing"
    if (a.trust_region == "none") != (a.trust_region_bound == 0) or not a.trust_region_bound >= 0:
        yield (
            f"trust_region_bound = {a.trust_region_bound} nats with trust_region = {a.trust_region!r}: "
            "give a rule and a bound above 0, or neither"
        )


def _extras(a: AlgorithmSettings) -> Iterator[str]:
    if not a.kl_coefficient and _changed(a, "kl_kind"):
        yield f"kl_kind = {a.kl_kind!r} has no effect with kl_coefficient = 0; set it, e.g. 0.001"
    if not a.overlong_buffer and _changed(a, "overlong_scale"):
        yield f"overlong_scale = {a.overlong_scale} has no effect with overlong_buffer = 0; set it, e.g. 0.2"


def _changed(a: AlgorithmSettings, *names: str) -> bool:
    """Whether one of these is not what it is by default."""
    return any(getattr(a, name) != getattr(_DEFAULT, name) for name in names)

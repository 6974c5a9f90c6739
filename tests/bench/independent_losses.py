"""Do our advantages, losses, KL forms and corrections give what TRL's and verl's own code gives?

    python tests/bench/independent_losses.py --trl-site DIR --verl-site DIR [--batches 200] [--out FOLDER]

DIR: folders with the packages of tests/bench/requirements.txt, which says how to make them.

Random ragged batches go through both. Writes
    independent_losses.csv    largest differences over all batches, a row a comparison
    independent_losses.json   the first three batches and what the libraries gave, with gradients
and tests/unit/test_independent_losses.py holds our functions to the recorded numbers in every run of the
tests, which need neither library. A minute.

TRL's loss is a method of its trainer: it gets an object with the settings that it reads, and its forward pass
is replaced by the batch's logprobs. Everything between logprobs and loss is TRL's. Its advantages and its
sampling correction stand in the middle of its rollout code and cannot be called: verl's are compared instead.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from helpers.advantages import group_advantages
from helpers.corrections import (
    corrected_batch,
    masked_importance_sampling,
    truncated_importance_sampling,
    trust_region_mask,
)
from helpers.kl import kl_estimate, straight_through_kl
from helpers.losses import cispo_loss, clipped_policy_loss
from helpers.objective import recipe_loss
from helpers.profiles import AlgorithmSettings
from helpers.records import Batch
from helpers.results import git_commit, write_rows
from helpers.shaping import overlong_penalty

BUDGET = 9  # tokens of an answer, at most
Case = dict[str, Tensor]
Result = dict[str, Tensor]


def random_case(seed: int, spread: float = 0.3) -> Case:
    """Twelve answers of 1 to 9 tokens to three questions; float64, so that 1e-6 is far from rounding."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, BUDGET + 1, (12,), generator=generator)
    mask = (torch.arange(BUDGET) < lengths[:, None]).double()
    draw = partial(torch.randn, *mask.shape, generator=generator, dtype=torch.float64)
    rollout = -draw().abs() - 0.05
    old, now, reference = rollout + 0.2 * draw(), rollout + spread * draw(), rollout + 0.4 * draw()
    rewards = torch.randint(0, 3, (12,), generator=generator) / 2.0
    return {
        "lengths": lengths, "mask": mask, "rollout": rollout * mask, "old": old * mask, "now": now * mask,
        "reference": reference * mask, "rewards": rewards, "groups": torch.arange(12) // 4,
        "advantages": torch.randn(12, generator=generator, dtype=torch.float64),
    }  # fmt: skip


def with_gradient(function: Callable[[Tensor], Tensor], now: Tensor) -> Result:
    """{"loss", "gradient"} of function(now)"""
    leaf = now.clone().requires_grad_()
    value = function(leaf)
    return {"loss": value.detach(), "gradient": torch.autograd.grad(value.sum(), leaf)[0]}


# --- ours --------------------------------------------------------------------------------------------------
def batch_of(case: Case, old: str = "old") -> Batch:
    """old: which logprobs stand where the rollout's do."""
    ids, mask = torch.zeros(case["mask"].shape, dtype=torch.int64), case["mask"]
    return Batch(ids, ids, ids, mask, case[old], case["advantages"][:, None] * mask, case["groups"])


def our_loss(case: Case, function=clipped_policy_loss, **options) -> Result:
    return with_gradient(lambda now: function(now, batch_of(case), **options).loss, case["now"])


def our_grpo_with_kl(case: Case) -> Result:
    a = AlgorithmSettings(normaliser="sequence", clip_high=0.2, kl_coefficient=0.04)
    rated = Batch(**{**vars(batch_of(case)), "reference_logprobs": case["reference"]})
    return with_gradient(lambda now: recipe_loss(now, rated, a).loss, case["now"])


def our_corrected(case: Case) -> Result:
    """Decoupled: ratio to the trainer's old logprobs, TIS weights old / rollout."""
    tis = truncated_importance_sampling(case["old"], case["rollout"], case["mask"])
    batch = corrected_batch(batch_of(case, "rollout"), case["old"], tis)
    return with_gradient(lambda now: clipped_policy_loss(now, batch).loss, case["now"])


def our_advantages(case: Case, **options) -> Result:
    return {"advantages": group_advantages(case["rewards"], case["groups"], **options)}


def our_kl(case: Case, kind: str) -> Result:
    estimate = straight_through_kl if kind.endswith("+") else kl_estimate
    return with_gradient(lambda now: estimate(now, case["reference"], kind.rstrip("+")), case["now"])


def our_weights(case: Case, correct: Callable, **options) -> Result:
    return {"weights": correct(case["old"], case["rollout"], case["mask"], **options).weights}


def our_overlong(case: Case) -> Result:
    return {"penalty": overlong_penalty(case["lengths"], BUDGET, 4)}


GSPO = dict(clip_low=3e-4, clip_high=4e-4, ratio="sequence", normaliser="sequence")
CONSTANT = dict(normaliser="constant", constant=BUDGET)
OURS: dict[str, Callable[[Case], Result]] = {
    "trl grpo, k3 0.04": our_grpo_with_kl,
    "trl dapo": our_loss,
    "trl dr_grpo": partial(our_loss, clip_high=0.2, **CONSTANT),
    "trl gspo": partial(our_loss, **GSPO),
    "trl delta 2": partial(our_loss, dual_clip=2.0),
    "trl cispo": partial(our_loss, function=cispo_loss, clip_high=0.5),
    "trl sampling correction": our_corrected,
    "trl overlong": our_overlong,
    "verl grpo advantage": partial(our_advantages, eps=1e-6),
    "verl dr_grpo advantage": partial(our_advantages, kind="mean"),
    "verl rloo advantage": partial(our_advantages, kind="leave_one_out"),
    "verl vanilla, c 1.2": partial(our_loss, dual_clip=1.2),
    "verl vanilla, c 10": partial(our_loss, dual_clip=10.0),
    "verl seq-mean-token-mean": partial(our_loss, dual_clip=10.0, normaliser="sequence"),
    "verl seq-mean-token-sum-norm": partial(our_loss, dual_clip=10.0, **CONSTANT),
    "verl gspo": partial(our_loss, **GSPO),
    "verl cispo": partial(our_loss, function=cispo_loss, clip_low=0.2, clip_high=0.3),
    "verl rollout correction": lambda case: our_corrected(case),
    **{f"verl kl {kind}": partial(our_kl, kind=kind) for kind in ("k1", "k2", "k3", "k1+", "k3+")},
    "verl tis token": partial(our_weights, correct=truncated_importance_sampling, cap=1.3),
    "verl tis sequence": partial(
        our_weights, correct=truncated_importance_sampling, cap=1.3, level="sequence"
    ),
    "verl mis token": partial(our_weights, correct=masked_importance_sampling, low=0.8, high=1.3),
    "verl mis sequence": partial(
        our_weights, correct=masked_importance_sampling, low=0.8, high=1.3, level="sequence"
    ),
    "verl trust region token": partial(our_weights, correct=trust_region_mask, bound=0.25),
    "verl trust region any_token": partial(
        our_weights, correct=trust_region_mask, bound=0.25, rule="any_token"
    ),
    "verl trust region sequence_kl": partial(
        our_weights, correct=trust_region_mask, bound=0.02, rule="sequence_kl"
    ),
}


# --- TRL ---------------------------------------------------------------------------------------------------
def trl_loss(
    case: Case, loss_type: str, low: float = 0.2, high: float = 0.28, level: str = "token", beta: float = 0.0,
    delta: float | None = None, weights: Tensor | None = None,
) -> Result:  # fmt: skip
    """GRPOTrainer._compute_loss on the batch's logprobs."""
    from trl import GRPOTrainer

    def loss(now: Tensor) -> Tensor:
        trainer = SimpleNamespace(
            _get_per_token_logps_and_entropies=lambda *_, **__: (now, torch.zeros_like(now), None),
            aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None,
            importance_sampling_level=level, beta=beta, loss_type=loss_type, epsilon_low=low,
            epsilon_high=high,
            args=SimpleNamespace(delta=delta, use_bias_correction_kl=False, steps_per_generation=1),
            use_vllm=weights is not None, vllm_importance_sampling_correction=weights is not None,
            model=SimpleNamespace(training=True), current_gradient_accumulation_steps=1,
            max_completion_length=BUDGET, _entropy_bonus_enabled=False, _metrics={"train": defaultdict(list)},
            accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        )  # fmt: skip
        ids = torch.zeros(case["mask"].shape, dtype=torch.int64)
        inputs = {
            "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids,
            "completion_mask": case["mask"], "advantages": case["advantages"],
            "old_per_token_logps": case["old"], "ref_per_token_logps": case["reference"],
            "num_items_in_batch": case["mask"].sum(), "importance_sampling_ratio": weights,
        }  # fmt: skip
        return GRPOTrainer._compute_loss(trainer, trainer.model, inputs)

    return with_gradient(loss, case["now"])


def trl_overlong(case: Case) -> Result:
    from trl.rewards import get_soft_overlong_punishment

    answers = [[1] * int(n) for n in case["lengths"]]
    return {"penalty": torch.tensor(get_soft_overlong_punishment(BUDGET, 4)(answers))}


def truncated(case: Case) -> Tensor:
    """TRL computes this ratio in the middle of its rollout code; its "token_truncate" is this line."""
    return ((case["old"] - case["rollout"]) * case["mask"]).exp().clamp(max=2.0)


# --- verl --------------------------------------------------------------------------------------------------
def verl_loss(
    case: Case, name: str, mode: str = "token-mean", low: float = 0.2, high: float = 0.28, c: float = 3.0,
    weights: Tensor | None = None,
) -> Result:  # fmt: skip
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig

    config = ActorConfig(
        strategy="megatron", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=low,
        clip_ratio_high=high, clip_ratio_c=c, loss_agg_mode=mode,
    )  # fmt: skip
    config.global_batch_info["loss_scale_factor"] = BUDGET
    advantages = case["advantages"][:, None] * case["mask"]

    def loss(now: Tensor) -> Tensor:
        return get_policy_loss_fn(name)(case["old"], now, advantages, case["mask"], mode, config, weights)[0]

    return with_gradient(loss, case["now"])


def verl_advantages(case: Case, name: str, **options) -> Result:
    from verl.trainer.ppo import core_algos

    rewards = torch.zeros_like(case["mask"])
    rewards[:, 0] = case["rewards"]
    function = getattr(core_algos, f"compute_{name}_outcome_advantage")
    return {"advantages": function(rewards, case["mask"], case["groups"].numpy(), **options)[0][:, 0]}


def verl_kl(case: Case, kind: str) -> Result:
    from verl.trainer.ppo.core_algos import kl_penalty

    return with_gradient(lambda now: kl_penalty(now, case["reference"], kind), case["now"])


def verl_weights(case: Case, **options) -> Result:
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    log_ratio = case["old"] - case["rollout"]
    return {"weights": compute_rollout_correction_weights(log_ratio, case["mask"], **options)[0]}


def verl_mask(case: Case, rule: str, threshold: str | float) -> Result:
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask

    log_ratio = case["old"] - case["rollout"]
    kept, _ = compute_rollout_rejection_mask(log_ratio, case["mask"], rule, str(threshold))
    return {"weights": kept * case["mask"]}


THEIRS: dict[str, Callable[[Case], Result]] = {
    "trl grpo, k3 0.04": partial(trl_loss, loss_type="grpo", high=0.2, beta=0.04),
    "trl dapo": partial(trl_loss, loss_type="dapo"),
    "trl dr_grpo": partial(trl_loss, loss_type="dr_grpo", high=0.2),
    "trl gspo": partial(trl_loss, loss_type="grpo", low=3e-4, high=4e-4, level="sequence"),
    "trl delta 2": partial(trl_loss, loss_type="dapo", delta=2.0),
    "trl cispo": partial(
        trl_loss, loss_type="cispo", high=1.5
    ),  # its limit is the weight's, not its distance from 1
    "trl sampling correction": lambda case: trl_loss(case, "dapo", weights=truncated(case)),
    "trl overlong": trl_overlong,
    "verl grpo advantage": partial(verl_advantages, name="grpo"),
    "verl dr_grpo advantage": partial(verl_advantages, name="grpo", norm_adv_by_std_in_grpo=False),
    "verl rloo advantage": partial(verl_advantages, name="rloo_vectorized"),
    "verl vanilla, c 1.2": partial(verl_loss, name="vanilla", c=1.2),
    "verl vanilla, c 10": partial(verl_loss, name="vanilla", c=10.0),
    "verl seq-mean-token-mean": partial(verl_loss, name="vanilla", mode="seq-mean-token-mean", c=10.0),
    "verl seq-mean-token-sum-norm": partial(
        verl_loss, name="vanilla", mode="seq-mean-token-sum-norm", c=10.0
    ),
    "verl gspo": partial(verl_loss, name="gspo", mode="seq-mean-token-mean", low=3e-4, high=4e-4),
    "verl cispo": partial(verl_loss, name="cispo", low=0.2, high=0.3),
    "verl rollout correction": lambda case: verl_loss(
        case, "vanilla", c=1e9, weights=verl_weights(case, rollout_is="token")["weights"]
    ),
    **{f"verl kl {kind}": partial(verl_kl, kind=kind) for kind in ("k1", "k2", "k3", "k1+", "k3+")},
    "verl tis token": partial(verl_weights, rollout_is="token", rollout_is_threshold=1.3),
    "verl tis sequence": partial(verl_weights, rollout_is="sequence", rollout_is_threshold=1.3),
    "verl mis token": partial(verl_weights, rollout_is="token", rollout_is_threshold="0.8_1.3"),
    "verl mis sequence": partial(verl_weights, rollout_is="sequence", rollout_is_threshold="0.8_1.3"),
    "verl trust region token": partial(
        verl_mask, rule="token_k1", threshold=f"{math.exp(-0.25)}_{math.exp(0.25)}"
    ),
    "verl trust region any_token": partial(verl_mask, rule="seq_max_k2", threshold=0.25**2 / 2),
    "verl trust region sequence_kl": partial(verl_mask, rule="seq_mean_k3", threshold=0.02),
}


def difference(ours: Result, theirs: Result) -> float:
    """Largest difference of any number."""
    return max((ours[name].double() - value.double()).abs().max().item() for name, value in theirs.items())


def to_json(tensors: dict[str, Tensor]) -> dict:
    return {name: tensor.tolist() for name, tensor in tensors.items()}


def from_json(case: dict) -> Case:
    whole = ("lengths", "groups")
    kinds = {name: torch.int64 if name in whole else torch.float64 for name in case} | {
        "rewards": torch.float32
    }
    return {name: torch.tensor(values, dtype=kinds[name]) for name, values in case.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trl-site", type=Path, required=True)
    parser.add_argument("--verl-site", type=Path, required=True)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("recorded"))
    a = parser.parse_args()
    sys.path[:0] = [str(a.trl_site.resolve()), str(a.verl_site.resolve())]
    cases = [random_case(seed) for seed in range(a.batches)]
    rows, recorded = [], {}
    for name, theirs in THEIRS.items():
        results = [theirs(case) for case in cases]
        worst = max(difference(OURS[name](case), result) for case, result in zip(cases, results, strict=True))
        rows.append({"comparison": name, "batches": len(cases), "largest_difference": f"{worst:.2e}"})
        recorded[name] = [to_json(result) for result in results[:3]]
        print(rows[-1], flush=True)
    versions = {package: version(package) for package in ("trl", "verl", "torch")}
    write(a.out, rows, {"versions": versions, "cases": [to_json(c) for c in cases[:3]], "results": recorded})


def write(folder: Path, rows: list[dict], record: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "independent_losses.json").write_text(json.dumps(record) + "\n")
    versions = ", ".join(f"{k} {v}" for k, v in record["versions"].items())
    label = f"{time.strftime('%Y-%m-%d')}, commit {git_commit()}, {versions}"
    write_rows(folder / "independent_losses.csv", rows, label)


if __name__ == "__main__":
    main()

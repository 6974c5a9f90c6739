"""Routing replay with the real engines: SGLang's choice taken by Megatron, checked by transformers."""

import contextlib
import dataclasses

import pytest
import torch

from helpers.collate import collate
from helpers.faults import logprobs
from helpers.losses import supervised_loss
from helpers.parity import padded_batch, reference_gradients
from helpers.profiles import load_profile
from helpers.rollout import roll_out
from helpers.routing_replay import (
    NOT_RUN, choose_experts, moe_routers, own_experts, replaying, replaying_reference, routing_difference,
)  # fmt: skip
from helpers.tasks import load_task
from helpers.weight_sync import send_tensors

pytestmark = pytest.mark.engine
REPLAY = load_profile("cpu", **{"algorithm.routing_replay": True})
MODEL = REPLAY.model
PROMPTS = 8
TIE = 1e-5  # two router logits nearer than this may be ordered either way in float32


@pytest.fixture(scope="module")
def engines(server, trainer, checkpoint):
    """Server and trainer with the checkpoint's weights, before and after."""
    for engine in (server, trainer):
        engine.load_weights(checkpoint)
    yield server, trainer
    for engine in (server, trainer):
        engine.load_weights(checkpoint)


@pytest.fixture(scope="module")
def episodes(engines):
    return roll_out(engines[0], load_task("median").sample(PROMPTS), REPLAY)


@pytest.fixture(scope="module")
def batch(episodes):
    return collate(episodes, torch.linspace(-1, 1, len(episodes)), 0)


@pytest.fixture(scope="module")
def own(engines, batch):
    return own_experts(engines[1], batch)


@pytest.fixture(scope="module")
def sequences():
    """From shorter than the window to three of it, without the padding token."""
    generator, window = torch.Generator().manual_seed(0), MODEL.sliding_window
    return [torch.randint(1, 64, (n,), generator=generator).tolist() for n in (5, window + 1, 3 * window)]


@pytest.fixture(scope="module")
def planted(sequences):
    """Those sequences, every token with random experts; the last one and the padding with none."""
    batch, generator = padded_batch(sequences), torch.Generator().manual_seed(1)
    scores = torch.rand(*batch.size, MODEL.num_hidden_layers, MODEL.num_local_experts, generator=generator)
    experts = scores.topk(MODEL.num_experts_per_tok).indices.short()
    for row, sequence in zip(experts, sequences, strict=True):
        row[len(sequence) - 1 :] = NOT_RUN
    return with_experts(batch, experts)


def with_experts(batch, experts):
    return dataclasses.replace(batch, routed_experts=experts)


def trained_positions(trainer, batch):
    return trainer.logprobs(batch)[batch.loss_mask > 0]


@contextlib.contextmanager
def watched(trainer):
    """layer -> where its router sent the tokens of the last pass [S * B, chosen], in ascending order."""
    seen, chosen = {}, MODEL.num_experts_per_tok

    def look(router, inputs, output):
        seen[router.layer_number] = output[1].nonzero()[:, 1].view(-1, chosen)

    hooks = [router.register_forward_hook(look) for router in moe_routers(trainer.model.module)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def taken(trainer, batch):
    """[B, S, layers, chosen] in ascending order: what the routers really did in a pass over the batch."""
    with watched(trainer) as seen:
        trainer.logprobs(batch)
    layers = [seen[n].unflatten(0, (batch.size[1], -1)).transpose(0, 1) for n in sorted(seen)]
    return torch.stack(layers, 2)


def share_of_gradient(gap, gradient):
    return (gap.abs().max() / gradient.abs().max()).item()


# --- from the rollout ---------------------------------------------------------------------------------------
def test_experts_come_with_the_answers_that_will_be_trained_on(engines, episodes, settings):
    for e in episodes:
        tokens = len(e.prompt_ids) + len(e.completion_ids)
        assert e.routed_experts.shape == (tokens - 1, MODEL.num_hidden_layers, MODEL.num_experts_per_tok)
    problems = load_task("median").sample(2)
    assert all(e.routed_experts is None for e in roll_out(engines[0], problems, REPLAY, greedy=True))
    assert all(e.routed_experts is None for e in roll_out(engines[0], problems, settings))


def test_both_engines_choose_alike_but_for_ties(engines, batch, own):
    """In float32. A pair of logits that is nearer than the engines' rounding may go either way."""
    margins = {}

    def look(router, inputs, output):
        ranked = router.gating(inputs[0]).sort(-1, descending=True).values
        k = MODEL.num_experts_per_tok
        margins[router.layer_number] = (ranked[..., k - 1] - ranked[..., k]).transpose(0, 1)

    hooks = [r.register_forward_hook(look) for r in moe_routers(engines[1].model.module)]
    try:
        engines[1].logprobs(with_experts(batch, None))
    finally:
        for hook in hooks:
            hook.remove()
    tied = torch.stack([margins[n] for n in sorted(margins)], -1) < TIE
    ran = batch.routed_experts[..., 0] >= 0
    differ = ran & (own.sort(-1).values != batch.routed_experts.sort(-1).values).any(-1)
    print(f"{int(ran.sum())} choices, {int(differ.sum())} differ, {int((tied & ran).sum())} are ties")
    assert not (differ & ~tied).any() and differ.sum() <= 0.001 * ran.sum()


def test_a_position_too_late_would_be_seen(batch, own):
    moved = batch.routed_experts.roll(1, dims=1)
    moved[:, 0] = NOT_RUN
    assert routing_difference(own, moved).routers > 0.3


# --- taken by the trainer -----------------------------------------------------------------------------------
def test_planted_experts_are_taken_in_every_layer(engines, planted):
    got, ran = taken(engines[1], planted), planted.routed_experts[..., 0, 0] >= 0
    assert torch.equal(got[ran], planted.routed_experts.sort(-1).values[ran].long())
    own = taken(engines[1], with_experts(planted, None))
    assert routing_difference(own, planted.routed_experts).tokens > 0.9, (
        "nearly the routers' own: nothing is shown"
    )


def test_planted_experts_give_transformers_logprobs_and_gradients(engines, reference, sequences, planted):
    """Every tensor's gradient, the router's among them: its weights of the experts are the trainer's own."""
    lengths = [len(s) for s in sequences]
    plain = logprobs(reference, sequences)
    with replaying_reference(reference, planted.routed_experts, lengths):
        wanted = logprobs(reference, sequences)
    got = trained_positions(engines[1], planted)
    assert (wanted - plain).abs().mean() > 0.1
    assert (got - wanted).abs().max() < 1e-4
    with replaying_reference(reference, planted.routed_experts, lengths):
        theirs = reference_gradients(reference, sequences)
    ours = engines[1].gradients(planted, supervised_loss)
    for name, gradient in theirs.items():
        assert gradient.abs().max() > 0 and share_of_gradient(ours[name] - gradient, gradient) < 1e-4, name
    assert sum(".router." in name for name in theirs) == 2 * MODEL.num_hidden_layers


def test_the_reference_is_itself_again(reference, sequences, planted):
    plain = logprobs(reference, sequences)
    with replaying_reference(reference, planted.routed_experts, [len(s) for s in sequences]):
        logprobs(reference, sequences)
    assert torch.equal(logprobs(reference, sequences), plain)


def test_without_mismatch_replay_changes_nothing(engines, batch, own):
    """In float32: the same logprobs and gradients. Padding goes to other experts, and reaches neither."""
    server, trainer = engines
    plain = with_experts(batch, None)
    before, gradients = trainer.logprobs(plain), trainer.gradients(plain)
    for experts in (batch.routed_experts, own):
        if routing_difference(own, experts).routers:
            continue  # a tie went the other way: the test above counts them
        gap = (trainer.logprobs(with_experts(batch, experts)) - before).abs().max()
        worst = max(
            share_of_gradient(gradient - gradients[name], gradients[name])
            for name, gradient in trainer.gradients(with_experts(batch, experts)).items()
        )
        print(f"largest change: logprob {gap:.1e} nat, gradient {worst:.1e} of its tensor's largest")
        assert gap < 1e-6 and worst < 1e-6


def test_raised_mismatch_shows_and_replay_takes_the_rollouts_choice(engines, checkpoint, episodes, settings):
    """The rollout's router weights are moved: other experts for many tokens, and the trainer takes those."""
    server, trainer = engines
    generator = torch.Generator().manual_seed(3)
    routers = {n: t for n, t in trainer.export().items() if n.endswith("router.weight")}
    moved = {n: t + 0.3 * t.std() * torch.randn(t.shape, generator=generator) for n, t in routers.items()}
    try:
        send_tensors(server, moved, "moved routers")
        batch = collate(roll_out(server, load_task("median").sample(PROMPTS), REPLAY), None, 0)
    finally:
        server.load_weights(checkpoint)
    ran = batch.routed_experts[..., 0, 0] >= 0
    own = taken(trainer, with_experts(batch, None))
    found = routing_difference(own, batch.routed_experts)
    assert 0.05 < found.routers < found.tokens
    assert torch.equal(taken(trainer, batch)[ran], batch.routed_experts.sort(-1).values[ran].long())
    theirs = batch.rollout_logprobs[batch.loss_mask > 0]
    gaps = [(trained_positions(trainer, b) - theirs).abs().mean() for b in (with_experts(batch, None), batch)]
    print(f"{found}; mean |trainer - rollout| {gaps[0]:.4f} nat, with replay {gaps[1]:.4f} nat")
    assert gaps[1] < gaps[0]


def test_micro_batches_get_their_own_rows(engines, batch, planted, monkeypatch):
    trainer = engines[1]
    wrong = torch.where(
        batch.routed_experts < 0, batch.routed_experts, (batch.routed_experts + 1) % MODEL.num_local_experts
    )
    batch = with_experts(batch, wrong)
    whole, gradients = trainer.logprobs(batch), trainer.gradients(batch)
    own = own_experts(trainer, batch)
    small = dataclasses.replace(trainer.settings.trainer, micro_batch=16)
    monkeypatch.setattr(trainer, "settings", dataclasses.replace(trainer.settings, trainer=small))
    assert (trainer.logprobs(batch) - whole).abs().max() < 1e-5
    assert routing_difference(own_experts(trainer, batch), own).routers < 1e-3
    for name, gradient in trainer.gradients(batch).items():
        assert share_of_gradient(gradient - gradients[name], gradients[name]) < 1e-4, name


@pytest.mark.parametrize("reentrant", (True, False))
def test_a_recomputation_takes_the_rows_of_its_own_pass(engines, monkeypatch, reentrant):
    """Two micro-batches forward, then backward in turn, as a pipeline stage has them: the first is recomputed
    when the second's rows are already set."""
    from torch.utils.checkpoint import checkpoint

    model = engines[1].model.module
    router = moe_routers(model)[0]
    generator = torch.Generator().manual_seed(2)
    inputs = [torch.randn(6, 2, MODEL.hidden_size, generator=generator, requires_grad=True) for _ in "ab"]
    factors = torch.randn(12, MODEL.num_local_experts, generator=generator)
    scores = torch.rand(2, 2, 6, MODEL.num_hidden_layers, MODEL.num_local_experts, generator=generator)
    experts = scores.topk(MODEL.num_experts_per_tok).indices.short()

    def gradients(run, granularity):
        monkeypatch.setattr(router.config, "recompute_granularity", granularity)
        with replaying([model], experts.flatten(0, 1)):
            losses = []
            for part, x in zip(experts, inputs, strict=True):
                choose_experts(model, part)
                losses.append((run(x)[0] * factors).sum())
            return [torch.autograd.grad(loss, x)[0] for loss, x in zip(losses, inputs, strict=True)]

    def recomputed(x):
        return checkpoint(router, x, use_reentrant=reentrant)

    if reentrant:  # which knows .backward() only
        monkeypatch.setattr(torch.autograd, "grad", backward_gradient)
    again, plain = gradients(recomputed, "full"), gradients(router, None)
    assert all(torch.equal(a, b) for a, b in zip(again, plain, strict=True))
    latest = gradients(recomputed, "full")  # and the queue starts anew
    assert all(torch.equal(a, b) for a, b in zip(latest, plain, strict=True))


def backward_gradient(loss, x):
    x.grad = None
    loss.backward()
    return (x.grad.clone(),)


def test_a_batch_of_another_model_is_refused_and_nothing_stays_behind(engines, planted):
    trainer, plain = engines[1], with_experts(planted, None)
    before = trainer.logprobs(plain)
    for wrong in (planted.routed_experts[:, :, :1], planted.routed_experts[..., :1]):
        with pytest.raises(ValueError, match="come from another model"):
            trainer.logprobs(with_experts(planted, wrong))
    with pytest.raises(ValueError, match="same expert twice"):
        trainer.backward(with_experts(planted, planted.routed_experts * 0))
    trainer.logprobs(planted)
    for router in moe_routers(trainer.model.module):
        replay = router.router_replay
        assert replay.router_replay_action is replay.target_topk_idx is None
        assert replay.replay_backward_list == [] and not router._forward_pre_hooks
    assert torch.equal(trainer.logprobs(plain), before)

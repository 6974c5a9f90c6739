"""Routing replay: the experts that SGLang returns, taken by Megatron's routers (helpers.routing_replay)."""

import dataclasses

import pytest

SEQUENCES = 8  # answers that transformers, one by one, is compared on


@pytest.fixture(scope="module")
def episodes(settings, replay_server, trainer, trained):
    """The server's answers to 32 questions, with each token's experts. The trainer holds the same weights."""
    from helpers.rollout import roll_out
    from helpers.tasks import load_task

    trainer.load_weights(trained)
    few = dataclasses.replace(
        settings,
        batch=dataclasses.replace(settings.batch, prompts=32, group_size=8),
        algorithm=dataclasses.replace(settings.algorithm, routing_replay=True),
    )
    return roll_out(replay_server, load_task(settings.task).sample(32), few)


@pytest.fixture(scope="module")
def batch(episodes, tokens):
    from helpers.collate import collate

    return collate(episodes, None, tokens.pad)


@pytest.fixture(scope="module")
def own(trainer, batch):
    """What the trainer's routers choose by themselves."""
    from helpers.routing_replay import own_experts

    return own_experts(trainer, batch)


@pytest.fixture(scope="module")
def sequences(episodes):
    return [[*e.prompt_ids, *e.completion_ids] for e in episodes[:SEQUENCES]]


@pytest.fixture(scope="module")
def planted(settings, episodes, sequences, tokens):
    """A batch of the sequences in which every token takes the wrong experts: the next ones."""
    import torch

    from helpers.collate import collate
    from helpers.parity import padded_batch

    given = collate(episodes[:SEQUENCES], None, tokens.pad).routed_experts
    wrong = torch.where(given < 0, given, (given + 1) % settings.model.num_local_experts)
    return dataclasses.replace(padded_batch(sequences, tokens.pad), routed_experts=wrong)


def with_experts(batch, experts):
    return dataclasses.replace(batch, routed_experts=experts)


def trained_positions(trainer, batch):
    return trainer.logprobs(batch)[batch.loss_mask > 0]


def router_gradients(trainer, batch):
    """One vector of the gradients of all router weights and biases."""
    import torch

    from helpers.losses import supervised_loss

    gradients = trainer.gradients(batch, supervised_loss)
    return torch.cat([gradients[name].flatten().float() for name in sorted(gradients) if ".router." in name])


def test_both_engines_choose_the_same_experts_for_nearly_all_tokens(own, batch, record):
    from helpers.routing_replay import routing_difference

    found = routing_difference(own, batch.routed_experts)
    record("routing, share of (token, layer) with other experts", found.routers, "1", below=0.25)
    record("routing, share of tokens with other experts in some layer", found.tokens, "1")
    moved = batch.routed_experts.roll(1, dims=1)
    moved[:, 0] = -1
    control = routing_difference(own, moved).routers
    floor = 0.1 + 2 * found.routers
    record("routing, share of (token, layer), one position too late", control, "1", at_least=floor)


def test_sglangs_own_choice_of_kernels_returns_zeros_and_is_refused(mxfp4_server, mxfp4_checkpoint):
    """triton_kernel routes in a kernel of its own and records nothing (sglang 0.5.17, layers/moe/topk.py)."""
    from helpers.routing_replay import RoutingShape, decode_experts
    from helpers.tensor_files import read_config

    (answer,) = mxfp4_server.generate([[1, 2, 3]], 0.0, 1, 4, return_routed_experts=True)
    count = 3 + len(answer["output_ids"])
    with pytest.raises(ValueError, match="same expert twice"):
        decode_experts(
            answer["meta_info"]["routed_experts"], count, RoutingShape.of(read_config(mxfp4_checkpoint))
        )


def test_replaying_its_own_choice_changes_nothing(trainer, batch, own, record):
    """As far as two runs of a pass agree: attention's backward pass on a GPU adds in no fixed order."""
    plain, replayed = with_experts(batch, None), with_experts(batch, own)
    before = trained_positions(trainer, plain)
    noise = (trained_positions(trainer, plain) - before).abs().max()
    gap = (trained_positions(trainer, replayed) - before).abs().max()
    record("own experts replayed, largest change of a logprob", gap, "nat", below=max(4 * noise, 1e-3))
    before = router_gradients(trainer, plain)
    noise = (router_gradients(trainer, plain) - before).norm() / before.norm()
    gap = (router_gradients(trainer, replayed) - before).norm() / before.norm()
    record("own experts replayed, change of the router's gradient", gap, "1", below=max(4 * noise, 0.05))


def test_planted_experts_are_taken_in_every_layer(settings, trainer, planted):
    import torch

    from helpers.routing_replay import moe_routers

    seen = {}

    def look(router, inputs, output):
        seen[router.layer_number] = output[1].nonzero()[:, 1].view(-1, settings.model.num_experts_per_tok)

    routers = moe_routers(trainer.model.module)
    hooks = [router.register_forward_hook(look) for router in routers]
    try:
        trainer.logprobs(planted)
    finally:
        for hook in hooks:
            hook.remove()
    assert sorted(seen) == list(range(1, settings.model.num_hidden_layers + 1))
    wanted = planted.routed_experts.sort(-1).values
    ran = wanted[..., 0, 0] >= 0
    for layer, rows in seen.items():
        taken = rows.cpu().unflatten(0, (wanted.shape[1], -1)).transpose(0, 1)
        assert torch.equal(taken[ran], wanted[:, :, layer - 1][ran].long()), f"layer {layer}"


def test_planted_experts_give_what_transformers_gives_with_them(
    trainer, reference, sequences, planted, record
):
    """Forward, and the router's gradient, which a replay that took the rollout's weights too would lose."""
    import torch

    from helpers.faults import logprobs
    from helpers.parity import reference_gradients
    from helpers.routing_replay import replaying_reference

    lengths = [len(s) for s in sequences]
    with replaying_reference(reference, planted.routed_experts, lengths):
        wanted = logprobs(reference, sequences).cpu()
    change = (wanted - logprobs(reference, sequences).cpu()).abs().mean()
    gap = (trained_positions(trainer, planted) - wanted).abs().mean()
    record("wrong experts, change in transformers", change, "nat", at_least=0.05)
    record("wrong experts, |trainer - transformers fp32| over that change", gap / change, "1", below=0.25)
    with replaying_reference(reference, planted.routed_experts, lengths):
        gradients = reference_gradients(reference, sequences)
    theirs = torch.cat([gradients[n].flatten().cpu() for n in sorted(gradients) if ".router." in n])
    ours = router_gradients(trainer, planted)
    cosine = torch.nn.functional.cosine_similarity(ours, theirs, dim=0)
    record("wrong experts, cosine of the router's gradient with transformers'", cosine, "1", at_least=0.9)


def test_replay_and_the_gap_to_the_rollout(trainer, batch, record):
    """On a card the engines' bfloat16 differs; replay takes away what comes from other experts."""
    from helpers.kl import kl_estimate

    theirs = batch.rollout_logprobs[batch.loss_mask > 0]
    for name, experts, limit in (("own", None, None), ("replayed", batch.routed_experts, 0.02)):
        ours = trained_positions(trainer, with_experts(batch, experts))
        record(f"{name} experts, mean |trainer - rollout|", (ours - theirs).abs().mean(), "nat", below=limit)
        record(f"{name} experts, largest |trainer - rollout|", (ours - theirs).abs().max(), "nat")
        record(
            f"{name} experts, generation KL (k3)", kl_estimate(theirs[None], ours[None], "k3").mean(), "nat"
        )

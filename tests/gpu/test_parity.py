"""Trainer, rollout engine and transformers on the same weights: float32 tensor by tensor, bfloat16 on trained weights."""

import dataclasses

import pytest

from helpers.profiles import load_profile

# float32, TF32 off: a logit; a gradient as a share of its tensor's largest. On a CPU 1e-5 holds; a GPU adds in another order
FORWARD, GRADIENT = 1e-4, 1e-4


@pytest.fixture(scope="module")
def small(settings, tmp_path_factory):
    """(settings, checkpoint): profile cpu's model on this device in float32, with noise on every tensor."""
    import torch
    from safetensors.torch import load_file

    from helpers.checkpoints import save_weights, write_tiny_checkpoint

    folder = tmp_path_factory.mktemp("float32")
    small = dataclasses.replace(settings, model=load_profile("cpu").model)
    random = write_tiny_checkpoint(small, folder / "random")
    generator = torch.Generator().manual_seed(1)
    weights = load_file(random / "model.safetensors")
    uneven = {name: t + 0.1 * torch.randn(t.shape, generator=generator) for name, t in weights.items()}
    return small, save_weights(uneven, random, folder / "uneven")


@pytest.fixture(scope="module")
def small_trainer(small, trainer):
    """A second Megatron model. (`trainer` comes first: one process group and one parallel state a process.)"""
    from helpers.trainer import MegatronTrainer

    return MegatronTrainer(*small)


def test_float32_products_are_not_made_in_tf32(card, record):
    """TransformerEngine asks cuBLAS for TF32, whose products are right to 3e-4; float32's are to 1e-6."""
    import torch
    from transformer_engine.pytorch import Linear

    layer = Linear(1024, 1024, bias=False, params_dtype=torch.float32)
    x = torch.randn(512, 1024, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    with torch.no_grad():
        wanted = x.double() @ layer.weight.double().T
        for name, product in (("TransformerEngine", layer(x)), ("torch", x @ layer.weight.T)):
            error = ((product - wanted).norm() / wanted.norm()).item()
            record(f"float32, relative error of a product by {name}", error, "1", below=1e-5)


def test_float32_parity_of_every_kind_of_tensor(small, small_trainer, device, record, say):
    import torch

    from helpers.faults import load_reference
    from helpers.parity import parity_failures, parity_rows, parity_table

    window = small[0].model.sliding_window
    generator = torch.Generator().manual_seed(0)
    lengths = (5, window - 1, window, window + 1, 3 * window)
    sequences = [torch.randint(1, 64, (n,), generator=generator).tolist() for n in lengths]
    rows = parity_rows(small_trainer, load_reference(small[1]).to(device), sequences)
    say(parity_table(rows))
    assert len(rows) == 2 * 17 + 3
    record("float32, largest difference of a logit", max(r.forward_abs for r in rows), "logit", below=FORWARD)
    record(
        "float32, largest relative difference of a gradient",
        max(r.gradient_rel for r in rows),
        "1",
        below=GRADIENT,
    )
    assert parity_failures(rows, FORWARD, GRADIENT) == []


def test_float32_takes_the_unfused_path(card, small, small_trainer, attention_taken):
    """No fused kernel takes float32, so the comparison above was made by the unfused one."""
    from helpers.parity import megatron_logits, padded_batch
    from helpers.preflight import attention_report

    sequences = [list(range(1, 40))]
    megatron_logits(small_trainer, padded_batch(sequences), sequences)
    assert attention_taken() == attention_report(small[0]).backend == "UnfusedDotProductAttention"


def test_trainer_and_rollout_agree_on_sampled_answers(settings, trainer, server, tokens, record):
    """What GRPO depends on: logprobs of the answers that the server sampled, by the server and by the trainer."""
    from helpers.collate import collate
    from helpers.kl import kl_estimate
    from helpers.rollout import roll_out
    from helpers.tasks import load_task

    few = dataclasses.replace(settings, batch=dataclasses.replace(settings.batch, prompts=32, group_size=8))
    episodes = roll_out(server, load_task(settings.task).sample(32), few)
    batch = collate(episodes, None, tokens.pad)
    kept = batch.loss_mask > 0
    ours, theirs = trainer.logprobs(batch)[kept], batch.rollout_logprobs[kept]
    gap = (ours - theirs).abs()
    record("answers, tokens compared", kept.sum(), "token", at_least=1000)
    record("answers, mean |trainer - rollout|", gap.mean(), "nat", below=0.02)
    record("answers, largest |trainer - rollout|", gap.max(), "nat")
    kl = kl_estimate(theirs[None], ours[None], "k3").mean()
    record("answers, generation KL (k3)", kl, "nat", below=0.002)


def test_both_engines_agree_with_transformers_in_float32(
    server, trained, reference, prompts, ask, trainer_logprobs, record
):
    """On documents from a quarter of the window to three of it."""
    from helpers.faults import logprobs

    server.load_weights(trained)
    wanted = logprobs(reference, prompts).cpu()
    for engine, given in (("trainer", trainer_logprobs()), ("rollout", ask(server))):
        gap = (given - wanted).abs()
        record(f"documents, mean |{engine} - transformers fp32|", gap.mean(), "nat", below=0.02)
        record(f"documents, largest |{engine} - transformers fp32|", gap.max(), "nat")

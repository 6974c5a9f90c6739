"""Faults put in on purpose: the suite's own checks must fail. README.md in this folder lists which test catches which fault."""

import dataclasses

import pytest
import torch

from helpers.faults import FAULTS, fitting_faults, logprobs
from helpers.parity import gradient_gaps, megatron_logits, padded_batch, reference_logits
from helpers.weight_sync import send_tensors

pytestmark = pytest.mark.engine
FORWARD, GRADIENT = 1e-4, 1e-5  # logit, relative: the limits of the parity suite


@pytest.fixture(scope="module")
def reference(load_reference, awkward_checkpoint):
    return load_reference(awkward_checkpoint)


@pytest.fixture(scope="module")
def ours(awkward_trainer, awkward_sequences):
    """Megatron's logits."""
    return megatron_logits(awkward_trainer, padded_batch(awkward_sequences), awkward_sequences)


def test_without_a_fault_the_check_passes(ours, reference, awkward_sequences):
    assert (ours - reference_logits(reference, awkward_sequences)).abs().max() < FORWARD


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_forward_is_caught(ours, reference, awkward_sequences, name):
    """Each fault in one of the two models is far beyond the limit, at three windows and these shapes."""
    if name not in fitting_faults(reference.config):
        pytest.skip(FAULTS[name].unfit(reference.config))
    with FAULTS[name].plant(reference):
        gap = (ours - reference_logits(reference, awkward_sequences)).abs().max()
    assert gap > 10 * FORWARD, f"{name} would pass: {gap:.1e}"


WRONG_GRADIENTS = {
    "none": lambda gradient: gradient * 0,
    "half": lambda gradient: gradient / 2,
    "of other heads": lambda gradient: gradient.flip(0),
}


@pytest.mark.parametrize("name", WRONG_GRADIENTS)
def test_wrong_sink_gradients_are_caught(awkward_trainer, reference, awkward_sequences, name):
    """Pitfall 2. The forward pass is right, and so is every other gradient."""
    sinks = [p for n, p in awkward_trainer.model.module.named_parameters() if n.endswith("softmax_offset")]
    hooks = [p.register_hook(WRONG_GRADIENTS[name]) for p in sinks]
    try:
        gaps = gradient_gaps(awkward_trainer, reference, awkward_sequences)
    finally:
        for hook in hooks:
            hook.remove()
    off = {name for name, (_, relative) in gaps.items() if not relative < GRADIENT}
    assert all(gaps[name][1] > 1000 * GRADIENT for name in off)
    assert off == {f"model.layers.{i}.self_attn.sinks" for i in range(4)}
    sound = gradient_gaps(awkward_trainer, reference, awkward_sequences)
    assert all(relative < GRADIENT for _, relative in sound.values())


def test_a_nan_at_padded_positions_is_caught(awkward_trainer, awkward_sequences):
    """Pitfall 11. Padding is masked in the loss, and 0 x NaN is NaN."""
    batch = padded_batch(awkward_sequences)
    batch = dataclasses.replace(batch, advantages=batch.loss_mask)
    embedding = awkward_trainer._unwrapped()[0].embedding.word_embeddings.weight
    before = awkward_trainer.export()
    padding = embedding[0].detach().clone()
    try:
        with torch.no_grad():
            embedding[0] = float("nan")
        with pytest.raises(FloatingPointError, match="not finite"):
            awkward_trainer.update(batch)
    finally:
        with torch.no_grad():
            embedding[0] = padding
    after = awkward_trainer.export()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_stale_master_weights_are_caught(settings, checkpoint, trainer):
    """Pitfall 17. Weights that reach a bf16 model behind its optimizer's back are undone by the next step."""
    from helpers.trainer import MegatronTrainer

    half = dataclasses.replace(settings, model=dataclasses.replace(settings.model, dtype="bfloat16"))
    mixed = MegatronTrainer(half, checkpoint)
    assert mixed.stale_master_weights() == []  # equal at step 0
    masters = [p for p in mixed.model.module.parameters() if p.main_param.dtype == torch.float32]
    assert len(masters) == len(list(mixed.model.module.parameters())), (
        "without fp32 copies this shows nothing"
    )
    with torch.no_grad():
        next(p for n, p in mixed.model.module.named_parameters() if n.endswith("softmax_offset")).add_(1.0)
    [stale] = mixed.stale_master_weights()
    assert stale.endswith("softmax_offset")
    with pytest.raises(RuntimeError, match="1 master weights are not those of the model"):
        mixed._require_fresh_master_weights()
    mixed.load_weights(checkpoint)  # the cure
    assert mixed.stale_master_weights() == []


def served_logprobs(server, sequences):
    return torch.cat([torch.tensor(row) for row in server.prompt_logprobs(sequences)])


def tiny_sequences(settings):
    """Tokens of the tiny model, up to three of its windows."""
    generator, window = torch.Generator().manual_seed(0), settings.model.sliding_window
    return [torch.randint(1, 64, (n,), generator=generator).tolist() for n in (window - 1, window + 1, 3 * window)]


@pytest.mark.parametrize("name", ["window-one-short", "window-one-long", "window-missing", "sinks-ignored"])
def test_a_wrong_window_in_decode_is_caught(server, settings, checkpoint, load_reference, name):
    """Pitfall 16. What the server decodes past the window is compared with a reference that has the fault, and with a sound one."""
    server.load_weights(checkpoint)
    model, start = load_reference(checkpoint), tiny_sequences(settings)[0]
    [answer] = server.generate([start], 0.0, 1, 2 * settings.model.sliding_window)
    got = torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])
    assert len(got) > settings.model.sliding_window, "the answer ended inside the window: nothing is shown"
    whole = [start + answer["output_ids"]]
    assert (logprobs(model, whole)[-len(got) :] - got).abs().max() < 1e-5
    with FAULTS[name].plant(model):
        assert (logprobs(model, whole)[-len(got) :] - got).abs().max() > 1e-3


def test_experts_that_stay_behind_are_caught(server, settings, checkpoint, load_reference):
    """Pitfalls 15 and 26. All but the experts are sent; the server says success, and its logprobs tell."""
    server.load_weights(checkpoint)
    model, sequences = load_reference(checkpoint), tiny_sequences(settings)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    new = {name: p.detach().clone() for name, p in model.named_parameters()}
    try:
        send_tensors(server, {n: t for n, t in new.items() if ".experts." not in n}, "without experts")
        assert (served_logprobs(server, sequences) - logprobs(model, sequences)).abs().max() > 1e-2
        send_tensors(server, {n: t for n, t in new.items() if ".experts." in n}, "with them")
        assert (served_logprobs(server, sequences) - logprobs(model, sequences)).abs().max() < 1e-4
    finally:
        server.load_weights(checkpoint)

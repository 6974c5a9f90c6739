"""Attention with sinks on a GPU: which backend computes it, and whether its gradients are right (pitfalls 1 and 2)."""

import math

import pytest

from helpers.anatomy import attention_with_sinks, te_window, window_mask
from helpers.preflight import NotReady, attention_report

HEADS, GROUPS, WIDTH = 64, 8, 64  # gpt-oss-20b's attention
ROWS, LENGTH = 2, 512
# bfloat16 keeps 8 significant bits: a value is rounded by at most half of 2^-7 of itself. The fused path rounds P, O and the
# gradients once each, the unfused one S, P, dP and dS too, and d(sink) sums terms of one sign here (see `inputs`), so that a
# path that is right stays within a few roundings: 2^-6 is four of them. (Plain torch in bfloat16 on these inputs: O 0.2%,
# dQ 0.5%, dK 0.3%, dV 0.2%, d(sink) 0.2% in norm and 0.3% for the worst head. A lost row of the batch is 50%.)
LIMIT = 2.0**-6


@pytest.fixture(scope="module")
def inputs(settings):
    """q, k, v, sinks and the upstream gradient: [S, B, heads, width] in bfloat16.

    Sinks from 0 to 8: the sink takes from 1% to 95% of the attention, a zero sink hides mistakes. The values have a mean and
    the gradient is the output itself (of the loss |O|^2 / 2), so that a sink's terms do not cancel.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    shapes = [(LENGTH, ROWS, heads, WIDTH) for heads in (HEADS, GROUPS, GROUPS)]
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    tensors = [q, k, v + 0.5, torch.linspace(0, 8, HEADS)]
    return [t.to(settings.device, torch.bfloat16) for t in tensors]


def plain_attention(q, k, v, sinks, window):
    """[S, B, heads, width]: scores, a column for the sink, softmax in fp32; no fused kernel anywhere."""
    import torch

    q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
    k, v = (t.repeat_interleave(HEADS // GROUPS, dim=1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH)
    scores = scores.masked_fill(~window_mask(LENGTH, window).to(q.device), -torch.inf)
    return (attention_with_sinks(scores.float(), sinks.float()).to(v) @ v).permute(2, 0, 1, 3)


def te_attention(q, k, v, sinks, window):
    """The same by TransformerEngine's module, as Megatron's TEDotProductAttention calls it; also the module's sinks."""
    import torch
    from transformer_engine.pytorch import DotProductAttention

    module = DotProductAttention(
        HEADS, WIDTH, num_gqa_groups=GROUPS, attention_dropout=0.0, qkv_format="sbhd", attn_mask_type="causal",
        window_size=te_window(window), softmax_type="learnable",
    )  # fmt: skip
    with torch.no_grad():
        module.softmax_offset.copy_(sinks)
    return module(q, k, v).reshape(LENGTH, ROWS, HEADS, WIDTH), module.softmax_offset


def passes(attention, tensors, window, upstream=None, dtype="float32"):
    """{"O", "dQ", "dK", "dV", "d(sink)", "upstream"}. upstream: the gradient of O; None: O itself, rounded to bfloat16.

    dtype: of the leaves, and so of their gradients; the values are those of bfloat16 either way.
    """
    import torch

    q, k, v, sinks = (t.detach().to(getattr(torch, dtype), copy=True).requires_grad_() for t in tensors)
    output = attention(q, k, v, sinks, window)
    output, sinks = output if isinstance(output, tuple) else (output, sinks)
    upstream = output.detach().bfloat16() if upstream is None else upstream
    output.backward(upstream.to(output.dtype))
    found = {"O": output.detach(), "dQ": q.grad, "dK": k.grad, "dV": v.grad, "d(sink)": sinks.grad}
    return {name: t.float() for name, t in found.items()} | {"upstream": upstream}


def distance(a, b) -> float:
    """|a - b| / |b|."""
    return ((a - b).norm() / b.norm()).item()


def worst_head(a, b) -> float:
    """The largest relative difference of a head's d(sink)."""
    return ((a - b).abs() / b.abs()).max().item()


@pytest.mark.parametrize("window", [128, None], ids=["sliding", "full"])
def test_fused_and_unfused_sink_gradients_are_those_of_the_extra_column(
    card, inputs, window, attention_path, attention_taken, record
):
    kind = "sliding" if window else "full"
    plain = passes(plain_attention, inputs, window)
    found = {}
    for path, fused in (("fused", True), ("unfused", False)):
        attention_path(fused)
        found[path] = passes(te_attention, inputs, window, plain["upstream"], "bfloat16")
        assert attention_taken() == ("FusedAttention" if fused else "UnfusedDotProductAttention")
        for name in ("O", "dQ", "dK", "dV", "d(sink)"):
            record(f"{kind}, {path}, {name}", distance(found[path][name], plain[name]), "1", below=LIMIT)
        record(
            f"{kind}, {path}, d(sink), worst head",
            worst_head(found[path]["d(sink)"], plain["d(sink)"]),
            "1",
            below=LIMIT,
        )
        record(f"{kind}, {path}, smallest |d(sink)|", found[path]["d(sink)"].abs().min(), "1", at_least=1.0)
    gap = worst_head(found["fused"]["d(sink)"], found["unfused"]["d(sink)"])
    record(f"{kind}, fused against unfused, d(sink), worst head", gap, "1", below=2 * LIMIT)


def test_the_limit_sees_wrong_sink_gradients(inputs):
    """Heads exchanged, a lost row of the batch, and sinks that take part in nothing break it. (Plain torch; any device.)"""
    plain = passes(plain_attention, inputs, 128)
    sound, upstream = plain["d(sink)"], plain["upstream"]
    one_row = passes(plain_attention, [t[:, :1] if t.ndim == 4 else t for t in inputs], 128, upstream[:, :1])
    wrong = {
        "exchanged": sound.flip(0),
        "a row lost": one_row["d(sink)"],
        "none": sound * 0,
        "4% off": sound * 1.04,
    }
    for name, gradient in wrong.items():
        assert worst_head(gradient, sound) > 2 * LIMIT, name
    # the same path with bfloat16's roundings stays below
    rounded = passes(plain_attention, inputs, 128, upstream, "bfloat16")
    assert 0 < worst_head(rounded["d(sink)"], sound) < LIMIT


def test_preflight_names_the_backend_that_the_trainer_takes(
    settings, trainer, trainer_logprobs, record, facts, say
):
    report = attention_report(settings)
    facts["attention"] = str(report)
    say(f"  {report}")
    trainer_logprobs()
    if settings.device == "cpu":
        assert report.transformer_engine == "-"
        return
    from transformer_engine.pytorch.attention.dot_product_attention import _attention_backends

    assert report.backend == "FusedAttention" and report.layout == "SBHD"
    assert _attention_backends["use_fused_attention"], "the trainer takes another backend than preflight says"
    assert _attention_backends["attention_params"].softmax_type == "learnable"
    record("cuDNN", float(".".join(report.cudnn.split(".")[:2])), "version")


def test_preflight_says_what_packed_sequences_would_take(card, settings, facts):
    """THD needs cuDNN >= 9.18 (verl 5224), which the lock has; a node's own torch may bring an older one."""
    from transformer_engine.pytorch.utils import get_cudnn_version

    if get_cudnn_version() < (9, 18, 0):
        with pytest.raises(NotReady, match=r"UnfusedDotProductAttention in THD: cuDNN .* install nvidia-cudnn 9\.18") as refusal:
            attention_report(settings, packed=True)
        facts["attention, packed"] = str(refusal.value)
        return
    report = attention_report(settings, packed=True)
    facts["attention, packed"] = str(report)
    assert report.backend == "FusedAttention" and report.layout == "THD"


def test_preflight_refuses_deterministic_mode(card, settings, monkeypatch):
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    with pytest.raises(NotReady, match="UnfusedDotProductAttention in SBHD: .* deterministic mode"):
        attention_report(settings)


def test_the_trained_models_sink_gradients_agree_between_the_paths(
    card, settings, trainer, prompts, tokens, attention_path, record
):
    """Every sink of every layer gets a gradient. In a whole model the paths' roundings also move routers, so the limit is that
    of the noise: twice what separates the paths in the gradients of all other tensors."""
    import torch

    from helpers.losses import supervised_loss
    from helpers.parity import padded_batch

    batch, found = padded_batch(prompts, tokens.pad), {}
    for fused in (True, False):
        attention_path(fused)
        found[fused] = trainer.gradients(batch, supervised_loss)
    sinks = [name for name in found[True] if name.endswith("sinks")]
    assert len(sinks) == settings.model.num_hidden_layers
    fused, unfused = (torch.cat([found[path][name] for name in sinks]) for path in (True, False))
    record("model, smallest |d(sink)|, fused", fused.abs().min(), "1", at_least=1e-12)
    others = [
        distance(found[True][name].float(), found[False][name].float())
        for name in found[True]
        if name not in sinks and found[False][name].abs().max() > 0
    ]
    noise = torch.tensor(others).median().item()
    record("model, all other gradients, fused against unfused, median", noise, "1")
    record(
        "model, d(sink), fused against unfused", distance(fused, unfused), "1", below=max(2 * noise, LIMIT)
    )

"""The server past the window, and through releasing its memory (pitfalls 13 and 16)."""

import pytest

from helpers.anatomy import checkpoint_bytes
from helpers.faults import FAULTS, logprobs

STILL = 2.0  # seconds without a change that count as "the release is done"
SAME = 1e-3  # nat, mean: two readings of the same weights by the same kernels (measured on a CPU: 0)


# --- decode past the window (16) ----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def decoded(settings, server, trained, prompts):
    """[(prompt, sampled ids, their logprobs)]: two windows of new tokens each, whatever ends an answer ignored."""
    import torch

    server.load_weights(trained)
    sampling = dict(temperature=1.0, max_new_tokens=2 * settings.model.sliding_window, ignore_eos=True)
    outputs = server.post("/generate", input_ids=prompts, sampling_params=sampling, return_logprob=True)
    rows = [torch.tensor([entry[0] for entry in o["meta_info"]["output_token_logprobs"]]) for o in outputs]
    return [(prompt, o["output_ids"], row) for prompt, o, row in zip(prompts, outputs, rows, strict=True)]


def after_the_prompt(flat, decoded):
    """The part of logprobs [sum of lengths - 1] of whole sequences that belongs to the sampled tokens, a list a sequence."""
    parts = flat.split([len(prompt) + len(ids) - 1 for prompt, ids, _ in decoded])
    return [part[-len(ids) :] for part, (_, ids, _) in zip(parts, decoded, strict=True)]


def whole(decoded) -> list[list[int]]:
    return [[*prompt, *ids] for prompt, ids, _ in decoded]


def test_decode_past_the_window_agrees_with_prefill_and_with_the_trainer(
    settings, server, decoded, ask, trainer_logprobs, record
):
    import torch

    window = settings.model.sliding_window
    crossed = [p for p, ids, _ in decoded if len(p) < window < len(p) + len(ids)]
    record("decode, answers that cross the window", len(crossed), "count", at_least=2)
    got = torch.cat([row for _, _, row in decoded])
    for other, flat in (
        ("prefill", ask(server, whole(decoded))),
        ("trainer", trainer_logprobs(whole(decoded))),
    ):
        gap = (got - torch.cat(after_the_prompt(flat, decoded))).abs()
        record(f"decode, mean |decode - {other}|", gap.mean(), "nat", below=0.02)
        record(f"decode, largest |decode - {other}|", gap.max(), "nat")
    # from the first step whose query has lost a token to the window: that of the token after the 129th
    flat = after_the_prompt(ask(server, whole(decoded)), decoded)
    crossing = [
        (row - prefill).abs()[window + 1 - len(prompt) :][:16]
        for (prompt, _, row), prefill in zip(decoded, flat, strict=True)
        if len(prompt) <= window
    ]
    gap = torch.cat(crossing)
    record("decode, mean |decode - prefill|, first 16 steps past the window", gap.mean(), "nat", below=0.02)


def test_no_fault_of_the_window_explains_decode_better(decoded, reference, record):
    """transformers in fp32, sound and with the window missing or on the wrong layers: decode must be nearest to the sound one,
    by far, else the comparison above could not see such a fault."""
    import torch

    got = torch.cat([row for _, _, row in decoded])

    def distance() -> float:
        theirs = torch.cat(after_the_prompt(logprobs(reference, whole(decoded)).cpu(), decoded))
        return (got - theirs).abs().mean().item()

    sound = distance()
    record("decode, mean |decode - transformers fp32|", sound, "nat", below=0.02)
    for name in ("window-missing", "window-on-odd-layers"):
        with FAULTS[name].plant(reference):
            record(f"decode, {name}: times the sound distance", distance() / sound, "1", at_least=3)


# --- release and resume (13) --------------------------------------------------------------------------------------------
def gap(a, b) -> float:
    return (a - b).abs().mean().item()


def test_release_gives_back_weights_and_cache_and_resume_brings_them_again(
    quiet_card, settings, server, trainer, trained, start, ask, used, record
):
    """By NVML, read until it stands still, since the answer to a release comes first. Weights come back by a full sync."""
    from helpers.weight_sync import sync_weights

    server.load_weights(trained)
    before, held = ask(server), used()
    state = server.http.get(server.url + "/server_info", timeout=60).json()["internal_states"][0]
    weights, cache = checkpoint_bytes(settings.model, "bf16"), state["memory_usage"]["kvcache"] * 2**30
    seconds = server.release_memory()
    low = used(STILL)
    record("release, weights and cache", (weights + cache) / 1e9, "GB", at_least=1)
    record("release, seconds until the answer", seconds, "s")
    record(
        "release, share of weights and cache given back", (held - low) / (weights + cache), "1", at_least=0.95
    )
    record("resume, seconds", server.resume_memory(), "s")
    sync_weights(trainer, server, "resumed")
    record("resume, memory against before", abs(used() - held) / (weights + cache), "1", below=0.05)
    record("resume and sync, mean change of a logprob", gap(ask(server), before), "nat", below=SAME)
    server.load_weights(start)
    record("other weights, mean change of a logprob", gap(ask(server), before), "nat", at_least=100 * SAME)
    server.load_weights(trained)


def test_five_cycles_of_release_and_resume_leave_memory_and_logprobs_where_they_were(
    quiet_card, settings, server, trained, ask, used, record, say
):
    server.load_weights(trained)
    before, lows, highs, gaps = ask(server), [], [], []
    for cycle in range(5):
        server.release_memory()
        lows.append(used(STILL))
        server.resume_memory()
        server.load_weights(trained)
        highs.append(used())
        gaps.append(gap(ask(server), before))
        say(f"  cycle {cycle}: {lows[-1] / 1e9:.2f} to {highs[-1] / 1e9:.2f} GB, gap {gaps[-1]:.1e}")
    size = checkpoint_bytes(settings.model, "bf16")
    record("cycles, growth of released memory", (lows[-1] - lows[1]) / size, "1 (of the weights)", below=0.02)
    record(
        "cycles, growth of resumed memory", (highs[-1] - highs[1]) / size, "1 (of the weights)", below=0.02
    )
    record("cycles, largest mean change of a logprob", max(gaps), "nat", below=SAME)

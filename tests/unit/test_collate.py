"""helpers.collate: hand-written layout, round trip of random episodes, messages."""

from __future__ import annotations

import dataclasses
import doctest

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import collate as module
from helpers.collate import collate
from helpers.records import Episode

quick = settings(max_examples=60, deadline=None)
PAD = 99


@st.composite
def episodes(draw):
    prompt = draw(st.lists(st.integers(0, 50), min_size=1, max_size=6))
    completion = draw(st.lists(st.integers(0, 50), max_size=9))
    logprob = st.floats(-8, 0, width=32)
    logprobs = draw(st.lists(logprob, min_size=len(completion), max_size=len(completion)))
    group = draw(st.integers(0, 3))
    return Episode(tuple(prompt), tuple(completion), tuple(logprobs), "stop", group)


some_episodes = st.lists(episodes(), min_size=1, max_size=4)


def example(**changes):
    episode = Episode((1, 2), (3, 4, 5), (-0.5, -1.0, -1.5), "stop", 2)
    return dataclasses.replace(episode, **changes)


def test_doctests():
    assert doctest.testmod(module).failed == 0


def test_by_hand():
    batch = collate(
        [example(), Episode((7,), (8,), (-0.25,), "length", 5)], torch.tensor([1.5, -2.0]), PAD, 6
    )
    assert batch.size == (2, 6)
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 5, 99], [7, 8, 99, 99, 99, 99]]
    assert batch.labels.tolist() == [[2, 3, 4, 5, 99, 99], [8, 99, 99, 99, 99, 99]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    assert batch.loss_mask.tolist() == [[0, 1, 1, 1, 0, 0], [1, 0, 0, 0, 0, 0]]
    assert batch.rollout_logprobs.tolist() == [[0, -0.5, -1, -1.5, 0, 0], [-0.25, 0, 0, 0, 0, 0]]
    assert batch.advantages.tolist() == [[0, 1.5, 1.5, 1.5, 0, 0], [-2, 0, 0, 0, 0, 0]]
    assert batch.group.tolist() == [2, 5]


def test_types():
    batch = collate([example()], torch.ones(1, dtype=torch.float64), PAD)
    integers = (batch.tokens, batch.labels, batch.position_ids, batch.group)
    floats = (batch.loss_mask, batch.rollout_logprobs, batch.advantages)
    assert {t.dtype for t in integers} == {torch.int64}
    assert {t.dtype for t in floats} == {torch.float32}


@quick
@given(some_episodes, st.sampled_from([1, 4, 8]), st.integers(0, 3))
def test_every_episode_can_be_read_back(items, round_to, extra):
    longest = max(len(e.prompt_ids) + len(e.completion_ids) for e in items)
    fixed = longest + extra if extra else None
    batch = collate(items, torch.arange(len(items)) + 1.0, PAD, fixed, round_to)
    width = batch.size[1]
    assert width == fixed if fixed else width % round_to == 0 and 0 <= width - longest < round_to
    assert batch.loss_mask[:, -1].sum() == 0
    assert torch.equal(batch.labels[:, :-1], batch.tokens[:, 1:])
    for row, episode in enumerate(items):
        kept = batch.loss_mask[row] > 0
        assert tuple(batch.labels[row][kept].tolist()) == episode.completion_ids
        assert tuple(batch.rollout_logprobs[row][kept].tolist()) == episode.logprobs
        assert (batch.advantages[row] == kept * (row + 1.0)).all()
        assert (batch.rollout_logprobs[row][~kept] == 0).all()
        used = len(episode.prompt_ids) + len(episode.completion_ids)
        assert (batch.tokens[row, used:] == PAD).all()


@quick
@given(some_episodes, st.randoms(use_true_random=False))
def test_permuting_episodes_permutes_rows(items, random):
    order = list(range(len(items)))
    random.shuffle(order)
    advantages = torch.arange(len(items)) + 1.0
    expected = collate(items, advantages, PAD).rows(torch.tensor(order))
    got = collate([items[i] for i in order], advantages[order], PAD)
    for column in dataclasses.fields(got):
        one, other = getattr(got, column.name), getattr(expected, column.name)
        assert (one is None and other is None) or torch.equal(one, other)


def test_without_advantages_they_are_zero():
    assert collate([example()], None, PAD).advantages.abs().sum() == 0


def test_an_aborted_episode_without_tokens_has_an_empty_mask():
    batch = collate([example(completion_ids=(), logprobs=(), finish_reason="abort")], None, PAD)
    assert batch.loss_mask.sum() == 0


@pytest.mark.parametrize(
    ("items", "advantages", "options", "message"),
    [
        ([], None, {}, "no episodes to collate"),
        ([example(prompt_ids=())], None, {}, "episode 0 has an empty prompt"),
        ([example()], None, {"seq_length": 4}, r"2 \+ 3 = 5 tokens, and seq_length is 4; raise"),
        ([example()], torch.ones(2), {}, r"shape \(2,\), and there are 1 episodes"),
        ([example()], torch.ones(1, 1), {}, r"shape \(1, 1\)"),
        ([example()], torch.tensor([float("inf")]), {}, "advantage is not a finite number"),
        ([example(logprobs=(0.0, float("nan"), 0.0))], None, {}, "logprob that is not finite"),
        ([example()], None, {"pad_id": -100}, "pad_id=-100 has no embedding"),
        ([example()], None, {"round_to": 0}, "round_to=0 must be at least 1"),
        ([example()], None, {"seq_length": 0}, "seq_length=0"),
    ],
)
def test_messages(items, advantages, options, message):
    with pytest.raises(ValueError, match=message):
        collate(items, advantages, **({"pad_id": PAD} | options))


def test_an_episode_knows_the_weights_of_each_token_and_whether_it_ended():
    crossed = Episode((1,), (2, 3), (-1.0, -2.0), "abort", 0, ("step-1", "step-2"))
    assert crossed.weight_version == "step-2" and crossed.unfinished
    assert example().weight_version == "" and not example().unfinished
    with pytest.raises(ValueError, match="2 completion tokens and 1 weight versions"):
        Episode((1,), (2, 3), (-1.0, -2.0), "stop", 0, ("step-1",))
    with pytest.raises(ValueError, match="2 completion tokens and 1 logprobs"):
        Episode((1,), (2, 3), (-1.0,), "stop", 0)

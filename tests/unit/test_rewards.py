"""Rewards: strict, deterministic, never a silent zero for a right answer (pitfall 20)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.checkpoints import tiny_vocabulary, write_tiny_tokenizer
from helpers.harmony import encode, load_tokenizer, render_completion
from helpers.records import Episode
from helpers.rewards import grade, score, shuffled
from helpers.tasks import MedianTask

FORMS = [  # completion, reward when "4" is right
    ("<|channel|>final<|message|>4<|return|>", 1.0),
    (
        "<|channel|>analysis<|message|>0034699<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>",
        1.0,
    ),
    ("<|channel|>analysis<|message|><|end|><|start|>assistant<|channel|>final<|message|>4<|return|>", 1.0),
    ("<|channel|>final<|message|>5<|return|>", 0.0),
    ("<|channel|>final<|message|>44<|return|>", 0.0),
    ("<|channel|>final<|message|> 4<|return|>", 0.0),
    ("<|channel|>final<|message|><|return|>", 0.0),
    ("<|channel|>final<|message|>4", 0.0),
    ("<|channel|>final<|message|>4<|end|>", 0.0),
    ("<|channel|>final<|message|>4<|return|><|channel|>final<|message|>5<|return|>", 0.0),
    ("<|channel|>final<|message|>5<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>", 0.0),
    ("<|channel|>analysis<|message|>4<|return|>", 0.0),
    ("4<|return|>", 0.0),
    ("", 0.0),
]


@pytest.mark.parametrize(("text", "reward"), FORMS)
def test_forms(text, reward):
    assert grade(text, "4") == reward


@given(st.text("0123456789", min_size=7, max_size=7), st.integers(1, 400))
def test_a_right_answer_counts_however_long_the_thinking(question, length):
    answer = MedianTask().problem(question).answer
    assert grade(render_completion(answer, "7" * length), answer) == 1.0


@given(st.lists(st.sampled_from(list(tiny_vocabulary(64))), max_size=30))
def test_whatever_a_policy_writes_gets_nought_or_one(tokens):
    assert grade("".join(tokens), "4") in (0.0, 1.0)


def test_score_follows_the_episode_not_its_place(tmp_path):
    write_tiny_tokenizer(tmp_path, 64)
    tokenizer = load_tokenizer(tmp_path)
    problems = [MedianTask().problem("1111111"), MedianTask().problem("2222222")]

    def episode(digit, group):
        ids = encode(tokenizer, render_completion(digit))
        return Episode((1,), ids, (0.0,) * len(ids), "stop", group)

    episodes = [episode("2", 1), episode("1", 0), episode("1", 1), episode("2", 0)]
    assert score(episodes, problems, tokenizer) == [1.0, 1.0, 0.0, 0.0]


def test_shuffled_is_a_repeatable_permutation():
    rewards = [float(i) for i in range(64)]
    a = shuffled(rewards, "0-1")
    assert (
        sorted(a) == rewards
        and a != rewards
        and a == shuffled(rewards, "0-1")
        and a != shuffled(rewards, "0-2")
    )
    assert rewards == [float(i) for i in range(64)]  # the caller's list is as it was

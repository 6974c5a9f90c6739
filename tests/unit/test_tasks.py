"""Tasks: right answers, nothing held out in training, streams that depend on seed and step only."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.harmony import parse_completion, render_prompt
from helpers.tasks import TASKS, MedianTask, is_held_out, load_task

digits = st.text("0123456789", min_size=1, max_size=19).filter(lambda text: len(text) % 2)


@given(digits)
def test_the_answer_is_the_median(question):
    answer = MedianTask().problem(question).answer
    below = sum(c < answer for c in question)
    above = sum(c > answer for c in question)
    assert answer in question and below <= len(question) // 2 and above <= len(question) // 2


@given(digits, st.randoms())
def test_holding_out_depends_on_the_multiset_only(question, rng):
    shuffled = list(question)
    rng.shuffle(shuffled)
    assert is_held_out("".join(shuffled)) == is_held_out(question)


@pytest.mark.parametrize("name", TASKS)
def test_no_training_stream_shows_a_held_out_multiset(name):
    task = load_task(name, seed=1)
    trained = [p.question for step in range(20) for p in task.sample(32, step)]
    shown = [] if name == "even-tokens" else [d.prompt for d in task.demonstrations(500, 0.65, 0.2)]
    assert not any(is_held_out(q) for q in trained)
    assert not any(is_held_out("".join(c for c in prompt if c.isdigit())) for prompt in shown)
    assert all(is_held_out(p.question) for p in task.held_out(256))


@pytest.mark.parametrize("name", TASKS)
def test_held_out_multisets_are_distinct_and_the_same_for_every_seed(name):
    a, b = load_task(name, 0).held_out(256), load_task(name, 5).held_out(256)
    assert a == b and len({"".join(sorted(p.question)) for p in a}) == 256
    assert a[:10] == load_task(name, 0).held_out(10)


def test_a_stream_depends_on_seed_and_step_only():
    task = MedianTask(seed=3)
    first = task.sample(8, step=4)
    task.sample(100, step=5)  # drawing other steps in between moves nothing: a resumed run sees the same data
    assert task.sample(8, step=4) == first
    assert task.sample(8, step=5) != first and MedianTask(seed=4).sample(8, step=4) != first


@pytest.mark.parametrize(("name", "digits"), [("median", 7), ("median-15", 15)])
def test_demonstrations_are_well_formed_and_mixed(name, digits):
    shown = load_task(name).demonstrations(2000, lazy_share=0.65, slip_rate=0.2)
    answers = [parse_completion(d.completion) for d in shown]
    assert all(a.well_formed for a in answers)
    lazy = sum(a.analysis is None for a in answers) / len(answers)
    assert 0.6 < lazy < 0.7
    worked = [(d, a) for d, a in zip(shown, answers, strict=True) if a.analysis]
    assert all(len(a.analysis) == digits for _, a in worked)
    assert all(a.final == a.analysis[digits // 2] for _, a in worked)  # the answer follows from the working
    slipped = [a for d, a in worked if sorted(a.analysis) != list(a.analysis)]
    assert 0 < len(slipped) < 0.25 * len(worked)


def test_without_slips_every_worked_answer_is_right():
    task = MedianTask()
    for d in task.demonstrations(200, lazy_share=0.0, slip_rate=0.0):
        question = d.prompt.split("<|message|>")[1][:7]
        assert d.prompt == render_prompt(question)
        assert parse_completion(d.completion).final == task.problem(question).answer


def test_an_unknown_task_names_the_known_ones():
    assert load_task("median", 2) == MedianTask(2)
    with pytest.raises(ValueError, match="tasks: median"):
        load_task("medain")


def test_even_tokens_fills_a_prompt_of_512_and_grades_ids(tmp_path):
    from helpers.checkpoints import HARMONY_IDS, HARMONY_SIZE, write_tiny_tokenizer
    from helpers.harmony import encode, load_tokenizer, stop_token_ids

    write_tiny_tokenizer(tmp_path, HARMONY_SIZE)
    tokenizer = load_tokenizer(tmp_path)
    problem = load_task("even-tokens").sample(1)[0]
    ids = encode(tokenizer, problem.prompt)
    assert len(ids) == 512
    assert ids[0] == HARMONY_IDS["<|start|>"] and HARMONY_IDS["<|end|>"] in ids
    assert sorted(stop_token_ids(tokenizer)) == [199_999, 200_002, 200_012]
    assert problem.reward([2, 4, 5, 7], tokenizer) == 0.5
    assert problem.reward([], tokenizer) == 0.0
    assert tokenizer.decode([150_000, 190_000]) == "filler_150000filler_190000"
    assert encode(tokenizer, "filler_150000") != (150_000,), "no text becomes a filler"
    with pytest.raises(ValueError, match=r"warm_start\.steps = 0"):
        load_task("even-tokens").demonstrations(1, 0.5, 0.5)

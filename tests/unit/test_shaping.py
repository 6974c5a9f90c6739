"""helpers.shaping: DAPO's three cases by hand, monotone, continuous, and its messages."""

from __future__ import annotations

import doctest

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import shaping as module
from helpers.shaping import overlong_penalty

quick = settings(max_examples=60, deadline=None)


def by_plain_python(length, max_length, buffer):
    """Equation 13 of the paper, case by case."""
    if length <= max_length - buffer:
        return 0.0
    if length <= max_length:
        return ((max_length - buffer) - length) / buffer
    return -1.0


def test_doctests():
    assert doctest.testmod(module).failed == 0


@quick
@given(st.lists(st.integers(0, 300), min_size=1, max_size=8), st.integers(1, 200), st.data())
def test_agrees_with_plain_python(lengths, max_length, data):
    buffer = data.draw(st.integers(1, max_length))
    got = overlong_penalty(torch.tensor(lengths), max_length, buffer)
    expected = [by_plain_python(n, max_length, buffer) for n in lengths]
    torch.testing.assert_close(got, torch.tensor(expected))
    assert got.dtype == torch.float32


@quick
@given(st.integers(1, 200), st.data())
def test_longer_never_pays_less_and_a_token_costs_at_most_one_buffer_th(max_length, data):
    buffer = data.draw(st.integers(1, max_length))
    steps = overlong_penalty(torch.arange(max_length + 20), max_length, buffer).diff()
    assert (steps <= 0).all() and (steps >= -1 / buffer - 1e-6).all()


def test_dapos_own_numbers():
    lengths = torch.tensor([0, 16384, 18432, 20480, 30000])
    assert overlong_penalty(lengths, 20480, 4096).tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]


def test_no_answers_no_penalties():
    assert overlong_penalty(torch.zeros(0, dtype=torch.int64), 10, 5).tolist() == []


@pytest.mark.parametrize(
    ("lengths", "max_length", "buffer", "message"),
    [
        ([1], 10, 0, "buffer=0 with max_length=10 leaves no room"),
        ([1], 10, 11, "buffer=11 with max_length=10"),
        ([1], 0, 1, "buffer=1 with max_length=0"),
        ([[1]], 10, 5, r"lengths have shape \(1, 1\) and must be \[B\]"),
        ([3, -1], 10, 5, "0 or more"),
    ],
)
def test_messages(lengths, max_length, buffer, message):
    with pytest.raises(ValueError, match=message):
        overlong_penalty(torch.tensor(lengths), max_length, buffer)

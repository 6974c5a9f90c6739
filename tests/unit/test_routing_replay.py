"""helpers.routing_replay without engines: reading, layout, and what is refused."""

from __future__ import annotations

import base64
import doctest
import pickle
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import rollout
from helpers import routing_replay as module
from helpers.collate import collate
from helpers.profiles import load_profile
from helpers.records import Episode
from helpers.rollout import RolloutError, ServerAddress, returns_experts
from helpers.routing_replay import (
    NOT_RUN, RoutingShape, check_experts, decode_experts, replaying, routing_difference,
)  # fmt: skip

quick = settings(max_examples=60, deadline=None)
SHAPE = RoutingShape(layers=2, experts=4, chosen=2)


def encode(experts) -> str:
    """As SGLang's detokenizer does."""
    return base64.b64encode(np.asarray(experts, np.int32).tobytes()).decode()


def choices(tokens: int, shape: RoutingShape = SHAPE, seed: int = 0) -> np.ndarray:
    """int16 [tokens, layers, chosen]: experts that a top-k could have given."""
    scores = np.random.default_rng(seed).random((tokens, shape.layers, shape.experts))
    return scores.argsort(-1)[..., : shape.chosen].astype(np.int16)


def episode(prompt: int = 2, completion: int = 3, **changes) -> Episode:
    tokens = prompt + completion
    given = dict(routed_experts=choices(tokens - 1, seed=tokens)) | changes
    return Episode((1,) * prompt, (2,) * completion, (-1.0,) * completion, "stop", 0, **given)


def test_doctests():
    assert doctest.testmod(module).failed == 0


# --- from the rollout ---------------------------------------------------------------------------------------
@quick
@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 6), st.data())
def test_what_is_encoded_is_read_back(tokens, layers, experts, data):
    shape = RoutingShape(layers, experts, data.draw(st.integers(1, experts)))
    given = choices(tokens - 1, shape, seed=tokens)
    read = decode_experts(encode(given), tokens, shape)
    assert read.dtype == np.int16 and (read == given).all() and read.shape == given.shape


def test_the_shape_is_the_checkpoints():
    config = {"num_hidden_layers": 24, "num_local_experts": 32, "num_experts_per_tok": 4}
    assert RoutingShape.of(config) == RoutingShape(24, 32, 4)


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (choices(3), "12 routed experts for an answer of 5 tokens; 4 tokens that were run x 2 layers x"),
        (choices(4)[:, :1], "returned 8 routed experts"),
        (np.zeros((4, 2, 2)), "same expert twice.*--moe-runner-backend triton$"),
        (choices(4) + 1, r"none of 0 to 3 \(they lie in 1 to 4\)"),
        (np.full((4, 2, 2), -2), r"none of 0 to 3 \(they lie in -2 to -2\)"),
        (np.where(choices(4) == 0, NOT_RUN, choices(4)), "none of 0 to 3"),  # half of a row
    ],
)  # fmt: skip
def test_what_no_router_can_have_chosen_is_refused(experts, message):
    with pytest.raises(ValueError, match=message):
        decode_experts(encode(experts), 5, SHAPE)


@pytest.mark.parametrize("kind", (np.asarray, torch.as_tensor))
def test_numpy_and_torch_are_checked_alike(kind):
    fine = choices(6)
    fine[4:] = NOT_RUN
    check_experts(kind(fine), SHAPE)
    check_experts(kind(fine[None]), SHAPE)
    with pytest.raises(ValueError, match="2 x 2, so they come from another model"):
        check_experts(kind(fine[:, :1]), SHAPE)
    with pytest.raises(ValueError, match="twice"):
        check_experts(kind(np.concatenate([fine, fine[:1] * 0])), SHAPE)
    with pytest.raises(ValueError, match="none of 0 to 3"):
        check_experts(kind(np.where(fine == 3, 4, fine)), SHAPE)


REPLAY = {"algorithm.routing_replay": True}


def test_an_answer_without_experts_is_refused():
    """As SGLang answers when it was not started for them: it passes over the request without a word."""
    with pytest.raises(RolloutError, match="started without them.*algorithm.routing_replay"):
        rollout._experts({"finish_reason": {"type": "stop"}}, 5, SHAPE)
    assert (rollout._experts({"routed_experts": encode(choices(4))}, 5, SHAPE) == choices(4)).all()


def test_the_servers_command_line():
    def flags(name, **changes):
        return rollout.server_command(load_profile(name, **changes), Path("checkpoint"), 1)

    assert "--enable-return-routed-experts" not in flags("gpu")
    assert "--enable-return-routed-experts" in flags("cpu")  # its shared server serves notebook 08 too
    assert "--moe-runner-backend" not in flags("gpu")
    line = flags("gpu", **REPLAY)
    assert "--enable-return-routed-experts" in line
    assert line[line.index("--moe-runner-backend") + 1] == "triton"  # SGLang's own choice records nothing


def test_a_shared_server_says_whether_it_returns_experts():
    plain, replay = load_profile("gpu"), load_profile("gpu", **REPLAY)
    able = load_profile("cpu")
    assert [returns_experts(p) for p in (plain, replay, able)] == [False, True, True]
    assert not ServerAddress("url", 1, "log", "shape").returns_experts  # written by an older start


# --- records and batches ------------------------------------------------------------------------------------
def test_an_episode_with_too_few_rows_is_refused():
    with pytest.raises(ValueError, match="5 tokens has 3 rows of routed experts, and 4 tokens were run"):
        episode(routed_experts=choices(3))


def test_an_episode_stays_comparable_and_travels():
    one = episode()
    copy = pickle.loads(pickle.dumps(one))
    assert copy == one and hash(copy) == hash(one) and (copy.routed_experts == one.routed_experts).all()


def test_rows_lie_at_their_tokens_and_the_rest_was_not_run():
    items = [episode(2, 3), episode(4, 6), episode(1, 0, routed_experts=choices(0))]
    batch = collate(items, None, 0)
    assert batch.routed_experts.shape == (3, 16, 2, 2) and batch.routed_experts.dtype == torch.int16
    for row, e in zip(batch.routed_experts, items, strict=True):
        ran = len(e.prompt_ids) + len(e.completion_ids) - 1
        assert (row[:ran].numpy() == e.routed_experts).all()
        assert (row[ran:] == NOT_RUN).all()  # the last token and the padding
    assert torch.equal(batch.rows(slice(1, 2)).routed_experts, batch.routed_experts[1:2])


def test_what_ray_hands_out_read_only_is_taken_without_a_warning():
    given = choices(4)
    given.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert collate([episode(routed_experts=given)], None, 0).routed_experts is not None


def test_without_experts_the_batch_has_none():
    batch = collate([episode(routed_experts=None)], None, 0)
    assert batch.routed_experts is None and batch.rows(slice(0, 1)).routed_experts is None


@pytest.mark.parametrize(
    "other", (None, choices(4, RoutingShape(3, 4, 2)), choices(4, RoutingShape(2, 4, 1)))
)
def test_episodes_that_differ_are_refused(other):
    with pytest.raises(ValueError, match="different routed experts.*roll all of them out"):
        collate([episode(), episode(routed_experts=other)], None, 0)


# --- into the trainer ---------------------------------------------------------------------------------------
CONFIG = SimpleNamespace(
    num_layers=2, num_moe_experts=4, moe_router_topk=2, sequence_parallel=False, moe_router_fusion=False,
    context_parallel_size=1,
)  # fmt: skip


@quick
@given(st.integers(1, 4), st.integers(1, 9), st.integers(0, 9))
def test_a_routers_rows_are_position_first_and_never_name_an_expert_twice(count, length, ran):
    experts = torch.as_tensor(choices(count * length)).view(count, length, 2, 2).clone()
    experts[:, ran:] = NOT_RUN
    rows = module._router_rows(experts, CONFIG)
    assert rows.shape == (2, length * count, 2) and rows.dtype == torch.int64
    table = rows.unflatten(1, (length, count))
    assert torch.equal(table.permute(2, 1, 0, 3)[:, :ran], experts[:, :ran].long())
    check_experts(table.permute(2, 1, 0, 3), SHAPE)
    assert (rows >= 0).all()


def test_padding_is_spread_over_the_experts():
    experts = torch.full((3, 8, 2, 2), NOT_RUN, dtype=torch.int16)
    assert module._router_rows(experts, CONFIG)[0].flatten().bincount().tolist() == [12] * 4


def test_a_recorded_pass_is_put_in_the_batchs_order():
    experts = torch.as_tensor(choices(24)).view(4, 6, 2, 2)
    parts = [module._router_rows(part, CONFIG) for part in experts.split(2)]  # two micro-batches
    layers = [[part[layer] for part in parts] for layer in range(2)]
    assert torch.equal(module._batch_order(layers, 6), experts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_router_fusion": True}, "fused router looks at no replay"),
        ({"context_parallel_size": 2}, "context parallelism"),
        ({"num_layers": 3}, "3 x 2, so they come from another model"),
        ({"moe_router_topk": 1}, "2 x 1, so they come from another model"),
        ({"num_moe_experts": 3}, "none of 0 to 2"),
    ],
)
def test_what_megatron_would_ignore_or_misplace_is_refused(changes, message):
    config = SimpleNamespace(**(vars(CONFIG) | changes))
    with pytest.raises(ValueError, match=message):
        module._check(config, torch.as_tensor(choices(24)).view(4, 6, 2, 2))


def test_without_experts_nothing_is_touched():
    with replaying([], None):
        pass


@quick
@given(st.randoms(use_true_random=False))
def test_the_order_of_a_tokens_experts_does_not_count(random):
    experts = torch.as_tensor(choices(12, RoutingShape(2, 8, 4))).view(2, 6, 2, 4)
    order = random.sample(range(4), 4)
    assert routing_difference(experts, experts[..., order]) == (0.0, 0.0)
    other = experts.clone()
    other[0, 0, 0] = (other[0, 0, 0] + 1) % 8
    expected = (1 / 24, 1 / 12) if set(other[0, 0, 0].tolist()) != set(experts[0, 0, 0].tolist()) else (0, 0)
    assert routing_difference(other, experts) == pytest.approx(expected)


def test_nothing_in_common_is_refused():
    experts = torch.full((1, 2, 2, 2), NOT_RUN)
    with pytest.raises(ValueError, match="no token was run by both"):
        routing_difference(experts, experts)

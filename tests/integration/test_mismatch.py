"""The gauges with the real engines: zero where the weights are one, and in order as the knobs turn."""

import pytest
import torch

from helpers.collate import collate
from helpers.mismatch import knob, measure
from helpers.profiles import load_profile
from helpers.rollout import roll_out
from helpers.tasks import load_task
from helpers.weight_sync import send_tensors

pytestmark = pytest.mark.engine
REPLAY = load_profile("cpu", **{"algorithm.routing_replay": True})


@pytest.fixture(scope="module")
def weights(server, trainer, checkpoint):
    """The trainer's, which both engines hold before and after this module."""
    trainer.load_weights(checkpoint)
    yield trainer.export()
    server.load_weights(checkpoint)


@pytest.fixture(scope="module")
def gauges_of(server, trainer, weights):
    """knob -> gauges of 64 answers sampled from the trainer's weights through it."""

    def gauge(name):
        send_tensors(server, knob(name)(weights), name)
        return measure(trainer, collate(roll_out(server, load_task("median").sample(8), REPLAY), None, 0))

    return gauge


def test_one_set_of_weights_shows_no_mismatch(gauges_of):
    found = gauges_of("exact")
    assert found.generation_kl < 1e-8 and found.replayed_kl < 1e-8
    assert found.logprob_gap < 1e-5 and found.token_multiplier < 1.0001
    assert found.other_experts < 1e-3  # ties


def test_a_coarser_rollout_is_further_away_and_exact_weights_undo_it(gauges_of):
    kl = [gauges_of(name).generation_kl for name in ("exact", "bf16", "int:8", "int:4", "int:2")]
    print("generation KL:", *(f"{value:.2e}" for value in kl))
    assert kl == sorted(kl) and kl[-1] > 100 * kl[1]
    assert gauges_of("exact").generation_kl < 1e-8


def test_replayed_routing_removes_most_of_what_the_routers_made(gauges_of):
    """And of coarse weights only the part that went through other experts."""
    routers, coarse = gauges_of("router:0.03"), gauges_of("int:2")
    assert routers.other_experts > 1e-3 and routers.replayed_kl < routers.generation_kl / 2
    assert coarse.replayed_kl > coarse.generation_kl / 2


def test_measuring_changes_nothing(gauges_of, trainer, weights):
    gauges_of("int:4")
    after = trainer.export()
    assert all(torch.equal(after[name], tensor) for name, tensor in weights.items())

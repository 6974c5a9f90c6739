"""Which placement-group bundle each actor takes, and what started ranks must look like; without starting Ray."""

import pytest

from helpers.cluster import ClusterError, _bundles, _gpu_share, check_ranks
from helpers.profiles import load_profile


def test_on_a_cpu_every_actor_has_a_bundle():
    settings = load_profile("cpu", **{"trainer.ranks": 2, "rollout.engines": 3})
    assert _bundles(settings) == ([{"CPU": 1}] * 5, [2, 3, 4])


def test_on_gpus_trainer_and_engine_share_a_card():
    assert _bundles(load_profile("gpu")) == ([{"CPU": 2, "GPU": 1}], [0])
    bundles, engines = _bundles(load_profile("cluster"))
    assert len(bundles) == 8 and engines == [0]


def test_on_gpus_each_can_have_a_card_of_its_own():
    settings = load_profile("gpu", **{"trainer.ranks": 2, "rollout.engines": 2, "cluster.placement": "split"})
    assert _bundles(settings) == ([{"CPU": 1, "GPU": 1}] * 4, [2, 3])


def test_several_engines_share_a_card_with_their_trainer():
    settings = load_profile("gpu", **{"rollout.engines": 2, "cluster.engines_per_card": 2})
    assert _bundles(settings) == ([{"CPU": 3, "GPU": 1}], [0, 0])
    assert 0.99 < 3 * _gpu_share(settings) <= 1
    settings = load_profile("gpu", **{"trainer.ranks": 2, "rollout.engines": 4, "cluster.engines_per_card": 2})
    assert _bundles(settings)[1] == [0, 1, 0, 1]


def test_engines_on_one_card_are_refused_where_weights_would_go_through_nccl():
    with pytest.raises(ValueError, match="engines_per_card = 2 is for engines beside a trainer on a GPU"):
        load_profile("gpu", **{"cluster.engines_per_card": 2, "cluster.placement": "split"})


def ranks(**changes):
    """Two sound GPU ranks, rank 1 with changes."""
    sound = [{"rank": i, "pid": 100 + i, "device": "cuda", "card": f"GPU-{i}"} for i in (0, 1)]
    return [sound[0], sound[1] | changes]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"card": "GPU-0"}, "do not have a GPU each"),  # both on one card
        ({"card": ""}, "do not have a GPU each"),  # masked twice: it sees none
        ({"device": "cpu"}, r"told otherwise .*\{1: 'cpu'\}"),
        ({"pid": 100}, "share a process"),
    ],
)
def test_ranks_that_ray_placed_wrongly_are_refused(changes, message):
    check_ranks(ranks(), "cuda")
    with pytest.raises(ClusterError, match=message):
        check_ranks(ranks(**changes), "cuda")


def test_ranks_on_a_cpu_have_no_card():
    check_ranks([r | {"card": "", "device": "cpu"} for r in ranks()], "cpu")

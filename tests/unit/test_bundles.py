"""Which placement-group bundle each actor takes, without starting Ray."""

from helpers.cluster import _bundles
from helpers.profiles import load_profile


def test_on_a_cpu_every_actor_has_a_bundle():
    settings = load_profile("cpu", **{"trainer.ranks": 2, "rollout.engines": 3})
    assert _bundles(settings) == ([{"CPU": 1}] * 5, [2, 3, 4])


def test_on_gpus_trainer_and_engine_share_a_card():
    assert _bundles(load_profile("gpu")) == ([{"CPU": 2, "GPU": 1}], [0])
    bundles, engines = _bundles(load_profile("cluster"))
    assert len(bundles) == 8 and engines == [0]

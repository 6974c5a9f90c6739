"""Our advantages, losses, KL forms and corrections against numbers that TRL and verl computed.

tests/bench/independent_losses.py runs both libraries on random batches and wrote the numbers down; it needs
them, this does not.
"""

import csv
import importlib.util
import json
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parents[1] / "bench"
RECORDED = json.loads((BENCH / "recorded" / "independent_losses.json").read_text())


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("independent_losses", BENCH / "independent_losses.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def cases(bench):
    return [bench.from_json(case) for case in RECORDED["cases"]]


@pytest.mark.parametrize("name", RECORDED["results"])
def test_ours_is_theirs(bench, cases, name):
    for case, numbers in zip(cases, RECORDED["results"][name], strict=True):
        theirs = {key: torch.tensor(values, dtype=torch.float64) for key, values in numbers.items()}
        ours = bench.OURS[name](case)
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            torch.testing.assert_close(ours[key].double(), value, rtol=1e-6, atol=1e-6, msg=f"{name}: {key}")


def test_every_comparison_is_recorded_and_was_made_on_many_batches(bench):
    assert list(RECORDED["results"]) == list(bench.OURS) == list(bench.THEIRS)
    with (BENCH / "recorded" / "independent_losses.csv").open() as file:
        label = file.readline()
        rows = list(csv.DictReader(file))
    assert all(f"{name} {RECORDED['versions'][name]}" in label for name in ("trl", "verl", "torch"))
    assert [row["comparison"] for row in rows] == list(bench.OURS)
    assert all(int(row["batches"]) >= 100 and float(row["largest_difference"]) < 1e-6 for row in rows)


def test_the_recorded_batches_reach_what_they_are_to_compare(bench, cases):
    """A comparison in which no token is clipped, dropped or cut would hold for wrong code too."""
    for case in cases:
        for ratio in ("token", "sequence"):
            clips = dict(clip_low=3e-4, clip_high=4e-4) if ratio == "sequence" else {}
            out = bench.clipped_policy_loss(
                case["now"], bench.batch_of(case), ratio=ratio, dual_clip=1.2, **clips
            )
            clipped, tokens = out.metrics["clip_fraction"]
            assert 0 < clipped < tokens
        for name in (n for n in bench.OURS if n.split()[1] in ("tis", "mis", "trust")):
            weights = bench.OURS[name](case)["weights"]
            trained = weights[case["mask"] > 0]
            assert len(trained.unique()) > 1, name

"""The tables of faults in tests/integration and tests/gpu name tests and faults that exist, for every row that each can show."""

import re
from pathlib import Path

import pytest

from helpers.faults import FAULTS

TABLE = Path(__file__).parents[1] / "integration" / "README.md"
GPU_TABLE = Path(__file__).parents[1] / "gpu" / "README.md"
ON_ONE_GPU = {1, 2, 13, 14, 15, 16, 26}
ON_A_CPU = {*range(2, 13), *range(15, 21), 22, 23, 24, 26, 27, 28}


@pytest.mark.parametrize(("table", "shown"), [(TABLE, ON_A_CPU), (GPU_TABLE, ON_ONE_GPU)], ids=["cpu", "gpu"])
def test_every_row_is_there_and_every_named_test_exists(table, shown):
    text = table.read_text()
    assert {int(number) for number in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)} == shown
    named = re.findall(r"`([\w./]+\.py)::(\w+)`", text)
    assert len(named) > len(shown)
    for file, test in named:
        assert f"\ndef {test}(" in (table.parent / file).read_text(), f"{file}::{test}"


def test_every_fault_of_the_registry_is_in_a_row():
    named = set(re.findall(r"`([a-z0-9]+(?:-[a-z0-9]+)*)`", TABLE.read_text()))
    assert set(FAULTS) <= named, set(FAULTS) - named
    assert {name for name in named if "-" in name} <= set(FAULTS)

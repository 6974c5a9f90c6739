"""The table of faults in tests/integration/README.md names tests and faults that exist, for every row that a CPU can show."""

import re
from pathlib import Path

from helpers.faults import FAULTS

TABLE = Path(__file__).parents[1] / "integration" / "README.md"
ON_A_CPU = {*range(2, 13), *range(15, 21), 22, 23, 24, 26, 27, 28}


def rows():
    return {int(m[1]): m[0] for m in re.finditer(r"^\| (\d+) \|.*$", TABLE.read_text(), re.MULTILINE)}


def test_every_row_that_a_cpu_can_show_is_there():
    assert set(rows()) == ON_A_CPU


def test_every_named_test_exists():
    named = re.findall(r"`([\w./]+\.py)::(\w+)`", TABLE.read_text())
    assert len(named) > len(ON_A_CPU)
    for file, test in named:
        assert f"\ndef {test}(" in (TABLE.parent / file).read_text(), f"{file}::{test}"


def test_every_fault_of_the_registry_is_in_a_row():
    named = set(re.findall(r"`([a-z0-9]+(?:-[a-z0-9]+)*)`", TABLE.read_text()))
    assert set(FAULTS) <= named, set(FAULTS) - named
    assert {name for name in named if "-" in name} <= set(FAULTS)

"""The parity table: each limit fails by itself, NaN fails, and kinds are sorted by layer. The comparison: tests/integration."""

import math

import pytest
import torch

from helpers.anatomy import GPT_OSS_20B, tensor_shapes
from helpers.parity import ParityRow, largest, parity_columns, parity_failures, parity_table, tensor_kinds

SOUND = dict(effect=1.0, forward_abs=1e-6, forward_rel=1e-6, gradient_abs=1e-6, gradient_rel=1e-6)
LIMITS = dict(forward=1e-4, gradient=1e-3, effect=1e-2)


def row(**changes) -> ParityRow:
    return ParityRow("self_attn.sinks", "sliding", **(SOUND | changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"effect": 1e-2}, "shows nothing"),
        ({"forward_abs": 1e-4}, "forward differs by 1.0e-04, the limit is 0.0001"),
        ({"gradient_rel": 1e-3}, "gradient differs by 1.0e-03 of its terms' size, the limit is 0.001"),
        ({"effect": math.nan}, "shows nothing"),
        ({"forward_abs": math.nan}, "forward differs by nan"),
        ({"gradient_rel": math.nan}, "gradient differs by nan"),
        ({"gradient_rel": math.inf}, "gradient differs by inf"),
    ],
)
def test_each_limit_fails_by_itself(changes, says):
    assert parity_failures([row()], **LIMITS) == []
    [problem] = parity_failures([row(), row(**changes)], **LIMITS)
    assert says in problem and "self_attn.sinks (sliding)" in problem


@pytest.mark.parametrize("place", (0, 1, 2))
def test_the_largest_value_is_nan_wherever_the_nan_stands(place):
    values = torch.tensor([1.0, -3.0, 2.0])
    assert largest(values) == 3.0
    values[place] = math.nan
    assert math.isnan(largest(values))


def test_every_tensor_of_gpt_oss_has_a_kind():
    kinds = tensor_kinds(GPT_OSS_20B, tensor_shapes(GPT_OSS_20B))
    assert len(kinds) == 2 * 17 + 3 and sum(len(names) for names in kinds.values()) == 411
    assert len(kinds["self_attn.sinks", "sliding"]) == len(kinds["self_attn.sinks", "full"]) == 12
    assert all(
        ".layers.0." in names[0] or ".layers.1." in names[0] or layers == "-"
        for (_, layers), names in kinds.items()
    )


def test_the_table_and_the_columns_say_the_same():
    rows = [row(), row(effect=2.0)]
    lines = parity_table(rows).splitlines()
    assert len(lines) == 3 and len(set(map(len, lines))) == 1
    assert parity_columns(rows)["effect"] == [1.0, 2.0] and "2.0e+00" in lines[2]

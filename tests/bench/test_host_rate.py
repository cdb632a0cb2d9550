"""The rate of attention on the host, of both kinds of rows, at a tiny size."""

import pytest
import torch

from bench.host_rate import measure_attend_rate
from tests.tolerances import PLAUSIBLE_RATES_GB_S
from transfer.tier_shape import TierShape

LEAST, MOST = PLAUSIBLE_RATES_GB_S


@pytest.mark.parametrize("rows", ["bfloat16", "int8"])
def test_the_attend_rate_is_plausible_and_of_every_row_once(rows: str) -> None:
    shape = TierShape((0,), 4, 2, 64, rows, 0, 0)
    assert LEAST < measure_attend_rate(shape, torch.float32, 1, 1 / 64) < MOST
    assert measure_attend_rate(shape, torch.float32, 1, 1e-9) > 0, "of a single row"

"""The plain steps of MAC-Attention in float64, where nothing but the formula can differ."""

import numpy as np
import pytest
import torch

from tests.gpu.mac_oracles import Rule
from tests.gpu.mac_rows import MacRows, Shape
from tests.gpu.test_kernels_mac import run
from tests.tolerances import KERNEL_FLOAT64


@pytest.mark.parametrize("share", [1.0, 0.75])
def test_the_plain_steps_are_the_formula_in_float64(share: float) -> None:
    rule = Rule(sink=4, band=8, capacity=16, tau=0.45, max_gap=16, max_age=40, max_prefix_share=share)
    rows = MacRows(Shape(4, 2, 64), rule, [50, 9], 30, torch.float64, "cpu", skips=[(4, 30), (0, 0)])
    generator = np.random.default_rng(1)
    assert run(rows, 30, lambda *_: int(generator.integers(0, 18)), out=KERNEL_FLOAT64, lse=KERNEL_FLOAT64) > 50

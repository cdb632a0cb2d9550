"""Name the numbers of published models and formats that both the CPU's and the card's code compute with. No torch."""

from typing import Literal

FP4_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of the lower three bits of e2m1; the fourth bit is the sign."""

CLAMPED_GAIN, CLAMPED_LIMIT = 1.702, 7.0
"""Constants of "clamped_swiglu": gpt-oss's `swiglu_alpha` and `swiglu_limit`."""

TILE = 16
"""Rows of a packed matrix that are stored together where the CPU multiplies them in integers."""

ExpertActivation = Literal["silu", "clamped_swiglu"]
"""Activations that the CPU's kernels compute from an expert's gate and up."""

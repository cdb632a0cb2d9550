"""Numbers of published models and formats that both the CPU's and the card's code compute with. No torch."""

from typing import Literal

FP4_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the lower three bits of e2m1; the fourth is the sign."""

CLAMPED_GAIN, CLAMPED_LIMIT = 1.702, 7.0
"""Of a "clamped_swiglu": gpt-oss's `swiglu_alpha` and `swiglu_limit`."""

TILE = 16
"""Rows of a packed matrix that lie together, where the CPU multiplies them in integers."""

ExpertActivation = Literal["silu", "clamped_swiglu"]
"""What the CPU's kernels compute of an expert's gate and up."""

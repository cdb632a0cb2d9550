"""Compute the exponential function in float32, in a form that compilers turn into vector code.

It is within two units in the last place for arguments in [-87, 88], to which others are clamped; exp(0) is 1 exactly,
and NaN stays NaN. Cody and Waite's reduction to [-ln 2 / 2, ln 2 / 2], then the Taylor polynomial of degree 7, whose
remainder there is below 2**-27 of the value.
"""

import numba
import numpy as np

from transfer.simd.vectors import power_of_two

_LOWEST, _HIGHEST = np.float32(-87.0), np.float32(88.0)
_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = np.float32(0.693145751953125), np.float32(1.42860682030941723212e-6)
_TO_INTEGER = np.float32(1.5 * 2**23)  # added, it leaves an integer in a float32's low bits
_ONE = np.float32(1.0)
_C2, _C3, _C4, _C5, _C6, _C7 = (np.float32(1 / factorial) for factorial in (2, 6, 24, 120, 720, 5040))


@numba.njit(nogil=True, fastmath=False)  # explicit, because numba otherwise passes a caller's fastmath on
def exp(x):
    """Return exp of a float32, as float32."""
    x = _LOWEST if x < _LOWEST else x
    x = _HIGHEST if x > _HIGHEST else x
    shifted = x * _LOG2_E + _TO_INTEGER
    n = shifted - _TO_INTEGER
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    tail = _C4 + r * (_C5 + r * (_C6 + r * _C7))
    return (_ONE + r * (_ONE + r * (_C2 + r * (_C3 + r * tail)))) * power_of_two(shifted)

"""What is compiled for compiled code alone is called by it, and by nothing else."""

import numba
import pytest

from transfer.simd.inner import inner


@inner
def _add(x):
    return x + 1


@inner(fastmath=True)
def _twice(x):
    return 2 * _add(x)


@numba.njit
def _root(x):
    return _twice(x)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_compiled_code_calls_it_and_python_is_refused(is_compiled: bool) -> None:
    if is_compiled:
        assert _root(3) == 8
    for function in (_add, _twice):
        with pytest.raises(TypeError, match=f"^{function.__name__}: compiled for compiled code alone"):
            function(3)

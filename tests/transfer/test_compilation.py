"""How far a compilation is: each function that is called counts once, and what others compile meanwhile does not."""

import numba

from transfer.simd.compilation import find_callees, reporting_compilation


@numba.njit
def _leaf(x):
    return x + 1


@numba.njit(inline="always")
def _inside(x):
    return _leaf(x)


@numba.njit
def _twice(x):
    return _inside(x) + _leaf(x)


@numba.njit
def _other(x):
    return x - 1


@numba.njit
def _root(x):
    return _twice(x) + _leaf(1.5 * x)


def test_what_a_function_calls_is_found_but_for_what_becomes_a_part_of_it():
    assert find_callees(_root) == {_root, _twice, _leaf}
    assert find_callees(_other, _inside) == {_other, _leaf}


def test_each_function_is_told_of_once_and_one_that_is_compiled_already_never():
    fractions: list[float] = []
    with reporting_compilation((_root,), fractions.append):
        _other(1)
        assert fractions == []
        assert _root(1) == 6.5
    assert fractions == [1 / 4, 2 / 4, 3 / 4]
    with reporting_compilation((_root,), fractions.append):
        _root(2)
    _twice(1.5)
    assert len(fractions) == 3

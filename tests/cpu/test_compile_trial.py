"""What LLVM may abort on is compiled in a child process first, and replaced where that ends."""

import logging
import os
import signal

import pytest
from numba import types

from cpu import row_products
from transfer.simd import rounded_rows, row_tiles, trial
from transfer.simd.features import HAS_PAIRS, SIMD
from transfer.simd.trial import compiles

WIDE, NARROW = ("znver5", "znver4", "sapphirerapids"), "haswell"  # with vectors of 512 bits, and without


@pytest.mark.parametrize("processor", [*WIDE, NARROW])
def test_products_of_pairs_compile_for_processors_that_have_them_and_an_abort_stays_in_the_child(processor) -> None:
    wanted = processor != NARROW or not HAS_PAIRS
    assert compiles(row_products.__name__, row_products.compile_pairs.__name__, processor) == wanted


@pytest.mark.long  # half a minute each
@pytest.mark.parametrize("processor", [*WIDE, NARROW])
def test_products_of_integers_compile_for_processors_with_vectors_of_512_bits_and_of_256(
    processor, monkeypatch
) -> None:
    monkeypatch.setenv("TANDEM_SIMD", SIMD if processor != NARROW else "avx2")
    assert compiles(row_tiles.__name__, row_tiles.compile_products.__name__, processor)
    assert compiles(rounded_rows.__name__, rounded_rows.compile_rounded.__name__, processor)


def end_by_a_signal() -> None:
    os.kill(os.getpid(), signal.SIGABRT)


def test_what_ends_the_child_is_replaced_and_the_log_says_so(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    with caplog.at_level(logging.WARNING, trial.__name__):
        assert not compiles(__name__, end_by_a_signal.__name__)
    assert "event=replaced" in caplog.text
    assert end_by_a_signal.__name__ in caplog.text
    monkeypatch.setattr(row_products, "HAS_PAIRS", True)
    for found in (True, False):
        monkeypatch.setattr(row_products, "compiles", lambda *names, found=found: found)
        typed = row_products.multiplies_pairs._defn(None, types.uint16, types.uint16)
        assert typed[1](None, None, None, None).constant == int(found)

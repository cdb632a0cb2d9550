"""Contexts in a real store take no more than admission charges them, so what is let in is refused nothing later."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from cpu.cpu_tier import CpuTier
from scheduler.sequences.capacity import bytes_of_run
from transfer.copies import PASSED
from transfer.host_memory import TAIL_TOKENS
from transfer.host_tier import TierShape
from transfer.reading import Reading
from transfer.slabs import PageSource

SHAPE = TierShape((0, 1), 2, 1, 64, "bfloat16", bits_per_table=10, num_tables=40)
LUMP = 128
BULK = 3 * TAIL_TOKENS  # more than twice a tail: never merged with one


@pytest.fixture
def tier() -> Iterator[CpuTier]:
    opened = CpuTier(SHAPE, torch.float32, 2**30, 1, PageSource(lambda size: np.zeros(size, np.uint8), None, None))
    yield opened
    opened.shutdown()


def deposit(tier: CpuTier, context_id: int, num_tokens: int) -> None:
    for reservation in tier.reserve(context_id, num_tokens):
        tier.fill(reservation, range(len(SHAPE.layers)), PASSED)


def taken_bytes(tier: CpuTier) -> int:
    """Without merges that are not in effect: they go where others need their memory."""
    for context in tier._contexts.values():
        tier._growth.drop_merge(context)
    tier._store.wait_for_doomed()
    return tier.stats().bytes_in_use


@pytest.mark.parametrize("reading", [Reading.SAMPLE, Reading.WHOLE])
@pytest.mark.parametrize("bulk", [200, TAIL_TOKENS - 48, TAIL_TOKENS, BULK])
def test_what_grows_in_lumps_takes_no_more_than_its_charge(tier: CpuTier, bulk: int, reading: Reading) -> None:
    tier.open(1, reading)
    deposit(tier, 1, bulk)
    assert taken_bytes(tier) == bytes_of_run(SHAPE, bulk, 0, reading, is_fork=False)
    for more in range(LUMP, 4 * TAIL_TOKENS, LUMP):
        deposit(tier, 1, LUMP)
        assert taken_bytes(tier) <= bytes_of_run(SHAPE, bulk, more, reading, is_fork=False)


@pytest.mark.parametrize("reading", [Reading.SAMPLE, Reading.WHOLE])
@pytest.mark.parametrize("shared", [BULK, BULK + LUMP, BULK + TAIL_TOKENS - LUMP])
@pytest.mark.parametrize("bulk", [0, 200, TAIL_TOKENS - 48, TAIL_TOKENS, BULK])
def test_a_fork_takes_no_more_than_its_charge(tier: CpuTier, bulk: int, shared: int, reading: Reading) -> None:
    """It shares the front of an open tail, which its source keeps, so it gets a copy of that."""
    tier.open(1, reading)
    deposit(tier, 1, BULK)
    deposit(tier, 1, TAIL_TOKENS - LUMP)
    before = taken_bytes(tier)
    tier.fork(1, 2, shared, reading)
    if bulk:
        deposit(tier, 2, bulk)
    assert taken_bytes(tier) - before <= bytes_of_run(SHAPE, bulk, 0, reading, is_fork=True)
    for more in range(LUMP, 2 * TAIL_TOKENS, LUMP):
        deposit(tier, 2, LUMP)
        assert taken_bytes(tier) - before <= bytes_of_run(SHAPE, bulk, more, reading, is_fork=True)

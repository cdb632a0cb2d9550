"""Contexts in a real store take no more than admission charges them, so what is admitted is refused nothing later."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from cpu.cpu_tier import CpuTier
from gpu.memory.host_shares import resolve_host
from gpu.methods.kept import keep_as_set
from gpu.model.architecture import named_shape
from gpu.profiles import resolve_profiles
from transfer.copies import PASSED
from transfer.host_config import HostConfig
from transfer.host_memory import TAIL_TOKENS, bytes_of_centre, bytes_of_run
from transfer.reading import Reading
from transfer.slabs import PageSource
from transfer.tier_shape import TierShape

SHAPE = TierShape((0, 1), 2, 1, 64, "bfloat16", bits_per_table=10, num_tables=40)
OFFLOAD_BLOCK = 128
BULK = 3 * TAIL_TOKENS  # more than twice a tail: never merged with one


@pytest.fixture
def tier() -> Iterator[CpuTier]:
    opened = CpuTier(SHAPE, torch.float32, 2**30, 1, PageSource(lambda size: np.zeros(size, np.uint8), None, None))
    yield opened
    opened.shutdown()


def offload(tier: CpuTier, context_id: int, num_tokens: int, shape: TierShape = SHAPE) -> None:
    for reservation in tier.reserve(context_id, num_tokens):
        tier.fill(reservation, range(len(shape.layers)), PASSED)


def taken_bytes(tier: CpuTier) -> int:
    """Without merges that are not in effect: they go where others need their memory."""
    for context in tier._contexts.values():
        tier._growth.drop_merge(context)
    tier._store.wait_for_doomed()
    return tier.stats().bytes_in_use


@pytest.mark.parametrize("reading", [Reading.SAMPLE, Reading.WHOLE])
@pytest.mark.parametrize("bulk", [200, TAIL_TOKENS - 48, TAIL_TOKENS, BULK])
def test_what_grows_in_offload_blocks_takes_no_more_than_its_charge(tier: CpuTier, bulk: int, reading: Reading) -> None:
    tier.open(1, reading)
    offload(tier, 1, bulk)
    assert taken_bytes(tier) == bytes_of_run(SHAPE, bulk, 0, reading, is_fork=False)
    for more in range(OFFLOAD_BLOCK, 4 * TAIL_TOKENS, OFFLOAD_BLOCK):
        offload(tier, 1, OFFLOAD_BLOCK)
        assert taken_bytes(tier) <= bytes_of_run(SHAPE, bulk, more, reading, is_fork=False)


@pytest.mark.parametrize("reading", [Reading.SAMPLE, Reading.WHOLE])
@pytest.mark.parametrize("shared", [BULK, BULK + OFFLOAD_BLOCK, BULK + TAIL_TOKENS - OFFLOAD_BLOCK])
@pytest.mark.parametrize("bulk", [0, 200, TAIL_TOKENS - 48, TAIL_TOKENS, BULK])
def test_a_fork_takes_no_more_than_its_charge(tier: CpuTier, bulk: int, shared: int, reading: Reading) -> None:
    """It shares the front of an open tail, which its source keeps, so it gets a copy of that."""
    tier.open(1, reading)
    offload(tier, 1, BULK)
    offload(tier, 1, TAIL_TOKENS - OFFLOAD_BLOCK)
    before = taken_bytes(tier)
    tier.fork(1, 2, shared, reading)
    if bulk:
        offload(tier, 2, bulk)
    assert taken_bytes(tier) - before <= bytes_of_run(SHAPE, bulk, 0, reading, is_fork=True)
    for more in range(OFFLOAD_BLOCK, 2 * TAIL_TOKENS, OFFLOAD_BLOCK):
        offload(tier, 2, OFFLOAD_BLOCK)
        assert taken_bytes(tier) - before <= bytes_of_run(SHAPE, bulk, more, reading, is_fork=True)


def test_every_deployment_with_host_memory_has_a_profile_with_tables() -> None:
    """So plans count them for any context."""
    assert any(profile.reading.has_tables for profile in resolve_profiles({}, HostConfig()).values())


@pytest.mark.parametrize("context", [3000, 9000])
def test_the_plan_has_room_for_its_longest_context_and_the_offload_blocks_behind_it(context: int) -> None:
    """As it is offloaded whole and then goes on in a fork."""
    shape, host = named_shape("tiny"), HostConfig(resident_tokens=256)
    demand = resolve_host(host, keep_as_set(host, shape), shape, 16, 4, 2)
    source = PageSource(lambda size: np.zeros(size, np.uint8), None, None)
    stated = demand.host_context_bytes(context)
    tier = CpuTier(demand.tier_shape, torch.float32, stated, 1, source)
    try:
        tier.open(1, Reading.SAMPLE)
        num_tokens = demand.offloaded_tokens(context)
        offload(tier, 1, num_tokens, demand.tier_shape)
        offload(tier, 1, OFFLOAD_BLOCK, demand.tier_shape)
        tier.fork(1, 2, num_tokens + OFFLOAD_BLOCK // 2, Reading.SAMPLE)
        offload(tier, 2, OFFLOAD_BLOCK, demand.tier_shape)
        assert stated - taken_bytes(tier) == 2 * bytes_of_centre(demand.tier_shape), (
            "tails go on with the bulk's centre"
        )
    finally:
        tier.shutdown()

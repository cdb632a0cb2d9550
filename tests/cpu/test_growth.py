"""Reservations: how contexts are cut into segments, what they take, when sampling begins, and what failing leaves."""

import random
import threading
import time

import numpy as np
import pytest
import torch

import cpu.segment_jobs
import cpu.segment_store
from cpu.segment_jobs import copy_layer
from cpu.tables import build_tables
from tests.cpu.test_tier import assert_dense
from tests.cpu.tier_model import LAYERS, Device, new_tier, poisoned_pages, tier_shape
from transfer.host_memory import (
    TAIL_TOKENS,
    bytes_of_context,
    bytes_of_segment,
    lay_out_layer,
    shape_for,
    slab_bytes,
    without_tables,
)
from transfer.host_tier import ContextRead, HostMemoryError
from transfer.reading import Reading
from transfer.slabs import PageSource

OFFLOAD_BLOCK = 128
SELECTIVE = tier_shape(bits=5, tables=20)  # samples about a tenth of the keys


@pytest.fixture
def make_tier():
    tiers = []

    def make(*arguments, **named):
        tiers.append(new_tier(*arguments, **named))
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.shutdown()
        assert tier.stats().bytes_held == 0


def rows_read(device, context_id):
    before = device.tier.stats().attention.rows_read
    device.attend([context_id])
    return device.tier.stats().attention.rows_read - before


@pytest.mark.parametrize(("rows", "row_bytes"), [("bfloat16", 2), ("int8", 1), ("int4", 0.75)])  # of 64 dimensions
def test_the_tier_counts_keys_by_head_and_bytes_by_row(make_tier, rows, row_bytes):
    """What is read exactly: each key by all heads, each row once for the heads of a group, and no index."""
    tier = make_tier(tier_shape(rows))
    with Device(tier, 0) as device:
        device.open(1, Reading.WHOLE, 700)
        device.attend([1])
    counts, shape = tier.stats().attention, tier.shape
    assert counts.keys_scored == counts.tokens_covered == 700 * LAYERS * shape.num_heads
    assert counts.rows_read == 700 * LAYERS * shape.num_kv_heads
    assert counts.bytes_read == counts.rows_read * 2 * shape.dim * row_bytes


def test_the_bytes_of_a_lookup_are_counted_with_the_rows_that_it_finds(make_tier):
    """Each head looks at a bucket of every table: its two borders at least, and an entry for each key that is found."""
    tier = make_tier(SELECTIVE)
    with Device(tier, 0) as device:
        device.open(1, Reading.SAMPLE, 3000)
        device.attend([1])
    counts, shape = tier.stats().attention, tier.shape
    index_bytes = counts.bytes_read - counts.rows_read * 2 * shape.dim * 2
    assert 0 < counts.keys_scored == counts.rows_read < counts.tokens_covered
    assert index_bytes >= LAYERS * shape.num_heads * shape.num_tables * 8 + 2 * 2 * counts.keys_scored


@pytest.mark.parametrize("reading", [Reading.SAMPLE, Reading.WHOLE])
@pytest.mark.parametrize("tokens", [1, TAIL_TOKENS - 1, TAIL_TOKENS, 5000, 65_536, 65_537, 131_071])
def test_a_reservation_takes_what_was_promised(make_tier, tokens, reading):
    tier = make_tier(tier_shape(bits=3, tables=3))
    tier.open(1, reading)
    reservations = tier.reserve(1, tokens)
    shape = shape_for(tier.shape, reading)
    assert tier.stats().bytes_in_use == bytes_of_context(shape, tokens)
    assert [one.begin for one in reservations] == [0, *(one.end for one in reservations[:-1])]
    assert reservations[-1].end == tokens
    assert not any(one.has_centre for one in reservations)


def test_small_reservations_share_a_tail_and_its_centre(make_tier):
    tier = make_tier(tier_shape())
    with Device(tier, 0) as device:
        device.open(1, Reading.SAMPLE, 3000)
        in_use = tier.stats().bytes_in_use
        tail = tier.reserve(1, 1500)
        grown = tier.stats().bytes_in_use
        assert grown - in_use == bytes_of_segment(tier.shape, TAIL_TOKENS)
        rest = tier.reserve(1, 500)
        assert tier.stats().bytes_in_use == grown
        parts = tier.reserve(1, 100)
        assert [one.has_centre for one in (*tail, *rest, *parts)] == [True] * 4
        assert [(one.begin, one.end) for one in parts] == [(5000, 5048), (5048, 5100)]
        assert torch.equal(tail[0].layer(0).centre, parts[1].layer(0).centre)


def test_a_full_tail_is_sampled_from_the_next_reservation_on(make_tier):
    tier = make_tier(SELECTIVE)
    with Device(tier, 0) as device:
        device.open(1, Reading.SAMPLE)
        for _ in range(TAIL_TOKENS // OFFLOAD_BLOCK):
            device.offload(1, OFFLOAD_BLOCK)
        assert rows_read(device, 1) == TAIL_TOKENS * LAYERS, "a row is read once for the heads of a group"
        device.offload(1, OFFLOAD_BLOCK)
        assert OFFLOAD_BLOCK * LAYERS < rows_read(device, 1) < TAIL_TOKENS * LAYERS


def test_an_open_tail_is_sealed_by_a_reservation_that_needs_segments_of_its_own(make_tier):
    tier = make_tier(SELECTIVE)
    with Device(tier, 0) as device:
        device.open(1, Reading.SAMPLE, 1500)
        device.fork(1, 2, 1200, Reading.SAMPLE)
        for context_id in (1, 2):
            device.offload(context_id, 2100)
            assert rows_read(device, context_id) < 1200 * LAYERS
        device.fork(1, 3, 3600, Reading.WHOLE)
        assert_dense(device, [3])


def test_an_offloaded_context_reads_every_row_and_has_no_tables(make_tier):
    tier = make_tier(SELECTIVE)
    with Device(tier, 0) as device:
        device.open(1, Reading.WHOLE, 4000)
        assert tier.stats().bytes_in_use == bytes_of_context(without_tables(tier.shape), 4000)
        assert_dense(device, [1])
        device.open(2, Reading.SAMPLE, 4000)
        device.fork(2, 3, 3000, Reading.WHOLE)
        assert_dense(device, [1, 3])


def test_small_segments_are_merged_and_other_holders_keep_theirs(make_tier):
    tier = make_tier(tier_shape())
    with Device(tier, 0) as device:
        device.open(1, Reading.SAMPLE)
        for turn in range(6 * TAIL_TOKENS // OFFLOAD_BLOCK):
            device.offload(1, OFFLOAD_BLOCK)
            if turn == 4 * TAIL_TOKENS // OFFLOAD_BLOCK:
                device.fork(1, 2, device.tokens(1), Reading.SAMPLE)
            assert_dense(device, [1])
        assert tier.stats().merges >= 2
        assert_dense(device, [1, 2])
        device.close(2)
        tier._store.wait_for_doomed()
        assert tier.stats().segments <= 4


def grow_until_a_merge_is_due(device):
    """By offload blocks whose tables stand before the next one comes."""
    device.open(1, Reading.SAMPLE)
    (context,) = device.tier._contexts.values()
    while context.merge is None or context.tokens < context.merge.due_tokens:
        device.offload(1, OFFLOAD_BLOCK)
        assert_dense(device, [1])
    return context


@pytest.fixture
def copies_go_on(monkeypatch):
    """No merge is copied until this is set."""
    event = threading.Event()

    def copy_late(*arguments):
        while not event.wait(0.01):
            yield
        yield from copy_layer(*arguments)

    monkeypatch.setattr(cpu.segment_store, "copy_layer", copy_late)
    return event


def settle(tier, tokens):
    with tier._store.changed:
        assert tier._store.changed.wait_for(lambda: tier.is_ready(ContextRead(1, tokens)), 20)


def test_with_fixed_residence_a_merge_takes_effect_when_due_and_its_readers_wait(make_tier, copies_go_on):
    tier = make_tier(tier_shape())
    with Device(tier, 0) as device:
        context = grow_until_a_merge_is_due(device)
        runs = tier.runs(1)
        device.offload(1, OFFLOAD_BLOCK)  # and here nobody waits
        assert tier.stats().merges == 1
        assert len(tier.runs(1)) < len(runs)
        assert not tier.is_ready(ContextRead(1, context.tokens))
        copies_go_on.set()
        settle(tier, context.tokens)
        assert_dense(device, [1])


def test_with_adaptive_residence_pieces_are_read_until_their_merge_stands(make_tier, copies_go_on):
    tier = make_tier(tier_shape(), is_adaptive=True)
    with Device(tier, 0) as device:
        context = grow_until_a_merge_is_due(device)
        target = context.merge.target
        device.offload(1, OFFLOAD_BLOCK)
        assert tier.stats().merges == 0
        settle(tier, context.tokens)  # without the merge, whose copies are held up
        assert_dense(device, [1])
        copies_go_on.set()
        with tier._store.changed:
            assert tier._store.changed.wait_for(lambda: tier._growth._stands(target), 20)
        device.offload(1, OFFLOAD_BLOCK)
        assert tier.stats().merges == 1
        assert_dense(device, [1])


def test_with_adaptive_residence_no_merge_begins_of_what_nobody_reads_and_is_being_built(make_tier):
    tier = make_tier(tier_shape(), is_adaptive=True)
    with Device(tier, 0) as device:
        device.open(1, Reading.SAMPLE)
        tier._builder.pause()
        for _ in range(2 * TAIL_TOKENS // OFFLOAD_BLOCK + 2):
            device.offload(1, OFFLOAD_BLOCK)
        (context,) = tier._contexts.values()
        assert context.find_merge() is not None
        assert context.merge is None
        tier._builder.go_on()
        settle(tier, context.tokens)
        device.offload(1, OFFLOAD_BLOCK)
        assert context.merge is not None
        assert_dense(device, [1])


def test_a_lone_heir_of_a_closed_context_goes_on_in_its_tail(make_tier):
    tier = make_tier(tier_shape())
    with Device(tier, 0) as device:
        device.open(1, Reading.SAMPLE, 1000)
        device.fork(1, 2, 1000, Reading.SAMPLE)
        in_use = tier.stats().bytes_in_use
        device.close(1)
        device.offload(2, 500)
        assert tier.stats().bytes_in_use == in_use
        assert_dense(device, [2])


def test_rows_come_back_as_they_were_stored(make_tier):
    tier = make_tier(tier_shape("int8"))
    with Device(tier, 0) as device:
        device.open(1, Reading.SAMPLE, 2500, 700)
        for layer in range(LAYERS):
            parts = tier.rows(1, layer, 3000)
            keys = [
                rows.keys.double() * rows.key_scale.double()[:, None, None] + rows.centre.double()[:, None]
                for rows in parts
            ]
            values = [rows.values.double() * rows.value_scale.double()[:, None] for rows in parts]
            assert all(rows.codes is None for rows in parts)
            assert np.array_equal(torch.cat(keys, 1).numpy(), device.keys[1][layer][:, :3000])
            assert np.array_equal(torch.cat(values, 1).numpy(), device.values[1][layer][:, :3000])


def test_a_reservation_that_fails_changes_nothing(make_tier):
    shape = tier_shape()
    tier = make_tier(shape, bytes_of_context(shape, 3000) + bytes_of_context(shape, 100))
    with Device(tier, 0) as device:
        device.open(1, Reading.SAMPLE, 3000)
        out, lse, _ = device.attend([1])
        before = tier.stats()
        with pytest.raises(HostMemoryError, match=r"asked .* in use; raise host.memory_limit_gib"):
            tier.reserve(1, 4000)
        after = tier.stats()
        assert (after.bytes_in_use, after.tokens, after.segments) == (before.bytes_in_use, 3000, before.segments)
        again, lse_again, _ = device.attend([1])
        assert np.array_equal(out, again)
        assert np.array_equal(lse, lse_again)
        device.offload(1, 100)
        assert_dense(device, [1])


def test_memory_that_is_closing_is_waited_for_before_a_reservation_fails(make_tier):
    shape = tier_shape()
    tier = make_tier(shape, bytes_of_context(shape, 3000))
    with Device(tier, 0) as device:
        for context_id in range(5):
            device.open(context_id, Reading.SAMPLE, 3000)
            device.close(context_id)


def test_a_host_that_refuses_to_pin_is_told_of_and_the_rest_goes_on(make_tier):
    refuses = []

    def pin(pages):
        if refuses:
            raise OSError(12, "cudaHostRegister failed with CUDA error 2")

    tier = make_tier(tier_shape(), source=PageSource(poisoned_pages, pin, lambda pages: None))
    with Device(tier, 0) as device:
        device.open(1, Reading.SAMPLE, 3000)
        refuses.append(True)
        device.open(2, Reading.SAMPLE)
        with pytest.raises(HostMemoryError, match=r"cudaHostRegister failed .*ulimit -l"):
            device.offload(2, 4000)
        device.close(2)
        tier._store.wait_for_doomed()
        assert tier.stats().bytes_in_use == bytes_of_context(tier.shape, 3000)
        assert_dense(device, [1])
        refuses.clear()
        device.open(3, Reading.SAMPLE, 4000)
        assert_dense(device, [1, 3])


def test_a_host_that_refuses_room_for_a_copied_tail_leaves_the_fork_as_it_was(make_tier):
    refused_bytes = []

    def pin(pages):
        if pages.nbytes in refused_bytes:
            raise OSError(12, "cudaHostRegister failed with CUDA error 2")

    tier = make_tier(tier_shape(), source=PageSource(poisoned_pages, pin, lambda pages: None))
    with Device(tier, 0) as device:
        device.open(1, Reading.SAMPLE, 6000, 1000)
        device.fork(1, 2, 6600, Reading.SAMPLE)
        before = tier.stats()
        refused_bytes.append(slab_bytes(lay_out_layer(tier.shape, 600).num_bytes))
        with pytest.raises(HostMemoryError, match="it refused"):
            device.offload(2, 6000)  # its own segment is granted, the copy of the tail's 600 tokens is not
        tier._store.wait_for_doomed()
        after = tier.stats()
        assert (after.bytes_in_use, after.tokens) == (before.bytes_in_use, before.tokens)
        assert_dense(device, [1, 2])


def test_a_failed_build_leaves_its_layer_exact_and_is_counted(make_tier, monkeypatch, caplog):
    calls = []

    def fail_once(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise RuntimeError("no tables today")
        build_tables(*arguments)

    monkeypatch.setattr(cpu.segment_jobs, "build_tables", fail_once)
    tier = make_tier(SELECTIVE)
    with Device(tier, 0) as device:
        device.open(1, Reading.SAMPLE, 3000)
        out, _, queries = device.attend([1])
        wanted, _ = device.expect([1], queries)
        assert np.allclose(out[0], wanted[0], atol=1e-4)
        assert not np.allclose(out[1], wanted[1], atol=1e-4)
        assert (tier.stats().tables_failed, tier.stats().tables_built) == (1, LAYERS - 1)
        assert "background_job_failed" in caplog.text
        for _ in range(40):
            device.offload(1, OFFLOAD_BLOCK)
        device.attend([1])


def test_attention_waits_for_rows_on_their_way_and_nothing_else_does(make_tier):
    tier = make_tier(tier_shape())
    with Device(tier, 0) as device:
        device.open(1, Reading.SAMPLE)
        lates = device.offload_late(1, 3000)
        began = time.monotonic()
        timer = threading.Timer(0.3, lambda: [late.arrive() for late in lates])
        timer.start()
        later = device.offload_late(1, 100)
        for late in later:
            late.arrive()
        assert time.monotonic() - began < 0.3, "a reservation waits for no rows"
        assert_dense(device, [1])
        assert time.monotonic() - began >= 0.3


def test_memory_of_a_closed_context_stays_until_its_rows_have_landed(make_tier):
    tier = make_tier(tier_shape())
    with Device(tier, 0) as device:
        device.open(1, Reading.SAMPLE)
        lates = device.offload_late(1, 3000)
        device.close(1)
        assert tier.stats().bytes_in_use == bytes_of_context(tier.shape, 3000)
        for late in lates:
            late.arrive()
        tier._store.wait_for_doomed()
        assert tier.stats().bytes_in_use == 0


def test_a_copy_that_fails_is_raised_where_its_rows_are_read(make_tier):
    class Broken:
        def synchronize(self):
            raise RuntimeError("the device is gone")

    tier = make_tier(tier_shape())
    with Device(tier, 0) as device:
        device.open(1, Reading.SAMPLE)
        device.offload_late(1, 3000, Broken())
        with pytest.raises(RuntimeError, match="the device is gone"):
            device.attend([1])


def script(tier):
    """The same calls each time, with forks, merges and closes among them; all answers on the way."""
    answers = []
    with Device(tier, 3) as device:
        device.open(1, Reading.SAMPLE, 2600)
        for turn in range(5 * TAIL_TOKENS // OFFLOAD_BLOCK):
            device.offload(1, OFFLOAD_BLOCK)
            if turn % 20 == 7:
                device.fork(1, 100 + turn, device.tokens(1) - 33, Reading.SAMPLE)
                device.offload(100 + turn, 400 if turn % 40 == 7 else 2300)
            if turn == 50:
                device.close(107)
            answers += device.attend(list(device.keys)[-3:])[:2]
    return answers


def test_answers_do_not_depend_on_when_tables_are_built(make_tier, monkeypatch):
    wanted = script(make_tier(SELECTIVE))
    assert make_tier(SELECTIVE).stats().merges == 0
    for seed in range(2):
        delays = random.Random(seed)

        def build_late(*arguments, delays=delays):
            time.sleep(delays.choice([0, 0, 0, 0.002, 0.01]))
            build_tables(*arguments)

        monkeypatch.setattr(cpu.segment_jobs, "build_tables", build_late)
        tier = make_tier(SELECTIVE)
        got = script(tier)
        assert tier.stats().merges > 0, "the script merges"
        assert all(np.array_equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_memory_for_the_next_tail_of_every_context_is_there_before_it_is_due(make_tier):
    """Several are written in bulk before the first of them appends; who appends waits for no memory."""
    made = []

    def count_pages(num_bytes):
        made.append(num_bytes)
        return poisoned_pages(num_bytes)

    tier = make_tier(SELECTIVE, source=PageSource(count_pages, None, None))
    tail_bytes = slab_bytes(lay_out_layer(SELECTIVE, TAIL_TOKENS).num_bytes)
    with Device(tier, 0) as device:
        for context_id, reading in ((3, Reading.WHOLE), (1, Reading.SAMPLE), (2, Reading.SAMPLE)):
            device.open(context_id, reading, 3 * TAIL_TOKENS)
        await_idle(tier)
        assert made.count(tail_bytes) == 2 * LAYERS
        for context_id in (1, 2, 3):
            device.offload(context_id, OFFLOAD_BLOCK)
        await_idle(tier)
        assert made.count(tail_bytes) == 2 * LAYERS, "it was there"


def test_contexts_that_are_kept_have_little_memory_ready(make_tier, monkeypatch):
    monkeypatch.setattr("cpu.growth.MOST_PREPARED", 2)
    tier = make_tier(SELECTIVE)
    with Device(tier, 0) as device:
        for context_id in range(4):
            device.open(context_id, Reading.SAMPLE, 3 * TAIL_TOKENS)
        await_idle(tier)
        stats = tier.stats()
        assert stats.bytes_held - stats.bytes_in_use == 2 * bytes_of_segment(SELECTIVE, TAIL_TOKENS)


def await_idle(tier):
    """Until all memory that was asked for is there."""
    tier._pool._threads.submit(int).result()

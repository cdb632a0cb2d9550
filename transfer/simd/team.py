"""Take threads through the stages of one parallel region together: claims of work, and the wait at a stage's end.

Items of a stage are divided into even, contiguous runs, one for each thread, so that memory is read in order; threads
that are done help the others. A stage ends when all its *items* are done, however many threads have joined. The first
thread alone would finish it, so a thread whose start the system delays or denies cannot block the region. A waiting
thread spins for some microseconds and then yields its core at each look, so that a busy machine does not stall.
"""

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from transfer.simd.inner import inner
from transfer.simd.vectors import address_of

COUNTER_INT64 = 8  # a counter has a cache line to itself
SPINS = 400  # looks before a thread yields its core at each: some 20 microseconds

_I32, _I64 = ir.IntType(32), ir.IntType(64)


class Team(NamedTuple):
    """The counters of a region, as thread `me` sees them. counters: int64 `[stages, threads + 1, COUNTER_INT64]`, zero
    at a region's start; the last one of a stage counts items that are done.
    """

    counters: np.ndarray
    me: int
    threads: int


def new_counters(stages: int, threads: int) -> np.ndarray:
    return np.zeros((stages, threads + 1, COUNTER_INT64), np.int64)


@intrinsic
def atomic_add(typing_context, address, value):
    """Add to the int64 at `address`, and return its previous value."""

    def emit(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], _I64.as_pointer())
        return builder.atomic_rmw("add", pointer, arguments[1], "acq_rel")

    return types.int64(types.int64, types.int64), emit


@intrinsic
def atomic_load(typing_context, address):
    """Load the int64 at `address` anew each time."""

    def emit(context, builder, signature, arguments):
        return builder.load_atomic(builder.inttoptr(arguments[0], _I64.as_pointer()), "acquire", 8, typ=_I64)

    return types.int64(types.int64), emit


@intrinsic
def now_ns(typing_context):
    """Return nanoseconds of the monotonic clock."""
    time_type, monotonic = ir.ArrayType(_I64, 2), 1

    def emit(context, builder, signature, arguments):
        time = cgutils.alloca_once(builder, time_type)
        function_type = ir.FunctionType(_I32, [_I32, time.type])
        clock = cgutils.get_or_insert_function(builder.module, function_type, "clock_gettime")
        builder.call(clock, [ir.Constant(_I32, monotonic), time])
        seconds, nanoseconds = (builder.extract_value(builder.load(time), index) for index in (0, 1))
        return builder.add(builder.mul(seconds, ir.Constant(_I64, 10**9)), nanoseconds)

    return types.int64(), emit


@intrinsic
def pause(typing_context):
    """Pause between two looks of a spinning thread."""

    def emit(context, builder, signature, arguments):
        function_type = ir.FunctionType(ir.VoidType(), [])
        builder.call(cgutils.get_or_insert_function(builder.module, function_type, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic
def _yield_core(typing_context):
    def emit(context, builder, signature, arguments):
        builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(_I32, []), "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), emit


@inner
def spin_or_yield(looks):
    """Wait a little after `looks` looks in vain: first spin, later yield the core. Return `looks + 1`."""
    if looks < SPINS:
        pause()
    else:
        _yield_core()
    return looks + 1


@inner
def _counter(team, stage, index):
    return address_of(team.counters) + 8 * COUNTER_INT64 * (stage * (team.threads + 1) + index)


@inner
def _claim_of(team, stage, items, owner):
    """Claim the next item of a thread's run; -1 if none is left."""
    begin, end = items * owner // team.threads, items * (owner + 1) // team.threads
    counter = _counter(team, stage, owner)
    if begin + atomic_load(counter) < end:
        item = begin + atomic_add(counter, 1)
        if item < end:
            return item
    return -1


@inner
def claim(team, stage, items):
    """Claim the next item of `[0, items)` for this thread; -1 if all are claimed."""
    for turn in range(team.threads):
        item = _claim_of(team, stage, items, (team.me + turn) % team.threads)
        if item >= 0:
            return item
    return -1


@inner
def claim_own(team, stage, items):
    """Claim the next item as `claim` does, but from this thread's own run alone."""
    return _claim_of(team, stage, items, team.me)


@inner
def end_stage(team, stage, items, done):
    """Report `done` items and wait until all are done. Return whether these were the last; True for one thread."""
    counter = _counter(team, stage, team.threads)
    is_last = done > 0 and atomic_add(counter, done) + done == items
    looks = 0
    while atomic_load(counter) < items:
        looks = spin_or_yield(looks)
    return is_last

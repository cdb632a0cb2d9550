"""Run one parallel region: a compiled function on so many threads at once, each given its number.

`Region` takes any arguments, and some tenths of a millisecond of Python per start; `start` takes one address, and a few
microseconds. Code in numba's cache on disk belongs to the sources and the vector width that it was made from: `version`
stands for both. The first of its threads always comes; the others may not.
"""

from functools import cache
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.types.function_type import CompileResultWAP
from numba.extending import intrinsic

from transfer.simd.features import SIMD
from transfer.simd.threads import start_threads

start_threads()


@cache
def version(*modules: ModuleType) -> int:
    """Return a number that stands for the vectors and for the sources of modules, which numba's cache does not look at.

    Files are read once a process: the code that was imported is of the sources as they were.
    """
    text = b"".join(Path(str(module.__file__)).read_bytes() for module in modules)
    return int.from_bytes(sha256(text + SIMD.encode()).digest()[:4])


class Region:
    """A numba function `work(me, threads, *arguments)` for the types of given arguments; compiled here, or cached.

    The parallel region calls it by its address: numba would optimise a function that is linked into a region thrice.
    """

    def __init__(self, work: Any, together: Any, *arguments: object) -> None:
        """`together(work, threads, *arguments)`: the region, a loop over `numba.prange(threads)` that calls the work;
        numba takes apart tuples of arrays in it, but not tuples of tuples, so each work has its own.
        `arguments`: like those of the runs to come.
        """
        signature = (types.int64, types.int64, *(numba.typeof(argument) for argument in arguments))
        work.compile(signature)
        self._alone, self._together = work, together
        self._work = CompileResultWAP(work.overloads[signature])

    def run(self, threads: int, *arguments: object) -> None:
        """Run it once, on so many threads of numba's; one of them is the caller's."""
        if threads == 1:
            self._alone(0, 1, *arguments)
            return
        with_threads = numba.get_num_threads()
        numba.set_num_threads(threads)
        self._together(self._work, threads, *arguments)
        numba.set_num_threads(with_threads)


def _emit_call(lowering: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    function, *others = arguments
    kind = ir.FunctionType(ir.VoidType(), [other.type for other in others])
    builder.call(builder.inttoptr(function, kind.as_pointer()), others)
    return lowering.get_dummy_value()


@intrinsic
def _call(typing_context, function, me, threads, context):
    """Call the function at an address."""
    return types.void(*[types.int64] * 4), _emit_call


@intrinsic
def call_rows(typing_context, function, matrix, row, x, x_stride, tokens, out, out_stride, scratch):
    """Call the function at an address: work on some rows of a matrix, described by int64 alone."""
    return types.void(*[types.int64] * 9), _emit_call


@intrinsic
def pointer_to(typing_context, address):
    """Return an address as `numba.carray` takes it."""

    def emit(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), emit


@intrinsic
def _set_threads(typing_context, threads):
    """Let numba's regions have so many threads, from 1 to NUMBA_NUM_THREADS; returns how many they had.

    As `numba.set_num_threads`, which takes locks between processes, and whose callers numba does not cache.
    """

    def emit(context, builder, signature, arguments):
        kinds = {
            "get_num_threads": ir.FunctionType(ir.IntType(64), []),
            "set_num_threads": ir.FunctionType(ir.VoidType(), [ir.IntType(32)]),
        }
        read, write = (cgutils.get_or_insert_function(builder.module, kind, name) for name, kind in kinds.items())
        before = builder.call(read, [])
        builder.call(write, [builder.trunc(arguments[0], ir.IntType(32))])
        return before

    return types.int64(types.int64), emit


@numba.njit("void(int64, int64, int64)", nogil=True, cache=True, parallel=True)
def start(work, threads, context):
    """Run `void work(int64 me, int64 threads, int64 context)`, the address of a C function, on so many threads.

    An exception in it is lost. Without the GIL.
    """
    if threads == 1:
        _call(work, 0, 1, context)
        return
    with_threads = _set_threads(threads)
    for me in numba.prange(threads):
        _call(work, np.int64(me), threads, context)
    _set_threads(with_threads)

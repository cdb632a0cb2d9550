"""Run a parallel region: a compiled function on several threads at once, each of which is given its number.

`Region` takes any arguments, and each start costs some tenths of a millisecond of Python. `start` takes one address,
and costs a few microseconds. Code in numba's cache on disk depends on its sources and on the vector width; `version`
is a digest of both. The first thread always joins the region; the others may not.
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
    """Return a digest of the vector width and of modules' sources, which numba's cache does not check.

    Files are read once in a process, because the imported code is that of the sources at that time.
    """
    text = b"".join(Path(str(module.__file__)).read_bytes() for module in modules)
    return int.from_bytes(sha256(text + SIMD.encode()).digest()[:4])


class Region:
    """A numba function `work(me, threads, *arguments)` for the types of given arguments; compiled here, or cached.

    The parallel region calls it by its address. If it were linked into the region, numba would optimise it thrice.
    """

    def __init__(self, work: Any, together: Any, *arguments: object) -> None:
        """together: the region `together(work, threads, *arguments)`, a loop over `numba.prange(threads)` that calls
        the work. In it numba can unpack tuples of arrays, but not tuples of tuples, so each work has its own.
        arguments: examples with the types of later runs.
        """
        signature = (types.int64, types.int64, *(numba.typeof(argument) for argument in arguments))
        work.compile(signature)
        self._alone, self._together = work, together
        self._work = CompileResultWAP(work.overloads[signature])

    def run(self, threads: int, *arguments: object) -> None:
        """Run the work once, on `threads` threads of numba, one of which is the caller's."""
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
    """Call the function at an address, which works on some rows of a matrix and takes int64 alone."""
    return types.void(*[types.int64] * 9), _emit_call


@intrinsic
def pointer_to(typing_context, address):
    """Return an address as a pointer for `numba.carray`."""

    def emit(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), emit


@intrinsic
def _set_threads(typing_context, threads):
    """Set the number of threads of numba's regions, from 1 to NUMBA_NUM_THREADS. Return the previous number.

    It replaces `numba.set_num_threads`, which takes locks between processes, and whose callers numba does not cache.
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
    """Run the C function `void work(int64 me, int64 threads, int64 context)` at address `work` on `threads` threads,
    without the GIL. An exception in it is lost.
    """
    if threads == 1:
        _call(work, 0, 1, context)
        return
    with_threads = _set_threads(threads)
    for me in numba.prange(threads):
        _call(work, np.int64(me), threads, context)
    _set_threads(with_threads)

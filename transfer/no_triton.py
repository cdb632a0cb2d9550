"""Keep Triton out of a process that computes on the CPU alone, where it would only take 75 MB of memory.

A stand-in takes its place. Modules declare their kernels with it as with Triton, and none is launched.
"""

import os
import sys
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from types import SimpleNamespace
from typing import Any

import torch

_INTERPRETER = "TRITON_INTERPRET"


def leave_out_triton() -> None:
    """Put the stand-in where `import triton` finds it, if torch was built without GPUs, Triton's interpreter is not
    asked for, and Triton is not imported yet. Call it in a process's first lines.
    """
    has_gpus = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
    if has_gpus or os.environ.get(_INTERPRETER) or "triton" in sys.modules:
        return
    triton, language = (module_from_spec(ModuleSpec(name, None)) for name in ("triton", "triton.language"))
    knobs = SimpleNamespace(runtime=SimpleNamespace(interpret=False))
    for module in (triton, language):
        vars(module).update(__getattr__=partial(_refuse, module.__name__))
    vars(language).update(constexpr=Constant)
    vars(triton).update(language=language, jit=jit, cdiv=cdiv, next_power_of_2=next_power_of_2, knobs=knobs)
    sys.modules |= {"triton": triton, "triton.language": language}


def _refuse(module: str, name: str) -> None:
    raise AttributeError(f"{module}.{name}: Triton is left out of a process whose torch was built without GPUs; "
                         f"set {_INTERPRETER}=1 to have it")  # fmt: skip


class Constant:
    """A constant of kernels, as `tl.constexpr`, which annotates parameters as well."""

    def __init__(self, value: object) -> None:
        self.value = value


class UnlaunchedKernel:
    """A kernel's declaration in place of `triton.jit`'s. Launching it raises RuntimeError."""

    def __init__(self, function: Any) -> None:
        self.__name__ = function.__name__

    def __getitem__(self, grid: object) -> None:
        raise RuntimeError(f"{self.__name__}: a kernel of Triton, in a process whose torch was built without GPUs; "
                           f"install EXTRA=cuda, or set {_INTERPRETER}=1")  # fmt: skip


def jit(function: Any = None, **options: object) -> Any:
    """Declare a kernel, as `@triton.jit` or `@triton.jit(...)`."""
    return jit if function is None else UnlaunchedKernel(function)


def cdiv(x: int, y: int) -> int:
    """Divide, rounding up."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """Return the least power of two that is at least n, and 0 for 0."""
    return 1 << (n - 1).bit_length() if n else 0

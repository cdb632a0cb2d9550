"""Describe a tensor in its file: where its bytes are, row after row, and how they are changed before being placed."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor in its file.

    name: its name in a checkpoint.
    dtype: the file format's name of its dtype.
    shape: in numbers.
    offset: in the file.
    change: turns the whole tensor into what is placed, a tensor or a GGUF file's Blocks; None: it is placed unchanged.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    change: Callable[[Tensor], Any] | None = None

    @property
    def stored_dtype(self) -> torch.dtype:
        """Return the dtype of the numbers; uint8 if they are in blocks."""
        return DTYPES.get(self.dtype, torch.uint8)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Return the shape of the stored elements: `[rows, bytes]` if numbers are in blocks."""
        return self.shape if self.dtype in DTYPES else (self.shape[0], self.num_bytes // self.shape[0])

    def rows(self, begin: int, end: int) -> "FileTensor":
        """Return rows `[begin, end)` alone."""
        row_bytes = self.num_bytes // self.shape[0]
        return replace(
            self, shape=(end - begin, *self.shape[1:]), offset=self.offset + begin * row_bytes,
            num_bytes=(end - begin) * row_bytes,
        )  # fmt: skip

"""A tensor in its file: where its bytes lie, row after row, and what they become before they are placed."""

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

    name: a checkpoint's.
    dtype: by the name that the format has for it.
    shape: of numbers.
    offset: in the file.
    change: makes of it, whole, what is placed, a tensor or a GGUF file's Blocks; None: it is placed as it is.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    change: Callable[[Tensor], Any] | None = None

    @property
    def stored_dtype(self) -> torch.dtype:
        """Return the dtype of numbers; bytes, where these stand in blocks."""
        return DTYPES.get(self.dtype, torch.uint8)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Return the shape as its bytes lie: `[rows, bytes]` where numbers stand in blocks."""
        return self.shape if self.dtype in DTYPES else (self.shape[0], self.num_bytes // self.shape[0])

    def rows(self, begin: int, end: int) -> "FileTensor":
        """Return rows `[begin, end)` alone."""
        row_bytes = self.num_bytes // self.shape[0]
        return replace(
            self, shape=(end - begin, *self.shape[1:]), offset=self.offset + begin * row_bytes,
            num_bytes=(end - begin) * row_bytes,
        )  # fmt: skip

"""Hold a decode step's tokens for the experts that the CPU computes, and describe these experts.

A host request has all rows of one layer of a step. As in `transfer.exchange.Handshake`, a row's flag is written after
the row's request, and `answered` after all rows of the answer. Experts that are not in host memory (NOT_HERE, or an
invalid number) add nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from transfer.allocation import allocate_on_host
from transfer.exchange import Handshake
from transfer.host_tier import Answered
from transfer.model_constants import ExpertActivation
from transfer.slot_shape import ANSWERED, expert_row_arrays

NOT_HERE = -1  # in place of the number of an expert that is not in host memory
LAYER, ROWS, HOST_REQUEST_COLUMNS = 0, 1, 2  # columns of a table of host requests


@dataclass(slots=True, kw_only=True)
class ExpertSlot(Handshake):
    """A step's requests for experts, in host memory that is pinned if the device is CUDA.

    hidden: float32 `[max_rows, hidden]`, after the layer's norm.
    experts: int32 `[max_rows, per_token]`, indices among the layer's experts in host memory, or NOT_HERE.
    shares: float32 `[max_rows, per_token]`, the experts' routing weights.
    out: float32 `[max_rows, hidden]`, for each row the weighted sum of its experts' results.
    """

    hidden: Tensor
    experts: Tensor
    shares: Tensor
    out: Tensor


def new_expert_slot(max_rows: int, hidden: int, per_token: int, device: torch.device) -> ExpertSlot:
    """Return a slot for host requests of `device`. Its first host request has stamp 1."""
    arrays = {name: array.times(max_rows) for name, array in expert_row_arrays(hidden, per_token).items()}
    made: dict[str, Any] = allocate_on_host({**arrays, "answered": ANSWERED}, is_pinned=device.type == "cuda")
    made["experts"].fill_(NOT_HERE)
    return ExpertSlot(**made)


@dataclass(frozen=True, slots=True)
class PackedRows:
    """A packed matrix, in the layout of GPU kernels, contiguous.

    Units of 16 words hold runs of 32 columns: word w has columns 2 w and 2 w + 1 of run p in its lower and its upper
    half, at the bits from `p * bits` on. An integer `q` means `(q - zero) * scale`, with zero in the middle of the
    range if none are stored. FP8 (e4m3) and FP4 (e2m1) mean their number times the scale. With runs, `q` means
    `q * d * scale - least * offset`.

    inner: columns. group: columns that share a scale. row_block: rows that share scales.
    words: int32 `[rows, words]`.
    scales: `[ceil(rows / row_block), ceil(inner / group)]` in bfloat16, float16 or float32; of FP4 also uint8 exponents
        (e8m0). With runs they are int16: a scale in the lower and an offset in the upper signed byte.
    zeros: uint8 of the shape of scales, or None.
    runs: int32 `[rows, inner / run]`, the float16 bits of d below those of least; or None.
    """

    number: Literal["int4", "int8", "fp8", "fp4"]
    inner: int
    group: int
    row_block: int
    words: Tensor
    scales: Tensor
    zeros: Tensor | None
    runs: Tensor | None

    @property
    def tensors(self) -> list[Tensor]:
        return [one for one in (self.words, self.scales, self.zeros, self.runs) if one is not None]


@dataclass(frozen=True, slots=True)
class LayerExperts:
    """Experts of a layer in host memory: packed, or contiguous in bfloat16 or float32.

    gate_up: `[count * 2 * intermediate, hidden]`, for each expert its gate first.
    down: `[count * hidden, intermediate]`.
    gate_up_bias, down_bias: float32, one for each row, or None.
    activation: SiLU, or gpt-oss's: `gate * sigmoid(CLAMPED_GAIN * gate) * (up + 1)`, with gate at most CLAMPED_LIMIT
        and up clamped to +-CLAMPED_LIMIT.
    in_integers: multiply packed rows in integers where their format allows it (`transfer.matrix_rows.is_in_integers`).
    """

    count: int
    gate_up: Tensor | PackedRows
    down: Tensor | PackedRows
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    activation: ExpertActivation = "silu"
    in_integers: bool = False

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all matrices and biases."""
        matrices = (self.gate_up, self.down)
        held = [part for one in matrices for part in (one.tensors if isinstance(one, PackedRows) else [one])]
        return sum(one.nbytes for one in (*held, self.gate_up_bias, self.down_bias) if one is not None)


@dataclass(frozen=True, slots=True)
class ExpertRequests:
    """The host requests of a step, in order. table: int64 `[requests, HOST_REQUEST_COLUMNS]`, layer and row count."""

    table: np.ndarray

    def give_up(self) -> None:
        """Do nothing: an unfinished step holds nothing here."""


@dataclass(slots=True)
class ExpertCounts:
    """Sums over all host requests.

    experts: experts that were read; each counts once in a host request.
    pairs: pairs of a row and an expert.
    wait_s: time spent waiting for the device.
    compute_s: time from a host request's arrival to its answer.
    bytes_read: bytes of matrices.
    """

    host_requests: int = 0
    experts: int = 0
    pairs: int = 0
    bytes_read: int = 0
    wait_s: float = 0.0
    compute_s: float = 0.0


class ExpertWorker(Protocol):
    """Computes the host requests of one slot. One thread calls it at a time. Results do not depend on the number of
    threads that compute.
    """

    @property
    def counts(self) -> ExpertCounts: ...

    def answer(self, parts: Sequence[tuple[Any, Any]]) -> Answered:
        """Answer all host requests of a step. parts: one pair of `ExpertRequests` and the slot. The slot's current host
        request is the first one before the call, and the last one after it. Raises ExchangeError if the device does not
        send one in time.
        """


class OpenExperts(Protocol):
    """Makes a worker. layers: by layer of the model, its experts in host memory; None: the layer has none."""

    def __call__(self, layers: Sequence[LayerExperts | None], max_rows: int, per_token: int) -> ExpertWorker: ...

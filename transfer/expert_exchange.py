"""Hold a decode step's tokens for the experts that the CPU computes, and describe these experts.

A host request is one layer of a step, all its rows. As in `transfer.exchange.Handshake`, a row's flag is written after
the row's request, and `answered` after all rows of the answer. Experts that are not in host memory (NOT_HERE, or no
valid number) add nothing.
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

NOT_HERE = -1  # in place of an expert's number
LAYER, ROWS, HOST_REQUEST_COLUMNS = 0, 1, 2  # of a table of host requests


@dataclass(slots=True, kw_only=True)
class ExpertSlot(Handshake):
    """Host memory that the device reads and writes (pinned where it is CUDA).

    hidden: float32 `[max_rows, hidden]`, behind the layer's norm.
    experts: int32 `[max_rows, per_token]`, numbers of experts among the layer's in host memory, or NOT_HERE.
    shares: float32 `[max_rows, per_token]`, their weights.
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

    Units of 16 words hold runs of 32 columns, one for each two places of a word: word w has columns 2 w and 2 w + 1 of
    run p in its lower and its upper half, at the bits from `p * bits` on. Number `q` is `(q - zero) * scale`, zero in
    the middle where none are stored; of FP8 (e4m3) the number of its byte times the scale, of FP4 (e2m1) that of its
    four bits; where there are runs `q * d * scale - least * offset`.

    inner: columns; group: columns of a scale; row_block: rows that share scales. words int32 `[rows, words]`; scales
    bfloat16, float16 or float32, of FP4 also uint8 exponents (e8m0), `[ceil(rows / row_block), ceil(inner / group)]`;
    zeros uint8 of that shape, or None; runs int32 `[rows, inner / run]`, the float16 bits of d below those of least, or
    None: scales are then int16, of signed bytes a scale below an offset.
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
    """Experts of a layer in host memory, bfloat16 or float32, contiguous, or packed.

    gate_up `[count * 2 * intermediate, hidden]`, of each its gate first; down `[count * hidden, intermediate]`. biases:
    float32, one a row of either, or None. activation: SiLU, or gpt-oss's: of a gate of at most CLAMPED_LIMIT and an up
    within it `gate * sigmoid(CLAMPED_GAIN * gate) * (up + 1)`. in_integers: rows of few bits are multiplied in
    integers, if they are of a kind that is (`transfer.matrix_rows.is_in_integers`).
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
    """The requests of a step, in order: int64 `[requests, HOST_REQUEST_COLUMNS]`, layer and number of rows of each."""

    table: np.ndarray

    def give_up(self) -> None:
        """Do nothing: nothing is held for a step that will not be finished."""


@dataclass(slots=True)
class ExpertCounts:
    """Sums over all host requests.

    experts: that were read, each once a host request.
    pairs: of a row and an expert.
    wait_s: for the device.
    compute_s: from a host request's arrival to its answer.
    bytes_read: of matrices.
    """

    host_requests: int = 0
    experts: int = 0
    pairs: int = 0
    bytes_read: int = 0
    wait_s: float = 0.0
    compute_s: float = 0.0


class ExpertWorker(Protocol):
    """Computes the host requests of one slot, for one thread of callers at a time. Results do not depend on the number
    of threads.
    """

    @property
    def counts(self) -> ExpertCounts: ...

    def answer(self, parts: Sequence[tuple[Any, Any]]) -> Answered:
        """Answer all host requests of a step: one pair of `ExpertRequests` and the slot, whose current host request is
        the first, and afterwards the last. Raises ExchangeError if the device sends none.
        """


class OpenExperts(Protocol):
    """Makes a worker. layers: of a model, None where nothing is computed here."""

    def __call__(self, layers: Sequence[LayerExperts | None], max_rows: int, per_token: int) -> ExpertWorker: ...

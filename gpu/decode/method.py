"""What a method does in a layer of a decode step: before anything is read, and once all has been.

It refuses to know the other methods, graphs and how the host attends. Invariant: what a method does is ordered by the
device's stream alone and takes no decision on the host, so a step with it may be captured.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gpu.decode.rows import StepRows
from gpu.kernels.paged_decode_attention import Reading
from transfer.partial import Partial


@dataclass(slots=True)
class LayerReads:
    """What one layer reads for each row; methods change it before it is read.

    query, pre_rope_query: `[rows, heads, dim]`, rotated and not; bounds, has_far, maxima: of what is on the device, see
    `gpu.kernels.paged_decode_attention` (bounds None: all of each context). asks: whether the host is asked in this
    layer, and then codes: of the query, uint16 `[rows, heads, tables]`, wanted and excluded: as in the exchange slot.
    """

    layer: int
    rows: StepRows
    query: Tensor
    pre_rope_query: Tensor
    asks: bool
    bounds: Tensor | None = None
    has_far: bool = False
    maxima: Tensor | None = None
    codes: Tensor | None = None
    wanted: Tensor | None = None
    excluded: Tensor | None = None


class StepMethod:
    """Does nothing; a method overrides what it has a part in."""

    def before(self, reads: LayerReads) -> None:
        """Keys and values of the step's tokens are written, and nothing is read yet."""

    def after(self, reads: LayerReads, on_device: Reading, filled: Sequence[Partial]) -> None:
        """Near and far are read, and what others filled the holes with is there; nothing is merged yet."""

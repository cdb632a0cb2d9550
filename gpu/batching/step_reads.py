"""Count the bytes that a decode step reads on the device: weights, and the parts of contexts that the host leaves."""

from collections import Counter
from collections.abc import Sequence

from gpu.model.architecture import Architecture
from gpu.model.matrix_formats import step_weight_bytes
from gpu.page_layout import KvFormat, row_bytes
from gpu.step import HostRead


class StepReads:
    """Counts the bytes that one model's decode steps read. dtype_bytes: of the dtype that computes, and of matrices
    that are not packed. kv: format of rows in pages. num_offloaded_layers: how many layers are offloaded.
    """

    def __init__(
        self, architecture: Architecture, dtype_bytes: int, is_packed: bool, kv: KvFormat, num_offloaded_layers: int
    ) -> None:
        self._architecture = architecture
        self._dtype_bytes = dtype_bytes
        self._is_packed = is_packed
        self._num_offloaded_layers = num_offloaded_layers
        rows = architecture.rows_of_head
        self._layer_token_bytes = (
            rows * architecture.num_kv_heads * row_bytes(kv, architecture.dim, architecture.latent is not None)
        )
        heads = ((spec.seen_tokens, architecture.heads_of(spec)) for spec in architecture.layers)
        self._windows = Counter((window, rows * own.count * row_bytes(kv, own.dim)) for window, own in heads)
        self._weights: dict[int, int] = {}  # bytes, by rows

    def weights(self, num_rows: int) -> int:
        """Return the bytes of weights that a step of `num_rows` rows reads, with the expected number of experts."""
        if num_rows not in self._weights:
            shape, packed = self._architecture, self._is_packed
            self._weights[num_rows] = step_weight_bytes(shape, self._dtype_bytes, packed, num_rows) if num_rows else 0
        return self._weights[num_rows]

    def weights_of_halves(self, num_rows: int) -> int:
        """Return the bytes of weights that both half batches read."""
        return self.weights(-(-num_rows // 2)) + self.weights(num_rows // 2)

    def context(self, num_cells: int, host_read: HostRead | None) -> int:
        """Return the bytes of keys and values that a row with `num_cells` cells reads on the device."""
        seen = sum(
            count * token_bytes * (num_cells if window is None else min(num_cells, window))
            for (window, token_bytes), count in self._windows.items()
        )
        on_host = 0 if host_read is None else (host_read.end - host_read.begin) * self._num_offloaded_layers
        return max(seen - on_host * self._layer_token_bytes, 0)

    def reread_share(self, cells: Sequence[int], host_reads: Sequence[HostRead | None]) -> float:
        """Return the share of bytes that two half batches read twice. `cells[i]`: row i's last cell."""
        contexts = sum(self.context(cell + 1, host_read) for cell, host_read in zip(cells, host_reads, strict=True))
        whole = self.weights(len(cells))
        return (self.weights_of_halves(len(cells)) - whole) / (whole + contexts)

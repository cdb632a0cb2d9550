"""Copy rows to the host tier and back: encoded or decoded in pieces on side streams.

Invariant: the host's rows depend on the rows alone: centre and scales are of all tokens of a call, codes are of the
stored keys. Kernels and copies of a direction take turns on one stream with one buffer. More buffers would hide
nothing: a layer's prefill takes many times as long as its copy, and the kernels take a tenth of the copy's time. On the
CPU rows are written to their places.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpu.host.footprint import PIECE_ROWS, piece_arrays
from gpu.operations.host_rows.int4_rows import restore_int4
from gpu.operations.host_rows.offload_rows import centre_of, key_scale_of, offload_rows, value_scale_of
from gpu.operations.host_rows.restore_rows import restore_rows
from gpu.operations.host_rows.scatter_runs import scatter_runs
from transfer.allocation import allocate_empty
from transfer.copies import PASSED, Event, Streams
from transfer.host_tier import LayerRows
from transfer.tier_shape import TierShape

COPIED_RUN_BYTES = 256 * 1024  # runs from this size on are copied by the copy engine, shorter ones by a kernel
CPU_PIECE_TOKENS = 1024  # tokens, with all KV heads, that are widened to float32 at once
EncodeKeys = Callable[[Tensor, Tensor], None]  # see `gpu.methods.device_side.DeviceSide.encode_keys`


@dataclass(frozen=True, slots=True)
class Sent:
    """The events of a copy to host memory. read: the source may be overwritten after it (`streams.wait_for(read)`).
    done: the host has the rows.
    """

    read: Event
    done: Event


class RowTransfer:
    """Copies rows between device and host memory; there is one for each device. encode_keys: makes codes of stored
    keys; None if the shape has no tables.
    """

    def __init__(
        self, shape: TierShape, encode_keys: EncodeKeys | None, device: torch.device, streams: Streams
    ) -> None:
        assert (encode_keys is None) == (shape.num_tables == 0), "offload: codes go with tables"
        self.shape = shape
        self._encode_keys = encode_keys
        self.device = device
        self.streams = streams
        is_cpu = device.type == "cpu"
        self._down = None if is_cpu else _Buffers(shape, shape.num_tables, device)
        self._up = None if is_cpu else _Buffers(shape, 0, device)
        self._last_load: Event = PASSED

    def send(self, keys: Tensor, values: Tensor, rows: Sequence[LayerRows], has_centre: bool) -> Sent:
        """Send keys and values `[layers, kv_heads, tokens, dim]`, bf16 or float32, each layer to its rows. All rows
        must have the same strides and as many KV heads. Returns at once on CUDA.

        has_centre: read centre and scales from `rows`, after all earlier copies; otherwise they are made of these
        tokens and written there. If `rows` have no codes, none are made. At most PIECE_ROWS tokens.
        """
        layers, heads, tokens, dim = keys.shape
        assert 0 < tokens <= PIECE_ROWS, f"offload: {tokens} tokens of a segment, wanted 1 to {PIECE_ROWS}"
        assert (layers, heads, dim) == (len(rows), len(rows[0].keys), self.shape.dim)
        if self._down is None:
            for layer in range(layers):
                self._write(keys[layer], values[layer], rows[layer], has_centre)
            return Sent(self.streams.record(), self.streams.record())
        self.streams.keep((keys, values), self.streams.down)
        with self.streams.aside(self.streams.down):
            read = self.streams.record()
            for own_layers, own_heads in _pieces(layers, heads, tokens):
                part = [of_heads(layer, own_heads) for layer in rows[own_layers]]
                piece = keys[own_layers, own_heads], values[own_layers, own_heads]
                read = self._send_piece(*piece, part, has_centre, self._down)
            return Sent(read, self.streams.record())

    def load(self, rows: Sequence[LayerRows], into_keys: Tensor, into_values: Tensor) -> Event:
        """Copy one layer's rows, in order, to keys and values `[kv_heads, tokens, dim]` in the compute dtype (strided).

        On CUDA this runs on the up stream, after the current stream's work so far. Wait for the event before reading
        them.
        """
        wanted = sum(segment.keys.shape[1] for segment in rows)
        assert into_keys.shape[1] == wanted, f"offload: {wanted} rows for a room of {into_keys.shape[1]}"
        self.streams.keep((into_keys, into_values), self.streams.up)
        with self.streams.aside(self.streams.up):
            begin = 0
            for segment in rows:
                end = begin + segment.keys.shape[1]
                for _, heads in _pieces(1, self.shape.num_kv_heads, end - begin):
                    self._load_piece(of_heads(segment, heads), into_keys[heads, begin:end],
                                      into_values[heads, begin:end])  # fmt: skip
                begin = end
            self._last_load = self.streams.record()
        return self._last_load

    def wait_for_loads(self) -> None:
        """Wait on the host until no rows are being copied to the device. Their memory may be freed only then."""
        self._last_load.synchronize()

    def _write(self, keys: Tensor, values: Tensor, rows: LayerRows, has_centre: bool) -> None:
        """Write one layer's rows, on the CPU."""
        if not has_centre:
            rows.centre.copy_(centre_of(keys))
            if rows.key_scale is not None and rows.value_scale is not None:
                rows.key_scale.copy_(key_scale_of(keys, rows.centre))
                rows.value_scale.copy_(value_scale_of(values))
        for begin in range(0, keys.shape[1], CPU_PIECE_TOKENS):
            end = begin + CPU_PIECE_TOKENS
            offload_rows(
                keys[:, begin:end], values[:, begin:end], rows.centre, rows.key_scale, rows.value_scale,
                rows.keys[:, begin:end], rows.values[:, begin:end],
            )  # fmt: skip
        if rows.codes is not None and self._encode_keys is not None:
            stored = rows.keys
            if self.shape.rows == "int4":
                stored = torch.empty_like(keys, dtype=torch.float32)
                restore_int4(rows.keys, None, stored)
            self._encode_keys(stored, rows.codes)

    def _send_piece(
        self, keys: Tensor, values: Tensor, rows: list[LayerRows], has_centre: bool, buffers: "_Buffers"
    ) -> Event:
        """Send keys `[layers, heads, tokens, dim]` of a piece, and values, on the down stream. Return the event after
        which the source has been read.
        """
        shape = keys.shape
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)  # [layers * heads, tokens, dim]
        centres = self._stored_centres(rows) if has_centre else self._new_centres(keys, values, rows)
        stored_keys, stored_values = buffers.rows(shape[0] * shape[1], shape[2])
        offload_rows(keys, values, *centres, stored_keys, stored_values)
        read = self.streams.record()
        _copy_down(stored_keys.view(*shape[:2], 1, -1), [_runs(layer.keys) for layer in rows])
        _copy_down(stored_values.view(*shape[:2], 1, -1), [_runs(layer.values) for layer in rows])
        if self._encode_keys is not None and rows[0].codes is not None:
            codes = buffers.codes(len(keys), shape[2])
            if self.shape.rows == "int4":
                restore_int4(stored_keys, None, buffers.widened(keys.shape))
                self._encode_keys(buffers.widened(keys.shape), codes)
            else:
                self._encode_keys(stored_keys, codes)
            _copy_down(codes.view(*shape[:2], -1, shape[2]), [_present(layer.codes) for layer in rows])
        return read

    def _stored_centres(self, rows: list[LayerRows]) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return centre and scales `[layers * heads, ...]` from the host, in stream order."""
        if rows[0].key_scale is None:
            return self._gather([layer.centre for layer in rows]), None, None
        return (
            self._gather([layer.centre for layer in rows]),
            self._gather([_present(layer.key_scale) for layer in rows]),
            self._gather([_present(layer.value_scale) for layer in rows]),
        )

    def _gather(self, parts: list[Tensor]) -> Tensor:
        together = torch.empty(len(parts), *parts[0].shape, device=self.device)
        for into, part in zip(together, parts, strict=True):
            into.copy_(part, non_blocking=True)
        return together.flatten(0, 1)

    def _new_centres(
        self, keys: Tensor, values: Tensor, rows: list[LayerRows]
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Make centre and scales of keys and values `[layers * heads, tokens, dim]`, copy them down, and return
        them.
        """
        centre = centre_of(keys)
        if rows[0].key_scale is None:
            self._spread(centre, [layer.centre for layer in rows])
            return centre, None, None
        key_scale, value_scale = key_scale_of(keys, centre), value_scale_of(values)
        self._spread(centre, [layer.centre for layer in rows])
        self._spread(key_scale, [_present(layer.key_scale) for layer in rows])
        self._spread(value_scale, [_present(layer.value_scale) for layer in rows])
        return centre, key_scale, value_scale

    def _spread(self, together: Tensor, parts: list[Tensor]) -> None:
        for part, source in zip(parts, together.chunk(len(parts)), strict=True):
            part.copy_(source, non_blocking=True)

    def _load_piece(self, rows: LayerRows, into_keys: Tensor, into_values: Tensor) -> None:
        """Copy rows of some heads of one segment to the device, on the up stream."""
        if self._up is None:
            restore_rows(
                rows.keys, rows.values, rows.centre, rows.key_scale, rows.value_scale, into_keys, into_values
            )  # fmt: skip
            return
        stored_keys, stored_values = self._up.rows(*rows.keys.shape[:2])
        for stored, host in ((stored_keys, rows.keys), (stored_values, rows.values)):
            for own, run in zip(stored, host, strict=True):
                own.copy_(run, non_blocking=True)
        restore_rows(stored_keys, stored_values, *self._stored_centres([rows]), into_keys, into_values)


class _Buffers:
    """Device memory of one direction: stored keys, values and codes of a piece."""

    def __init__(self, shape: TierShape, num_tables: int, device: torch.device) -> None:
        arrays = piece_arrays(shape, num_tables)
        self._rows = allocate_empty(arrays["rows"], device)
        self._codes = allocate_empty(arrays["codes"], device)
        self._widened = allocate_empty(arrays["widened"], device)
        self._num_tables, self._row_width = num_tables, shape.row_width

    def rows(self, heads: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Return keys and values `[heads, tokens, row_width]`, contiguous."""
        shape = heads, tokens, self._row_width
        keys, values = self._rows[:, : heads * tokens * self._row_width]
        return keys.view(shape), values.view(shape)

    def widened(self, shape: torch.Size) -> Tensor:
        """Return widened keys `[heads, tokens, dim]`, contiguous."""
        return self._widened[: shape.numel()].view(shape)

    def codes(self, heads: int, tokens: int) -> Tensor:
        """Return codes `[heads, tables, tokens]`, contiguous."""
        return self._codes[: heads * self._num_tables * tokens].view(heads, self._num_tables, tokens)


def _pieces(layers: int, heads: int, tokens: int) -> Iterator[tuple[slice, slice]]:
    """Yield layers and KV heads of each piece: as many whole layers as fit, or heads of one layer."""
    fit = PIECE_ROWS // tokens
    if fit >= heads:
        step = fit // heads
        for layer in range(0, layers, step):
            yield slice(layer, min(layer + step, layers)), slice(0, heads)
        return
    for layer in range(layers):
        for head in range(0, heads, fit):
            yield slice(layer, layer + 1), slice(head, min(head + fit, heads))


def of_heads(rows: LayerRows, heads: slice) -> LayerRows:
    """Return the rows of some KV heads."""
    return LayerRows(
        rows.keys[heads],
        rows.values[heads],
        None if rows.codes is None else rows.codes[heads],
        rows.centre[heads],
        None if rows.key_scale is None else rows.key_scale[heads],
        None if rows.value_scale is None else rows.value_scale[heads],
    )


def cut_rows(rows: Sequence[LayerRows], begin: int) -> list[LayerRows]:
    """Return rows without the first `begin` tokens."""
    left = []
    for one in rows:
        num_tokens = one.keys.shape[1]
        if begin < num_tokens:
            left.append(replace(one, keys=one.keys[:, begin:], values=one.values[:, begin:], codes=None))
        begin = max(0, begin - num_tokens)
    return left


def _present(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "offload: layers of one offload block are alike"
    return tensor


def _copy_down(source: Tensor, targets: list[Tensor]) -> None:
    """Copy `source` `[layers, heads, inner, length]` to pinned targets `[heads, inner, length]`, long runs one
    by one.
    """
    if targets[0][0].is_contiguous():
        source, targets = _runs(source.flatten(0, 1)).view(*source.shape[:2], 1, -1), list(map(_runs, targets))
    if source[0, 0, 0].nbytes < COPIED_RUN_BYTES:
        scatter_runs(source, targets)
        return
    for layer, target in zip(source, targets, strict=True):
        for head, host_head in zip(layer, target, strict=True):
            for run, host in zip(head, host_head, strict=True):
                host.copy_(run, non_blocking=True)


def _runs(rows: Tensor) -> Tensor:
    """View `[heads, ...]` as `[heads, 1, length]`. Raises RuntimeError unless each head is one run of memory."""
    return rows.view(len(rows), 1, -1)

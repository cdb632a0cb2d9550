"""Run decode steps of small batches on the CPU, compiled, for rows of the exact profile.

A row's logits are the same to the last bit in every batch up to MAX_ROWS and on any number of threads. Weights and KV
are used in place.
"""

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from gpu.cpu_step.step_arrays import PART_TOKENS, has_plain_layers, logits_array, num_step_rows, part_arrays
from gpu.cpu_step.step_attention import COLUMN_BLOCK, Parts, Shape
from gpu.cpu_step.step_kernel import OTHER_STAGES, STAGES_A_LAYER, Buffers, CompiledStep, Model, Rows
from gpu.layers.decoder import Decoder
from gpu.model.spec import Architecture
from gpu.operations.linear.numba_linear import ROWS
from gpu.operations.linear.numba_matrix_table import gains_room, table_row, token_room
from gpu.operations.linear.numba_packed_linear import widen_address
from gpu.operations.linear.packed_matrix import Packed
from transfer.matrix_rows import KINDS
from transfer.model_constants import TILE
from transfer.simd.features import HAS_VECTORS
from transfer.simd.team import COUNTER_INT64, new_counters
from transfer.simd.vectors import LINE_BYTES

_ROW_KINDS = KINDS | {torch.int8: np.int8}  # of pages
_PADDING = 16  # columns between rows: widths that are powers of two would all share a few sets of the cache


def serves(architecture: Architecture, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the compiled step can compute this model here: it needs plain Llama layers, whole lines of weights
    and whole blocks of a head. For packed matrices, `numba_packed_linear.multiplies` decides one by one.
    """
    if not has_plain_layers(architecture):
        return False
    if device.type != "cpu" or dtype not in KINDS or not HAS_VECTORS:
        return False
    line = LINE_BYTES // dtype.itemsize
    inner = (architecture.hidden, architecture.intermediate, architecture.num_heads * architecture.dim)
    return architecture.dim % COLUMN_BLOCK == 0 and architecture.vocab_size >= ROWS and not any(n % line for n in inner)


def reads_rows(stored: torch.dtype, dim: int) -> bool:
    """Return whether the compiled step reads rows of this dtype in pages: plain rows or int8 codes, in whole lines."""
    return stored in _ROW_KINDS and dim % (LINE_BYTES // stored.itemsize) == 0


def kinds_of(embedding: torch.dtype, rows: torch.dtype) -> tuple[Any, Any]:
    """Return the values whose numba types stand for the dtypes of an embedding and of rows in pages."""
    return KINDS[embedding](0), _ROW_KINDS[rows](0)


class CpuStep:
    """The compiled step over a decoder's weights and pool. Threads: torch's at the time of a step."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder  # owns the memory behind the model's addresses
        self._model = _model(decoder)
        self._scratch = _scratch(decoder)
        a = decoder.architecture
        self._shape = Shape(a.num_heads, a.num_kv_heads, a.dim, decoder.pool.page_tokens, np.float32(decoder.scale))
        self._buffers: dict[int, Buffers] = {}  # by number of threads
        self._rows = num_step_rows(decoder.pool.max_slots)
        self._parts = _parts(a, self._rows, 1)
        self._compiled: CompiledStep | None = None

    def run(self, slots: np.ndarray, positions: np.ndarray, token_ids: np.ndarray) -> Tensor:
        """Return logits, float32 `[rows, vocab]`, overwritten by the next step.

        slots int32 `[rows]`, -1 for a row of padding; positions, token_ids int64 `[rows]`; at most MAX_ROWS.
        """
        context_lens = np.where(slots >= 0, positions + 1, 0).astype(np.int32)
        rows = Rows(token_ids, positions, slots, context_lens)
        threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
        buffers = self._buffers_for(threads)
        parts = self._parts_for(int(context_lens.max()))
        buffers.counters.fill(0)
        if self._compiled is None:
            self._model = self._model._replace(widen=_widening(self._decoder))
            self._compiled = CompiledStep(self._model, self._shape, rows, buffers, parts)
        self._compiled.run(threads, self._model, self._shape, rows, buffers, parts)
        return torch.from_numpy(buffers.logits[: len(slots)])

    def _buffers_for(self, threads: int) -> Buffers:
        if threads not in self._buffers:
            self._buffers[threads] = _buffers(self._decoder.architecture, self._rows, threads, *self._scratch)
        return self._buffers[threads]

    def _parts_for(self, context: int) -> Parts:
        if self._parts.top.shape[2] * PART_TOKENS < context:
            self._parts = _parts(self._decoder.architecture, self._rows, context)
        return self._parts


def _address(tensor: Tensor) -> int:
    assert tensor.is_contiguous(), "the compiled step reads whole, contiguous tensors"
    return tensor.data_ptr()


def _model(decoder: Decoder) -> Model:
    a, weights, pool = decoder.architecture, decoder.weights, decoder.pool
    embedding = weights.embedding
    kind, row_kind = kinds_of(embedding.dtype, pool.key_pages[0].dtype)
    matrices = [[table_row(m) for m in (layer.qkv, layer.output, *layer.mlp)] for layer in weights.layers]
    pages = [[_address(keys), _address(values)] for keys, values in zip(pool.key_pages, pool.value_pages, strict=True)]
    norms = [norm for layer in weights.layers for norm in (layer.attention_norm, layer.mlp_norm)]
    return Model(
        kind=kind,
        row_kind=row_kind,
        hidden=a.hidden,
        intermediate=a.intermediate,
        vocab=a.vocab_size,
        eps=np.float32(a.rms_norm_eps),
        matrices=np.array(matrices, np.int64),
        pages=np.array(pages, np.int64),
        norms=torch.stack([*norms, weights.final_norm]).float().numpy(),
        embedding=np.array(table_row(embedding), np.int64),
        widen=0,
        logits=np.array(table_row(weights.logits), np.int64),
        cos=decoder.cos.numpy(),
        sin=decoder.sin.numpy(),
        page_table=pool.page_table.numpy(),
    )


def _widening(decoder: Decoder) -> int:
    """Return the address of the function that widens rows of the embedding; 0 for a plain one. Compiled here, because
    nothing has needed it before the first step.
    """
    embedding = decoder.weights.embedding
    return widen_address(embedding, torch.float32) if isinstance(embedding, Packed) else 0


def _scratch(decoder: Decoder) -> tuple[int, int]:
    """Return how many float32 a thread needs for a token in the matrices' input format, and for gains of rows."""
    held = decoder.weights.matrices
    return max(map(token_room, held)), max(map(gains_room, held))


def _buffers(a: Architecture, rows: int, threads: int, ordered: int, gains: int) -> Buffers:
    query_width = a.num_heads * a.dim
    return Buffers(
        hidden=_floats(rows, a.hidden + _PADDING),
        qkv=_floats(rows, query_width + 2 * a.num_kv_heads * a.dim + _PADDING),
        attended=_floats(rows, query_width + _PADDING),
        gated=_floats(rows, a.intermediate + _PADDING),
        logits=_floats(*logits_array(a, rows).shape),
        normed=_floats(threads, rows, a.hidden + _PADDING),
        ordered=_floats(threads, rows, ordered + _PADDING),
        tiles=_floats(threads, 2, rows, TILE),
        gains=_floats(threads, gains + _PADDING),
        query=_floats(threads, a.group, a.dim),
        scores=_floats(threads, a.group, PART_TOKENS),
        counters=new_counters(a.num_layers * STAGES_A_LAYER + OTHER_STAGES, threads),
    )


def _parts(a: Architecture, rows: int, context_tokens: int) -> Parts:
    floats = {name: _floats(*array.shape) for name, array in part_arrays(a, rows, context_tokens).items()}
    return Parts(**floats, arrivals=np.zeros((rows * a.num_kv_heads, COUNTER_INT64), np.int64))


def _floats(*shape: int) -> np.ndarray:
    return np.full(shape, np.nan, np.float32)

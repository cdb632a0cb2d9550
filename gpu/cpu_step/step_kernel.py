"""Compile the decode step: all layers and the logits of a few tokens in one parallel region.

Five stages a layer: norm and QKV; RoPE, KV write and attention; output projection and residual; norm, gate and up with
SwiGLU; down projection and residual. Weights and pages are addresses that the caller keeps alive. A token's logits
depend on its own row alone, to the last bit. Bytes moved: every matrix and every context's keys and values, once a
step.
"""

from typing import NamedTuple

import numba
import numpy as np

from gpu.cpu_step import step_attention as paged_attention
from gpu.cpu_step.step_attention import attend
from gpu.operations.linear import numba_linear as product
from gpu.operations.linear.numba_linear import normalise, prepared, project, project_and_add, project_gated
from transfer.simd import emission, exp, packed_rows, region, row_tiles, team, values, vectors
from transfer.simd.packed_gains import ROWS as FIRST_ROW
from transfer.simd.region import Region, call_rows, version
from transfer.simd.team import Team, claim, end_stage
from transfer.simd.vectors import address_of, load

STAGES_A_LAYER = 5
OTHER_STAGES = 2  # the embedding and the logits
QKV, OUTPUT, GATE_UP, DOWN = range(4)  # matrices of a layer
KEYS, VALUES = range(2)  # and its pages


class Model(NamedTuple):
    """A model in the form that the compiled step reads.

    kind: numba type of the embedding: a float32, or a uint16 for bf16. row_kind: of rows in pages: these, or an int8.
    matrices: int64 `[layers, 4, TABLE_COLUMNS]`. pages: int64 `[layers, 2]`, addresses.
    norms: float32 `[2 * layers + 1, hidden]`, of attention and MLP of each layer, then the final one.
    embedding: `[vocab, hidden]` as int64 `[TABLE_COLUMNS]`. widen: address of the function that widens a row of it; 0:
        it is plain.
    logits: int64 `[TABLE_COLUMNS]`. cos, sin: float32 `[positions, dim // 2]`. page_table: int32 `[slots, pages]`.
    """

    kind: np.float32 | np.uint16
    row_kind: np.float32 | np.uint16 | np.int8
    hidden: int
    intermediate: int
    vocab: int
    eps: np.float32
    matrices: np.ndarray
    pages: np.ndarray
    norms: np.ndarray
    embedding: np.ndarray
    widen: int
    logits: np.ndarray
    cos: np.ndarray
    sin: np.ndarray
    page_table: np.ndarray


class Rows(NamedTuple):
    """The rows of a step, one for each token. token_ids, positions: int64 `[rows]`. slots, context_lens: int32."""

    token_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    context_lens: np.ndarray


class Buffers(NamedTuple):
    """The buffers of a step, all float32 except counters.

    Shared, `[rows, width]`: hidden, qkv, attended, gated, logits. Per thread: normed `[threads, rows, hidden]`, ordered
    `[threads, rows, ...]` with tokens in a matrix's input format, tiles `[threads, 2, rows, TILE]`, gains `[threads,
    num_gains]`, query `[threads, group, dim]`, scores `[threads, group, PART_TOKENS]`. Widths may exceed their use.
    counters: of `team`, zero at the start.
    """

    hidden: np.ndarray
    qkv: np.ndarray
    attended: np.ndarray
    gated: np.ndarray
    logits: np.ndarray
    normed: np.ndarray
    ordered: np.ndarray
    tiles: np.ndarray
    gains: np.ndarray
    query: np.ndarray
    scores: np.ndarray
    counters: np.ndarray


@numba.njit(nogil=True, inline="always")
def _embed(team, stage, model, rows, buffers):
    items, done = len(rows.slots), 0
    row = claim(team, stage, items)
    while row >= 0:
        token, out, table = rows.token_ids[row], buffers.hidden[row], model.embedding
        if model.widen != 0:
            scratch = address_of(buffers.gains[team.me])
            call_rows(model.widen, address_of(table), token, 0, 0, 1, address_of(out), 4 * len(out), scratch)
        else:
            for i in range(model.hidden):
                out[i] = load(model.kind, table[FIRST_ROW], token * model.hidden + i)
        done += 1
        row = claim(team, stage, items)
    end_stage(team, stage, items, done)


@numba.njit(nogil=True, inline="always")
def _attention(team, layer, model, shape, rows, buffers, parts):
    """Run stages one to three of a layer: attention, added to the hidden states."""
    qkv, output, pages = model.matrices[layer, QKV], model.matrices[layer, OUTPUT], model.pages[layer]
    stage, normed, ordered = layer * STAGES_A_LAYER, buffers.normed[team.me], buffers.ordered[team.me]
    tokens, gains, width = len(rows.slots), buffers.gains[team.me], (shape.heads + 2 * shape.kv_heads) * shape.dim
    normalise(buffers.hidden, model.norms[2 * layer], model.eps, tokens, normed)
    project(team, stage, qkv, width, prepared(qkv, normed, tokens, ordered), tokens, gains, buffers.qkv)
    attend(
        team, stage + 1, model.row_kind, shape, pages[KEYS], pages[VALUES], buffers.qkv, model.cos, model.sin, rows,
        model.page_table, parts, buffers.query[team.me], buffers.scores[team.me], buffers.attended,
    )  # fmt: skip
    attended = prepared(output, buffers.attended, tokens, ordered)
    project_and_add(
        team, stage + 2, output, model.hidden, attended, tokens, gains, buffers.tiles[team.me], buffers.hidden
    )  # fmt: skip


@numba.njit(nogil=True, inline="always")
def _mlp(team, layer, model, tokens, buffers):
    """Run stages four and five of a layer: the MLP, added to the hidden states."""
    gate_up, down, stage = model.matrices[layer, GATE_UP], model.matrices[layer, DOWN], layer * STAGES_A_LAYER + 3
    normed, ordered = buffers.normed[team.me], buffers.ordered[team.me]
    gains, tile = buffers.gains[team.me], buffers.tiles[team.me]
    normalise(buffers.hidden, model.norms[2 * layer + 1], model.eps, tokens, normed)
    normed = prepared(gate_up, normed, tokens, ordered)
    project_gated(team, stage, gate_up, model.intermediate, normed, tokens, gains, tile, buffers.gated)
    gated = prepared(down, buffers.gated, tokens, ordered)
    project_and_add(team, stage + 1, down, model.hidden, gated, tokens, gains, tile, buffers.hidden)


def _compile(version: int):  # type: ignore[no-untyped-def]
    """Compile one thread's work of a step. numba's file cache checks one source file and captured variables only, so
    `version`, a digest of the sources of all callees, is captured.
    """

    @numba.njit(nogil=True, cache=True)
    def work(me, threads, model, shape, rows, buffers, parts):  # type: ignore[no-untyped-def]
        if version < 0:
            return
        team, layers, tokens = Team(buffers.counters, me, threads), len(model.matrices), len(rows.slots)
        last = layers * STAGES_A_LAYER
        _embed(team, last + 1, model, rows, buffers)
        for layer in range(layers):
            _attention(team, layer, model, shape, rows, buffers, parts)
            _mlp(team, layer, model, tokens, buffers)
        normed = buffers.normed[me]
        normalise(buffers.hidden, model.norms[2 * layers], model.eps, tokens, normed)
        normed = prepared(model.logits, normed, tokens, buffers.ordered[me])
        project(team, last, model.logits, model.vocab, normed, tokens, buffers.gains[me], buffers.logits)

    return work


@numba.njit(nogil=True, cache=True, parallel=True)
def _together(work, threads, model, shape, rows, buffers, parts):
    for me in numba.prange(threads):
        work(np.int64(me), threads, model, shape, rows, buffers, parts)


_work = _compile(
    version(paged_attention, product, emission, exp, packed_rows, region, row_tiles, team, values, vectors)
)

# The functions that a first start compiles for a model, with all their callees.
COMPILED = (_work, _together, product.multiply_rows, product.multiply_tile, packed_rows.widen_row)


class CompiledStep(Region):
    """The step, compiled for the types of one model. `buffers.counters` must be zero before a run."""

    def __init__(self, *arguments: object) -> None:
        """Compile the step. arguments: a model, shape, rows, buffers and parts with the types of later runs."""
        super().__init__(_work, _together, *arguments)

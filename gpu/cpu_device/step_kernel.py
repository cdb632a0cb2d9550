"""The compiled decode step: all layers and the logits of a few tokens in one parallel region.

Five stages a layer: norm and QKV; RoPE, KV write and attention; output projection and residual; norm, gate and up with
SwiGLU; down projection and residual. It refuses to know tensors: weights and pages are addresses that the caller keeps
alive. Invariant: a token's logits depend on its own row alone, to the last bit: neither on the rest of the batch nor
on the number of threads. Bytes moved: every matrix and every context's keys and values, once a step.
"""

from typing import NamedTuple

import numba
import numpy as np

from gpu.cpu_device import paged_attention, product
from gpu.cpu_device.paged_attention import attend
from gpu.cpu_device.product import normalise, project, project_and_add, project_gated
from transfer.simd import emission, exp, team, vectors
from transfer.simd.region import Region, version
from transfer.simd.team import Team, claim, end_stage
from transfer.simd.vectors import load

STAGES_A_LAYER = 5
OTHER_STAGES = 2  # the embedding and the logits
QKV, OUTPUT, GATE_UP, DOWN, KEYS, VALUES = range(6)  # columns of the table of addresses


class Model(NamedTuple):
    """kind: a float32, or a uint16 for bf16, as a type; matrices: int64 `[layers, 6]` addresses; norms: float32
    `[2 * layers + 1, hidden]`, the attention's and the MLP's of each layer, then the final one; embedding, logits:
    addresses of `[vocab, hidden]`; cos, sin: float32 `[positions, dim // 2]`; page_table: int32 `[slots, pages]`.
    """

    kind: np.float32 | np.uint16
    hidden: int
    intermediate: int
    vocab: int
    eps: np.float32
    matrices: np.ndarray
    norms: np.ndarray
    embedding: int
    logits: int
    cos: np.ndarray
    sin: np.ndarray
    page_table: np.ndarray


class Rows(NamedTuple):
    """One a token: token_ids, positions int64 `[rows]`; slots, context_lens int32 `[rows]`."""

    token_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    context_lens: np.ndarray


class Buffers(NamedTuple):
    """Float32 `[rows, width]` of a step: hidden, qkv, attended, gated, logits; of each thread: normed
    `[threads, rows, hidden]`, tiles `[threads, 2, rows, 4]`, query `[threads, group, dim]`, scores `[threads, group,
    PART_TOKENS]`. Widths may exceed what is used. counters: of `team`, zero at the start.
    """

    hidden: np.ndarray
    qkv: np.ndarray
    attended: np.ndarray
    gated: np.ndarray
    logits: np.ndarray
    normed: np.ndarray
    tiles: np.ndarray
    query: np.ndarray
    scores: np.ndarray
    counters: np.ndarray


@numba.njit(nogil=True)
def _embed(team, stage, model, rows, buffers):
    items, done = len(rows.slots), 0
    row = claim(team, stage, items)
    while row >= 0:
        begin = rows.token_ids[row] * model.hidden
        for i in range(model.hidden):
            buffers.hidden[row, i] = load(model.kind, model.embedding, begin + i)
        done += 1
        row = claim(team, stage, items)
    end_stage(team, stage, items, done)


@numba.njit(nogil=True)
def _attention(team, layer, model, shape, rows, buffers, parts):
    """Stages one to three of a layer: attention, added to the hidden states."""
    kind, at, tokens = model.kind, model.matrices[layer], len(rows.slots)
    stage, normed = layer * STAGES_A_LAYER, buffers.normed[team.me]
    query_width, width = shape.heads * shape.dim, (shape.heads + 2 * shape.kv_heads) * shape.dim
    normalise(buffers.hidden, model.norms[2 * layer], model.eps, tokens, normed)
    project(team, stage, kind, at[QKV], width, model.hidden, normed, tokens, buffers.qkv)
    attend(
        team, stage + 1, kind, shape, at[KEYS], at[VALUES], buffers.qkv, model.cos, model.sin, rows, model.page_table,
        parts, buffers.query[team.me], buffers.scores[team.me], buffers.attended,
    )  # fmt: skip
    project_and_add(
        team, stage + 2, kind, at[OUTPUT], model.hidden, query_width, buffers.attended, tokens, buffers.tiles[team.me],
        buffers.hidden,
    )  # fmt: skip


@numba.njit(nogil=True)
def _mlp(team, layer, model, tokens, buffers):
    """Stages four and five of a layer: the MLP, added to the hidden states."""
    kind, at, stage = model.kind, model.matrices[layer], layer * STAGES_A_LAYER + 3
    normed, tile = buffers.normed[team.me], buffers.tiles[team.me]
    normalise(buffers.hidden, model.norms[2 * layer + 1], model.eps, tokens, normed)
    project_gated(
        team, stage, kind, at[GATE_UP], model.intermediate, model.hidden, normed, tokens, tile, buffers.gated
    )  # fmt: skip
    project_and_add(
        team, stage + 1, kind, at[DOWN], model.hidden, model.intermediate, buffers.gated, tokens, tile, buffers.hidden
    )  # fmt: skip


def _compile(version: int):  # type: ignore[no-untyped-def]
    """What one thread does of a step. numba's file cache looks at one source file and at the variables that a function
    closes over; `version` stands for the sources of all that the step calls."""

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
        project(team, last, model.kind, model.logits, model.vocab, model.hidden, normed, tokens, buffers.logits)

    return work


@numba.njit(nogil=True, cache=True, parallel=True)
def _together(work, threads, model, shape, rows, buffers, parts):
    for me in numba.prange(threads):
        work(np.int64(me), threads, model, shape, rows, buffers, parts)


_work = _compile(version(paged_attention, product, emission, exp, team, vectors))


class CompiledStep(Region):
    """The step for the types of one model. A run's `buffers.counters` are zero."""

    def __init__(self, *arguments: object) -> None:
        """`arguments`: a model, shape, rows, buffers and parts like those of the steps to come."""
        super().__init__(_work, _together, *arguments)

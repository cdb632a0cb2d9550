"""Every Triton kernel compiles for the cards that users own, within their shared memory.

Launchers are called on fake CUDA tensors and each launch is recorded: what is compiled is what would be launched.
No device is needed.
"""

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

import gpu.methods
import gpu.operations
import gpu.predictor
import transfer.merge
from gpu.layers.expert_mlp import ExpertMlp
from gpu.methods.indexed import page_arrays, report_arrays, ring_arrays, work_arrays
from gpu.methods.indexed.attending import NUM_COUNTS as NUM_INDEX_COUNTS
from gpu.methods.indexed.attending import attend_chosen, join_parts
from gpu.methods.indexed.building import copy_pieces, index_pages, index_tokens
from gpu.methods.indexed.choosing import choose_tokens, give_slots
from gpu.methods.indexed.estimating import estimate_rest
from gpu.methods.indexed.page_rows import Pages
from gpu.methods.indexed.reporting import Report, report_errors
from gpu.methods.indexed.rereading import read_again
from gpu.methods.indexed.ring import Index, Layout, Work
from gpu.methods.indexed.scoring import RingStep, score_tokens
from gpu.methods.indexed.settings import IndexedSettings
from gpu.methods.mac.complete import complete
from gpu.methods.mac.match import NUM_COUNTS, Limits, match
from gpu.methods.mac.rings import Ring, RowRings
from gpu.methods.momo.block_sparse import CONFIGS, block_sparse_attention
from gpu.methods.momo.query_sparse import query_sparse_attention
from gpu.methods.momo.settings import MomoSettings
from gpu.methods.momo.union import unite
from gpu.methods.predicted.block_choice import choose_blocks
from gpu.methods.predicted.fetching import Lateness, fetch_blocks, look_at_blocks
from gpu.methods.predicted.held_blocks import Blocks
from gpu.methods.predicted.listing import NUM_COUNTS as NUM_FETCH_COUNTS
from gpu.methods.predicted.listing import list_blocks
from gpu.methods.predicted.noting import Fetched, HistoryRows, note_step
from gpu.methods.predicted.settings import PredictedSettings
from gpu.methods.predicted.turns import Turns
from gpu.methods.sampled.encode import Hyperplanes, encode_keys, encode_queries
from gpu.model.architecture import NAMED_SHAPES, Architecture
from gpu.model.matrix_format import MOST_PACKED_TOKENS, MatrixFormat
from gpu.model.spec import Latent, Recurrent
from gpu.operations.decode_attention.decode_launch import PagedReads
from gpu.operations.decode_attention.latent_decode_attention import LatentReads, latent_decode_attention
from gpu.operations.decode_attention.paged_decode_attention import paged_decode_attention, workspace_for
from gpu.operations.exchange.await_answer import await_answer
from gpu.operations.exchange.exchange_pack import exchange_pack, new_counters
from gpu.operations.exchange.expert_request import add_answer, request_experts
from gpu.operations.experts.expert_rows import down_rows, gate_up_rows
from gpu.operations.experts.expert_tiles import LEAST_PAIRS, down_tiles, gate_up_tiles, pair_few, pair_up
from gpu.operations.experts.far_experts import FarExperts
from gpu.operations.experts.fetch_experts import fetch_experts, list_experts
from gpu.operations.experts.mixture_matrices import ExpertMatrices
from gpu.operations.experts.routing import choose, fold_choice
from gpu.operations.experts.shared_expert import add_shared
from gpu.operations.head_norm import HeadNorms
from gpu.operations.host_rows.chunk_columns import CHUNKS, COLUMNS
from gpu.operations.host_rows.int4_rows import restore_int4, store_int4
from gpu.operations.host_rows.linked_attention import LinkedChunks, linked_attention
from gpu.operations.host_rows.offload_rows import centre_of, offload_rows
from gpu.operations.host_rows.restore_rows import restore_rows
from gpu.operations.host_rows.scatter_runs import launch as scatter
from gpu.operations.kv.fused_rows import fuse_rows, widen_rows
from gpu.operations.kv.gather_pages import gather_pages
from gpu.operations.kv.kv_rows import read_rows, width_of, write_rows
from gpu.operations.kv.latent_rows import gather_latents
from gpu.operations.kv.latent_write import latent_write
from gpu.operations.kv.rope_kv_write import rope_kv_write
from gpu.operations.kv.row_places import RowPlaces
from gpu.operations.linear.adapter_product import (
    AdapterRange,
    AdapterRows,
    StackedAdapters,
    add_raised,
    lower,
    lower_normed,
    swiglu_raised,
)
from gpu.operations.linear.fp8_linear import fp8_linear, round_tokens
from gpu.operations.linear.packed_linear import (
    packed_linear,
    packed_logits,
    packed_norm_gate_up,
    packed_norm_linear,
    unpack,
)
from gpu.operations.linear.packed_matrix import Packed
from gpu.operations.linear.plain_linear import (
    gate_up_swiglu,
    linear,
    logits_linear,
    norm_gate_up_swiglu,
    norm_linear,
)
from gpu.operations.linear.plain_tiles import Tiles, candidates, fitted
from gpu.operations.prefill_attention.merge_attended import merge_attended
from gpu.operations.prefill_attention.scattered_attention import scattered_attention_kernel
from gpu.operations.race import race
from gpu.operations.recurrent.delta_net import LayerStates, RecurrentWeights
from gpu.operations.recurrent.delta_prefill import PlannedSpans, delta_prefill
from gpu.operations.recurrent.delta_step import StackedWeights, delta_commit, delta_step
from gpu.operations.recurrent.short_conv import short_step
from gpu.operations.rms_norm import rms_norm, rms_norm_add
from gpu.operations.sinks import add_sinks
from gpu.operations.swiglu import swiglu
from gpu.predictor.predict import PackedNetwork, predict_blocks
from gpu.weights.weight_allocation import allocate_packed
from gpu.weights.weights import BesideWeights, ExpertWeights
from transfer.allocation import dtype_name
from transfer.arrays import ArraySpec
from transfer.exchange import new_slot
from transfer.expert_exchange import new_expert_slot
from transfer.partial import Partial
from transfer.slot_shape import SlotShape
from transfer.tier_shape import HOST_DIMS, MAX_HOST_GROUP, Rows, int4_row_bytes

SHARED_KIB = {80: 163, 89: 99}
TRITON_TYPES = {
    torch.bfloat16: "*bf16",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.uint8: "*u8",
    torch.bool: "*i1",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float8_e4m3fn: "*fp8e4nv",
}
COMPILE_OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion", "launch_pdl")
Launch = tuple[JITFunction, tuple[Any, ...], dict[str, Any]]
Source = tuple[ASTSource, tuple[tuple[str, Any], ...]]  # and the options with which it is compiled
SERVED = ("tiny", "llama-3.1-8b")
MIXTURES = ("qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-20b", "gemma-4-26b-a4b", "nemotron-3-nano-30b-a3b")
FAMILIES = ("phi-3-mini", "gemma-3-4b", "glm-4-9b")  # heads of 96 and of 256, and 16 to a KV head
WIDE = ("gemma-4-26b-a4b", "gemma-4-31b")  # of 512
COMPILED_DTYPES = (torch.bfloat16, torch.float32)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor of the card, fake where this runs."""
    return torch.empty(*shape, dtype=dtype, device="cuda")


def _norms(shape: Architecture, dtype: torch.dtype) -> None:
    x, weight = (
        empty(2, shape.hidden, dtype=dtype),
        empty(shape.hidden, dtype=dtype),
    )
    rms_norm(x, weight, 1e-5)
    for norm in (weight, empty(shape.hidden)):
        rms_norm(x, norm, 1e-5)
        rms_norm_add(x, norm, 1e-5, torch.empty_like(x))


def _swiglu(shape: Architecture, dtype: torch.dtype) -> None:
    for activation in ("silu", "gelu_tanh", "clamped_swiglu"):
        swiglu(empty(2, 2 * shape.intermediate, dtype=dtype), activation)
    swiglu(empty(2, shape.intermediate, dtype=dtype), "relu2")


def _adapters(shape: Architecture, dtype: torch.dtype) -> None:
    """Of rank 16: of a matrix of three ranges of rows, with its norm, and of an MLP."""

    def stacked(inner: int, *rows: int) -> StackedAdapters:
        ranges = tuple(AdapterRange(sum(rows[:number]), one, 32) for number, one in enumerate(rows))
        down, up = empty(32 * len(rows), inner, dtype=dtype), empty(32 * len(rows), max(rows), dtype=dtype)
        owners = torch.empty(32 * len(rows), dtype=torch.int64, device="cuda")
        spans = torch.empty(3, len(rows), 2, dtype=torch.int32, device="cuda")
        return StackedAdapters(down, up, owners, spans, ranges, 16)

    hidden, width, norm = empty(8, shape.hidden, dtype=dtype), shape.intermediate, empty(shape.hidden, dtype=dtype)
    ids = AdapterRows(torch.empty(8, 1, dtype=torch.int64, device="cuda"))
    qkv = stacked(shape.hidden, shape.num_heads * shape.dim, *[shape.num_kv_heads * shape.dim] * 2)
    for gain in (norm, norm.float()):
        made = empty(8, qkv.num_rows, dtype=dtype)
        add_raised(made, lower_normed(hidden, gain, 1e-5, qkv, ids)[1], empty(qkv.num_rows, dtype=dtype))
    gate_up, down = stacked(shape.hidden, width, width), stacked(width, shape.hidden)
    product, lowered = swiglu_raised(empty(8, 2 * width, dtype=dtype), lower(hidden, gate_up, ids), "silu", down)
    assert lowered is not None
    for one in (lowered, lower(product, down, ids), lower(product.float(), down, ids)):
        add_raised(torch.empty_like(hidden), one, hidden)
    swiglu_raised(empty(8, 2 * width, dtype=dtype), lower(hidden, gate_up, ids), "silu")


def _stored(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Of rows in pages, where this dtype computes."""
    return (dtype, torch.int8, torch.uint8) if dtype == torch.bfloat16 else (dtype,)


def _pages(shape: Architecture, stored: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    pages = torch.empty(8, shape.num_kv_heads, 16, width_of(stored, shape.dim), dtype=stored, device="cuda")
    return pages, torch.empty_like(pages)


def _rope(shape: Architecture, dtype: torch.dtype) -> None:
    qkv = torch.empty(2, (shape.num_heads + 2 * shape.num_kv_heads) * shape.dim, dtype=dtype, device="cuda")
    cos = empty(64, shape.dim // 2)
    ids = empty(2, dtype=torch.int32)
    table = empty(2, 16, dtype=torch.int32)
    for stored in _stored(dtype):
        pages = _pages(shape, stored)
        for norm in (None, empty(shape.dim, dtype=dtype), empty(shape.dim)):
            norms = None if norm is None else HeadNorms(norm, norm, 1e-5, shape.layer_pattern[0].value_norm)
            rope_kv_write(
                qkv,
                RowPlaces(cos, torch.empty_like(cos), ids.long(), ids.long(), ids),
                table,
                *pages,
                shape.num_heads,
                norms,
            )


def _attention(shape: Architecture, dtype: torch.dtype) -> None:
    query = empty(2, shape.num_heads, shape.dim, dtype=dtype)
    ids = empty(2, dtype=torch.int32)
    table = empty(2, 16, dtype=torch.int32)
    workspace = workspace_for(2, shape.num_heads, shape.num_kv_heads, shape.dim, 262_144, "cuda", has_far=True)
    bounds = empty(3, 2, 1, dtype=torch.int32).expand(3, 2, shape.num_heads)
    maxima = empty(2, shape.num_heads, 16)
    for stored in _stored(dtype):
        arguments = (PagedReads(query, *_pages(shape, stored), table, ids, ids, 1.0), workspace)
        paged_decode_attention(*arguments)
        paged_decode_attention(*arguments, bounds)
        paged_decode_attention(*arguments, bounds, has_far=True, maxima=maxima, is_counted=True)


def _latents(shape: Architecture, dtype: torch.dtype) -> None:
    """GLM-4.7-Flash's rows, with 20 heads, and DeepSeek-V3's 128; the shape says how many pages there are."""
    for heads, plain in ((20, 192), (128, 128)):
        latent = Latent(512, 64, plain, 128, None, 1.0, heads == 20)
        ints = empty(2, dtype=torch.int32)
        table = empty(2, 64, dtype=torch.int32)
        workspace = workspace_for(2, heads, 1, latent.rank, shape.max_context_tokens, "cuda")
        query = empty(2, heads, latent.row, dtype=dtype)
        tables = [empty(64, 32) for _ in range(2)]
        asked, row = empty(2, heads, latent.query_dim, dtype=dtype), empty(2, latent.row, dtype=dtype)
        places = [empty(2, dtype=torch.int64) for _ in range(2)]
        for stored in _stored(dtype):
            pages = empty(40, 1, 16, latent.row + 8 * (stored != dtype), dtype=stored)
            for is_counted in (False, True):
                reads = LatentReads(query, pages, table, ints, ints, 1.0, latent.rank)
                latent_decode_attention(reads, workspace, is_counted)
            latent_write(asked, row, empty(512, dtype=dtype), RowPlaces(*tables, *places, ints), table, pages, latent)
            if stored != dtype:
                gather_latents(pages, ints, empty(2, 16, latent.row, dtype=dtype), latent.rank)


def _projections(shape: Architecture, dtype: torch.dtype) -> None:
    if dtype != torch.bfloat16:
        return
    attention = shape.num_heads * shape.dim
    qkv_rows = attention + 2 * shape.num_kv_heads * shape.dim
    norm, wide = (empty(shape.hidden, dtype=kind) for kind in (dtype, torch.float32))

    def weight(rows: int, inner: int) -> torch.Tensor:
        return empty(rows, inner, dtype=dtype)

    for tokens in (1, 4):
        x = empty(tokens, shape.hidden, dtype=dtype)
        norm_linear(x, norm, 1e-5, weight(qkv_rows, shape.hidden))
        bias = empty(qkv_rows, dtype=dtype)
        norm_linear(x, wide, 1e-5, weight(qkv_rows, shape.hidden), bias)
        linear(empty(tokens, attention), weight(shape.hidden, attention), x)
        norm_gate_up_swiglu(x, norm, 1e-5, weight(2 * shape.intermediate, shape.hidden))
        norm_gate_up_swiglu(x, wide, 1e-5, weight(2 * shape.intermediate, shape.hidden), "gelu_tanh")
        norm_gate_up_swiglu(x, norm, 1e-5, weight(shape.intermediate, shape.hidden), "relu2")
        middle = empty(tokens, shape.intermediate, dtype=dtype)
        linear(middle, weight(shape.hidden, shape.intermediate), x)
        if tokens == 1:  # more go to cuBLAS
            logits_linear(x, weight(shape.vocab_size, shape.hidden))


def _tiled(shape: Architecture, dtype: torch.dtype) -> None:
    if dtype != torch.bfloat16:
        return
    attention, hidden, intermediate = shape.num_heads * shape.dim, shape.hidden, shape.intermediate

    def ways(rows: int, inner: int, tokens: int, itemsize: int, is_activated: bool) -> list[Tiles]:
        found = candidates(rows, inner, tokens, is_activated)
        cut = [fitted(one, tokens, itemsize, is_activated, SHARED_KIB[89] * 1024) for one in found]
        return [one for one in cut if one is not None]

    for tokens in (4, 32, 64):
        x = empty(tokens, hidden, dtype=dtype)
        for tiles in ways(hidden, attention, tokens, 4, False):
            linear(empty(tokens, attention), empty(hidden, attention, dtype=dtype), x, tiles)
        for tiles in ways(attention, hidden, tokens, 2, False):
            linear(x, empty(attention, hidden, dtype=dtype), None, tiles)
        for tiles in ways(intermediate, hidden, tokens, 2, True):
            gate_up_swiglu(x, empty(2 * intermediate, hidden, dtype=dtype), "silu", tiles)
        for tiles in ways(shape.vocab_size, hidden, tokens, 2, False):
            logits_linear(x, empty(shape.vocab_size, hidden, dtype=dtype), tiles)


def _rounded_tokens(shape: Architecture, dtype: torch.dtype) -> None:
    x = empty(2, shape.hidden, dtype=dtype)
    round_tokens(x)
    for norm in (empty(shape.hidden, dtype=dtype), empty(shape.hidden)):
        round_tokens(x, norm, 1e-5)
    round_tokens(empty(2, 2 * shape.intermediate, dtype=dtype), activation="silu")
    if dtype != torch.bfloat16 or shape.hidden < 4096:
        return
    stored = MatrixFormat("fp8", None, 4, rounds_tokens=True)
    for rows, activation in ((shape.hidden, None), (2 * shape.intermediate, "silu")):
        matrix = allocate_packed(rows, shape.hidden, stored, dtype, torch.device("cuda"), torch.bfloat16)
        for tokens in (16, 64):
            rounded = round_tokens(empty(tokens, shape.hidden, dtype=dtype))
            for one in candidates(rows, shape.hidden, tokens, activation is not None, 1):
                tiles = fitted(one, tokens, 1, activation is not None, SHARED_KIB[89] * 1024, 1)
                added = empty(tokens, rows, dtype=dtype) if activation is None else None
                fp8_linear(rounded, matrix, added, activation, tiles)


def _packed(shape: Architecture, dtype: torch.dtype) -> None:
    """Of kinds that files have, with zero points where they have them. Of one shape and type: each takes seconds."""
    if dtype != torch.bfloat16 or shape.hidden < 4096:
        return
    attention, device = shape.num_heads * shape.dim, torch.device("cuda")
    qkv_rows = attention + 2 * shape.num_kv_heads * shape.dim
    formats = (MatrixFormat("int4", 128, has_zeros=True), MatrixFormat("int8", 128),
               MatrixFormat("fp8", 128, 4, row_block=128), MatrixFormat("int4", 32, run=256),
               MatrixFormat("int8", 16, run=256), MatrixFormat("fp4", 16))  # fmt: skip
    for stored in formats:

        def matrix(rows: int, inner: int, stored: MatrixFormat = stored) -> Packed:
            return allocate_packed(rows, inner, stored, dtype, device, torch.bfloat16)

        for tokens in (1, 4, 40) if stored.kind == "int4" else (1, 16):
            x = empty(tokens, shape.hidden, dtype=dtype)
            norm = empty(shape.hidden, dtype=dtype)
            bias = empty(qkv_rows, dtype=dtype)
            packed_norm_linear(x, norm, 1e-5, matrix(qkv_rows, shape.hidden), bias)
            packed_linear(empty(tokens, attention), matrix(shape.hidden, attention), x)
            packed_norm_gate_up(x, norm, 1e-5, matrix(2 * shape.intermediate, shape.hidden), "silu")
            if stored.has_zeros:
                packed_norm_gate_up(x, norm, 1e-5, matrix(shape.intermediate, shape.hidden), "relu2")
            middle = empty(tokens, shape.intermediate, dtype=dtype)
            packed_linear(middle, matrix(shape.hidden, shape.intermediate), x)
            packed_logits(x, matrix(shape.vocab_size, shape.hidden))
        if stored.has_zeros or stored.kind == "fp8":  # tiles of 64 tokens, of few rows and of many
            packed_linear(
                empty(MOST_PACKED_TOKENS, shape.intermediate, dtype=dtype),
                matrix(shape.hidden, shape.intermediate),
            )
            packed_logits(empty(64, shape.hidden, dtype=dtype), matrix(shape.vocab_size, shape.hidden))
        unpack(matrix(shape.hidden, shape.intermediate))


def _experts(shape: Architecture, dtype: torch.dtype) -> None:
    """Of the largest mixtures that are served: few tokens, and tiles of every size; matrices as files have them."""
    spec = next((one for one in shape.layer_pattern if one.experts is not None), None)
    experts = None if spec is None else spec.experts
    if spec is None or experts is None:
        return
    device, rows = torch.device("cuda"), experts.num_experts * spec.first_rows(experts.intermediate)
    is_wide = experts.num_experts > 8 and dtype == torch.bfloat16
    formats = [MatrixFormat("int4", 128, has_zeros=True), MatrixFormat("int8", 128),
               MatrixFormat("fp8", 128, 4, row_block=128), MatrixFormat("int4", 32, run=256),
               MatrixFormat("int8", 16, run=256)]  # fmt: skip
    activation, biases = spec.activation, [None] * 3
    if experts.has_biases:
        formats = [MatrixFormat("fp4", 32, scale_bytes=1)]
        sizes = (experts.num_experts, rows, experts.num_experts * shape.hidden)
        biases = [torch.empty(size, dtype=dtype, device=device) for size in sizes]
    norm, router = (torch.empty(*size, dtype=dtype, device=device) for size in ((shape.hidden,), (
        experts.num_experts, shape.hidden)))  # fmt: skip
    beside, gains = None, None
    if experts.beside_mlp:
        formats, gains = [MatrixFormat("int4", 64, has_zeros=True)], empty(experts.num_experts)
        beside = BesideWeights(*(empty(shape.hidden) for _ in range(4)), gains)
    for stored in (None, *(formats if is_wide else ())):
        sizes = (rows, shape.hidden), (experts.num_experts * shape.hidden, experts.intermediate)
        gate_up, down = (
            torch.empty(*size, dtype=dtype, device=device) if stored is None
            else allocate_packed(*size, stored, dtype, device, torch.bfloat16) for size in sizes
        )  # fmt: skip
        mlp = ExpertMlp(ExpertWeights(router, gate_up, down, None, *biases, beside), experts, activation)
        mlp(torch.empty(1, shape.hidden, dtype=dtype, device=device), norm, 1e-5)
        places = torch.empty(experts.num_experts, dtype=torch.int32, device=device)
        far, others = FarExperts(gate_up, down, places), FarExperts(None, None, places)
        x = torch.empty(1, shape.hidden, dtype=dtype, device=device)
        for there in (far, others) if stored is None else ():
            matrices = ExpertMatrices(gate_up, down, there, *biases[1:], gains)
            logits = x.new_empty(1, experts.num_experts, dtype=torch.float32)
            product = gate_up_rows(x, logits, matrices, experts, activation)
            down_rows(*product, matrices, x, experts)
        for tokens in {1, min(max(1, experts.num_experts // experts.per_token - 1), LEAST_PAIRS), LEAST_PAIRS}:
            x = torch.empty(tokens, shape.hidden, dtype=dtype, device=device)
            few = pair_few(x.new_empty(tokens, experts.num_experts, dtype=torch.float32), experts, stored is not None)
            for there in (None, *([far] if isinstance(gate_up, Packed) else []), others):
                matrices = ExpertMatrices(gate_up, down, there, *biases[1:], gains)
                down_tiles(gate_up_tiles(x, few, matrices, experts, activation), few, matrices, x, experts)
        means = (1, 32, 64, 128) if stored is None or stored.kind == "int4" else (1, 64)
        for mean in means:
            tokens = max(LEAST_PAIRS + 1, mean * experts.num_experts // experts.per_token)
            x = torch.empty(tokens, shape.hidden, dtype=dtype, device=device)
            pairs = pair_up(*choose(x.new_empty(tokens, experts.num_experts, dtype=torch.float32), experts), experts,
                            stored is not None)  # fmt: skip
            for there in (None, far, others) if mean == means[1] else (None,):
                matrices = ExpertMatrices(gate_up, down, there, *biases[1:], gains)
                down_tiles(gate_up_tiles(x, pairs, matrices, experts, activation), pairs, matrices, x, experts)


def _folded(shape: Architecture, dtype: torch.dtype) -> None:
    for experts in {spec.experts for spec in shape.layers if spec.experts is not None and spec.experts.is_folded}:
        logits = empty(1, experts.num_experts)
        for correction in (None, logits[0]):
            fold_choice(logits, experts, correction)


def _race(shape: Architecture, dtype: torch.dtype) -> None:
    race(empty(2, shape.vocab_size), empty(2, dtype=torch.int64))


def _merge(shape: Architecture, dtype: torch.dtype) -> None:
    if dtype == torch.float32:
        out = empty(2, shape.num_heads, shape.dim)
        lse = empty(2, shape.num_heads)
        transfer.merge.merge_outputs([out, out], [lse, lse])


def _sinks(shape: Architecture, dtype: torch.dtype) -> None:
    sinks = empty(shape.num_heads, dtype=dtype)
    for out in {dtype, torch.float32}:
        add_sinks(empty(2, shape.num_heads, shape.dim, dtype=out), empty(2, shape.num_heads), sinks)


def _add_shared(shape: Architecture, dtype: torch.dtype) -> None:
    rows = [empty(3, shape.hidden, dtype=dtype) for _ in range(3)]
    add_shared(*rows, empty(1, shape.hidden, dtype=dtype))


def _recurrent(shape: Architecture, dtype: torch.dtype) -> None:
    own = Recurrent(16, 48, 128, 128, 4)
    gates, conv = empty(96, shape.hidden, dtype=dtype), empty(own.conv_width, 1, 4, dtype=dtype)
    weights = RecurrentWeights(gates, conv, empty(48), empty(48), empty(128, dtype=dtype))
    slots = empty(2, dtype=torch.int32)
    for state in (torch.float32, torch.bfloat16):
        sizes = (3, 48, 128, 128), (3, 8, own.conv_width), (3, 4, 96)
        held = LayerStates(*(empty(*size, dtype=one) for size, one in zip(sizes, (state, dtype, dtype), strict=True)))
        cells = empty(2, dtype=torch.int64)
        for rows in (1, 2, 3):  # a quarter of a head's values, a half, all
            ints, longs = empty(rows, dtype=torch.int32), empty(rows, dtype=torch.int64)
            made = empty(rows, own.projected_width, dtype=dtype), empty(rows, 96, dtype=dtype)
            delta_step(*made, weights, own, 1e-6, held, ints, ints, longs, ints)
        layers = LayerStates(
            *(empty(1, *size, dtype=one) for size, one in zip(sizes, (state, dtype, dtype), strict=True))
        )
        stacked = StackedWeights(empty(1, own.conv_width, 4, dtype=dtype), None, empty(1, 48), empty(1, 48))
        delta_commit(stacked, own, layers, slots, cells, cells, cells)


def _mamba(shape: Architecture, dtype: torch.dtype) -> None:
    own, slots = Recurrent(8, 64, 128, 64, 4, kind="mamba2"), empty(2, dtype=torch.int32)
    conv, conv_bias = empty(own.conv_width, 1, 4, dtype=dtype), empty(own.conv_width, dtype=dtype)
    weights = RecurrentWeights(
        empty(0, shape.hidden, dtype=dtype), conv, empty(64), empty(64), empty(4096, dtype=dtype), conv_bias, empty(64)
    )
    cells, planned = empty(2, dtype=torch.int64), _planned()
    for state in (torch.float32, torch.bfloat16):
        sizes = (3, 64, 128, 64), (3, 8, own.conv_width), (3, 4, 64)
        held, layers = (
            LayerStates(*(
                empty(*front, *size, dtype=one) for size, one in zip(sizes, (state, dtype, dtype), strict=True)
            ))
            for front in ((), (1,))
        )  # fmt: skip
        rows = [empty(count, own.matrix_rows, dtype=dtype).split([own.projected_width, 64], 1) for count in (1, 2, 100)]
        for own_rows in rows[:2]:  # a half of a head's values, all
            ints, longs = empty(len(own_rows[0]), dtype=torch.int32), empty(len(own_rows[0]), dtype=torch.int64)
            delta_step(*own_rows, weights, own, 1e-6, held, ints, ints, longs, ints)
        stacked = StackedWeights(
            empty(1, own.conv_width, 4, dtype=dtype), empty(1, own.conv_width, dtype=dtype), empty(1, 64), empty(1, 64)
        )
        delta_commit(stacked, own, layers, slots, cells, cells, cells)
        delta_prefill(*rows[2], weights, own, 1e-6, held, planned)


def _planned() -> PlannedSpans:
    return PlannedSpans(
        100, empty(2, 6, dtype=torch.int32), ((0, 2, empty(1, 2, dtype=torch.int32)),),
        empty(2, 8, dtype=torch.int64), (), (),
    )  # fmt: skip


def _short(shape: Architecture, dtype: torch.dtype) -> None:
    own, ints = Recurrent(1, 1, 0, 2048, 3, kind="short_conv"), empty(2, dtype=torch.int32)
    conv, rings = empty(2048, 1, 3, dtype=dtype), empty(3, 8, 2048, dtype=dtype)
    short_step(empty(2, 6144, dtype=dtype), conv, own, rings, ints, ints, empty(2, dtype=torch.int64))


def _recurrent_prompts(shape: Architecture, dtype: torch.dtype) -> None:
    own = Recurrent(16, 48, 128, 128, 4)
    gates, conv = empty(96, shape.hidden, dtype=dtype), empty(own.conv_width, 1, 4, dtype=dtype)
    weights = RecurrentWeights(gates, conv, empty(48), empty(48), empty(128, dtype=dtype))
    mixed = empty(100, own.conv_width + own.value_width, dtype=dtype)
    for state in (torch.float32, torch.bfloat16):
        held = LayerStates(empty(3, 48, 128, 128, dtype=state), empty(3, 8, own.conv_width, dtype=dtype), gates)
        delta_prefill(mixed, empty(100, 96, dtype=dtype), weights, own, 1e-6, held, _planned())


def _rows(shape: Architecture, dtype: torch.dtype) -> None:
    keys = empty(shape.num_kv_heads, 64, shape.dim, dtype=dtype)
    centre, scale = (
        empty(shape.num_kv_heads, shape.dim),
        empty(shape.num_kv_heads),
    )
    centre_of(keys)
    for stored, scales in ((torch.bfloat16, (None, None)), (torch.int8, (scale, centre))):
        rows = torch.empty_like(keys, dtype=stored)
        offload_rows(keys, keys, centre, *scales, rows, rows)
        restore_rows(rows, rows, centre, *scales, keys, keys)
    stored_rows = empty(shape.num_kv_heads, 64, int4_row_bytes(shape.dim), dtype=torch.uint8)
    for middle in (centre, None):
        store_int4(keys, middle, stored_rows)
        restore_int4(stored_rows, middle, keys)


def _fused(shape: Architecture, dtype: torch.dtype) -> None:
    rows = empty(512, shape.num_kv_heads, shape.dim, dtype=dtype)
    fused = empty(512, shape.num_kv_heads, shape.dim + 8, dtype=torch.uint8)
    fuse_rows(rows, fused)
    widen_rows(fused, rows)


def _codes(shape: Architecture, dtype: torch.dtype) -> None:
    planes = Hyperplanes(empty(10, shape.dim, 160, dtype=dtype), 150)
    codes = empty(shape.num_kv_heads, 150, 64, dtype=torch.uint16)
    for stored in (dtype, torch.int8):
        encode_keys(empty(shape.num_kv_heads, 64, shape.dim, dtype=stored), planes, codes)
    encode_queries(empty(2, shape.num_heads, shape.dim, dtype=dtype), planes)


def _pack(shape: Architecture, dtype: torch.dtype) -> None:
    slot = new_slot(4, SlotShape(shape.num_heads, shape.dim, 150, dtype_name(dtype)), torch.device("cpu"))
    query = empty(2, shape.num_heads, shape.dim, dtype=dtype)
    codes = empty(2, shape.num_heads, 150, dtype=torch.uint16)
    counters = new_counters(slot, torch.device("cuda"))
    exchange_pack(query, codes, counters, slot)
    slot = new_slot(
        4,
        SlotShape(shape.num_heads, shape.dim, 0, dtype_name(dtype), kv_heads=2, exclusion_blocks=64),
        torch.device("cpu"),
    )
    excluded = empty(2, 2, 2, dtype=torch.int32)
    exchange_pack(query, None, counters, slot, empty(2, shape.num_heads, dtype=torch.uint8), excluded)
    await_answer(counters, slot)


def _scatter(shape: Architecture, dtype: torch.dtype) -> None:
    addresses = empty(2, dtype=torch.int64)
    for kind in (torch.int8, torch.int16):
        source = empty(2, shape.num_kv_heads, 150, 128, dtype=kind)
        scatter(source, addresses, (2048 * 150, 2048, 1), True)


def _gather(shape: Architecture, dtype: torch.dtype) -> None:
    keys = empty(shape.num_kv_heads, 4, 16, shape.dim, dtype=dtype)
    ids = empty(4, dtype=torch.int32)
    for stored in _stored(dtype):
        gather_pages(*_pages(shape, stored), ids, keys, torch.empty_like(keys))
        if stored != dtype:  # on the way down
            gather_pages(*_pages(shape, stored), ids, keys.float(), keys.float())


def _coded(shape: Architecture, dtype: torch.dtype) -> None:
    rows = empty(shape.num_kv_heads, 32, shape.dim, dtype=dtype)
    whole, token = (empty(count, dtype=torch.int64) for count in (2, 32))
    out = empty(32, shape.dim, dtype=dtype)
    for stored in _stored(dtype)[1:]:
        pages, _ = _pages(shape, stored)
        write_rows(rows, whole, None, pages)
        write_rows(rows, token, token, pages)
        read_rows(pages, token, out)


def _pieces(shape: Architecture, dtype: torch.dtype) -> None:
    out = empty(16, shape.num_heads, shape.dim, dtype=dtype)
    lse = empty(16, shape.num_heads)
    for sides in (2, 7):
        merge_attended([out] * sides, [lse] * sides, dtype)


def _prefill(shape: Architecture, dtype: torch.dtype) -> None:
    if dtype != torch.bfloat16 or shape.dim not in CONFIGS:  # plain torch, or refused
        return
    query = empty(256, shape.num_heads, shape.dim, dtype=dtype)
    keys = empty(shape.num_kv_heads, 1024, shape.dim, dtype=dtype)
    rows = query_sparse_attention(query, keys, keys, 768, 16, 64, MomoSettings().k, 1.0)
    lists = unite(rows, 12, 8, 2, 64)
    block_sparse_attention(query, keys, keys, 768, 128, 64, lists, 1.0)


def _scattered(shape: Architecture, dtype: torch.dtype) -> None:
    if dtype != torch.bfloat16:  # plain torch
        return
    query = empty(256, shape.num_heads, shape.dim, dtype=dtype)
    keys = empty(shape.num_kv_heads, 1024, shape.dim, dtype=dtype)
    positions = empty(256, dtype=torch.int64)
    scattered_attention_kernel(query, keys, keys, positions, 1.0, None)


def _mac(shape: Architecture, dtype: torch.dtype) -> None:
    size = (2, shape.num_heads, 1024)
    query = empty(2, shape.num_heads, shape.dim, dtype=dtype)
    ids, cells = empty(2, dtype=torch.int32), empty(2, dtype=torch.int64)
    skips = empty(3, 2, dtype=torch.int32)
    limits = Limits(16, 256, 50.0, 1024, 4096, 1024, 0.5)
    flags = empty(2, dtype=torch.uint8)
    is_matching, counts = ids.new_empty(1), empty(NUM_COUNTS, dtype=torch.int64)
    out, lse = empty(query.shape), empty(2, shape.num_heads)
    for kept in (torch.float32, torch.bfloat16):
        ring = Ring(
            empty(*size, shape.dim, dtype=torch.bfloat16), empty(size),
            empty(*size, shape.dim, dtype=kept), empty(size),
            empty(size, dtype=torch.int32), empty(size, dtype=torch.uint8),
        )  # fmt: skip
        own = RowRings(ring, ids, cells)
        matched = match(query, own, skips, limits, is_matching, counts, shape.num_kv_heads)
        for filled in (None, Partial(out, lse)):
            side = Partial(out, lse)
            complete(side, side, filled, query, matched, own, limits, flags)


def _predict(shape: Architecture, dtype: torch.dtype) -> None:
    first, second = (empty(*size, dtype=dtype) for size in ((16, 64), (3, 64, 32)))
    wide = empty(32)
    network = PackedNetwork(first, second, wide, torch.empty_like(wide), empty(1))
    heads = empty(shape.num_heads, dtype=torch.int32)
    scores = empty(shape.num_heads, 256)
    served = PredictedSettings.model_fields["predict_every"].default
    for stored, moved in ((torch.bfloat16, 1), (torch.uint8, 1), (torch.uint8, served)):
        history = empty(shape.num_heads, 64 + moved, 256, dtype=stored)
        predict_blocks(history, heads, heads, heads, scores, network, moved)


def _blocks(shape: Architecture, dtype: torch.dtype) -> None:
    rows, places, slots, kv_heads = 2, 3 * shape.num_kv_heads, 128, shape.num_kv_heads
    numbers = empty(places, slots, dtype=torch.int32)
    bits = empty(places, 256, dtype=torch.int32)
    rings, cells = (
        empty(rows, dtype=torch.int32),
        empty(rows, dtype=torch.int64),
    )
    skips = empty(3, rows, dtype=torch.int32)
    counts = empty(NUM_FETCH_COUNTS, dtype=torch.int64)
    lies = empty(3, 11, 256, dtype=torch.int64)
    history = empty(places, 65, 8192, dtype=torch.uint8)
    maxima, lse = (
        empty(rows, shape.num_heads, 8192),
        empty(rows, shape.num_heads),
    )
    listed = list_blocks(numbers, bits, rings, skips, kv_heads, counts)
    fetched = empty(rows * kv_heads, shape.group, slots)
    own = HistoryRows(rings, cells, skips)
    for beside in (None, Fetched(fetched, listed, lse)):
        note_step(history, maxima, lse, beside, own, 4, kv_heads)
    step: Any = SimpleNamespace(num_rows=rows, slots=rings, positions=cells, skips=skips)  # a StepRows
    turns = Turns(PredictedSettings(weights=Path("unread")), 3, kv_heads, 4, 8192, torch.device("cuda"))
    turns.of_rows(step, rings, empty(1, dtype=torch.bool), shape.num_heads)
    scores, is_in = empty(places, 8192), empty(places, dtype=torch.bool)
    limits = empty(places, dtype=torch.int32)
    fresh = choose_blocks(scores, limits, numbers, bits, is_in, counts)
    query = empty(rows, shape.num_heads, shape.dim, dtype=dtype)
    open_parts = empty(1, dtype=torch.int32)
    for is_int8 in (False, True):
        for stored in _stored(dtype):
            keys = torch.empty(places * slots, 1, 16, width_of(stored, shape.dim), dtype=stored, device="cuda")
            for late in (None, Lateness(open_parts, bits, counts)):
                fetch_blocks(numbers, fresh, lies, keys, keys, kv_heads, is_int8, late)
        look_at_blocks(
            Blocks(history, scores, numbers, bits, keys, keys, lies), query, lse, own, 64, 0.1, is_int8, counts
        )


def _empty_arrays(specs: dict[str, ArraySpec]) -> dict[str, torch.Tensor]:
    return {name: empty(*spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in specs.items()}


def _index(shape: Architecture, dtype: torch.dtype) -> None:
    rows, rings, slots = 2, 3, 256
    query, lse = empty(rows, shape.num_heads, shape.dim, dtype=dtype), empty(rows, shape.num_heads)
    numbers = empty(rings, dtype=torch.int32)
    of_places = empty(rings * shape.num_kv_heads, dtype=torch.int32)
    step = RingStep(numbers, numbers, of_places, of_places, numbers)
    counts = empty(NUM_INDEX_COUNTS, dtype=torch.int64)
    wanted = empty(rows, shape.num_heads, dtype=torch.uint8)
    rotation = empty(shape.dim, shape.dim)
    formats: tuple[tuple[Literal[2, 3, 4, 8], Literal[2, 4], Rows], ...] = (
        (4, 2, "bfloat16"), (4, 2, "int8"), (4, 2, "int4"), (2, 4, "bfloat16"), (8, 2, "int8"), (3, 2, "bfloat16"),
    )  # fmt: skip
    for key_bits, value_bits, stored_rows in formats:
        settings = IndexedSettings(key_bits=key_bits, value_bits=value_bits, budget_share=1.0, budget_tokens=slots)
        arrays = page_arrays(settings, shape, 1, 7) | ring_arrays(settings, shape, 1, rings)
        rows_in_slots = empty(1, rings * shape.num_kv_heads, slots, shape.dim, dtype=dtype)
        index = Index(**_empty_arrays(arrays), keys=rows_in_slots, values=rows_in_slots)
        work = Work(**_empty_arrays(work_arrays(settings, shape, rings)))
        layout = Layout(rotation, key_bits, value_bits, shape.num_kv_heads, stored_rows)
        copy_pieces(index, 1, 2, layout)
        index_tokens(index, 1, 0, 4096, layout)
        pages = [Pages(*2 * [empty(64, shape.num_kv_heads, 16, width_of(stored, shape.dim), dtype=stored)],
                       empty(4, 256, dtype=torch.int32), 16) for stored in _stored(dtype)]  # fmt: skip
        for own_pages in pages:
            index_pages(index, 1, 2, 0, 4096, [own_pages], layout)
        of_layer = {name: ArraySpec(spec.shape[1:], spec.dtype) for name, spec in arrays.items()}
        rows_of_layer = empty(rings * shape.num_kv_heads, slots, shape.dim, dtype=dtype)
        own = Index(**_empty_arrays(of_layer), keys=rows_of_layer, values=rows_of_layer)
        score_tokens(query, lse, own, work, step, layout)
        choose_tokens(own, work, step, layout)
        give_slots(own, work, step, layout)
        estimate_rest(own, work, step, layout)
        for read in (None, *pages):
            attend_chosen(query, own, work, step, layout, counts, read)
        found = join_parts(work, numbers, wanted, step, layout, (rows, shape.num_heads, shape.dim), counts)
        own_specs = {
            name: spec
            if name in ("of_rings", "exceeds", "is_over", "limits", "factor")
            else ArraySpec(spec.shape[1:], spec.dtype)
            for name, spec in report_arrays(shape, 1, rings).items()
        }
        report = Report(**_empty_arrays(own_specs))
        report_errors(query, found, found, wanted, work, report, step, layout)
        for read in (None, *pages):
            read_again(query, found, own, work, report, step, layout, read)


def _linked(shape: Architecture, dtype: torch.dtype) -> None:
    if shape.num_heads // shape.num_kv_heads > MAX_HOST_GROUP or shape.dim not in HOST_DIMS:
        return
    for rows, is_int8 in ((1, True), (8, False)):
        query = empty(rows, shape.num_heads, shape.dim, dtype=dtype)
        chunks, ints = empty(rows, COLUMNS, CHUNKS, dtype=torch.int64), empty(rows, dtype=torch.int32)
        numbers = rows * shape.num_heads * CHUNKS
        work = empty(numbers * shape.dim), empty(numbers)
        wanted = None if rows == 1 else empty(rows, shape.num_heads, dtype=torch.uint8)
        linked_attention(query, LinkedChunks(chunks, ints, ints), 0.1, shape.num_kv_heads, is_int8, wanted, work)


def _experts_in_host_memory(shape: Architecture, dtype: torch.dtype) -> None:
    chosen = empty(4, 8, dtype=torch.int32)
    rows = empty(4, dtype=torch.int32)
    for of_rows in (rows, None):
        listed = list_experts(chosen, 40, 128, 32, of_rows)
    words = 2 * shape.hidden * shape.intermediate * dtype.itemsize // 4
    source, slots = (empty(count, words, dtype=torch.int32) for count in (88, 32))
    fetch_experts(source, slots, listed)


def _request_for_experts(shape: Architecture, dtype: torch.dtype) -> None:
    slot = new_expert_slot(32, shape.hidden, 8, torch.device("cpu"))
    counters = new_counters(slot, torch.device("cuda"))
    x = empty(4, shape.hidden, dtype=dtype)
    ids, shares = (empty(4, 8, dtype=kind) for kind in (torch.int32, torch.float32))
    for slots in (empty(4, dtype=torch.int32), None):
        request_experts(x, ids, shares, 34, slots, counters, slot)
    add_answer(x.float(), slot, dtype)


# What launches every kernel as a step does. A kernel that none of them launches fails its tests.
CALLS: tuple[Callable[[Architecture, torch.dtype], None], ...] = (
    _norms, _swiglu, _adapters, _rope, _attention, _latents, _projections, _tiled, _packed, _experts, _folded, _race,
    _rounded_tokens,
    _merge, _sinks, _add_shared, _recurrent, _mamba, _recurrent_prompts, _short, _rows, _fused, _codes, _pack, _scatter,
    _gather, _coded, _pieces, _prefill, _scattered, _mac, _predict, _blocks, _index, _linked, _experts_in_host_memory,
    _request_for_experts,
)  # fmt: skip


def _kernels() -> Iterator[tuple[Any, str, JITFunction]]:
    """Every jitted function that is launched (its name ends in `_kernel`), with its module."""
    found = (*pkgutil.walk_packages(gpu.operations.__path__, "gpu.operations."),
             *pkgutil.walk_packages(gpu.methods.__path__, "gpu.methods."),
             *pkgutil.iter_modules(gpu.predictor.__path__, "gpu.predictor."))  # fmt: skip
    names = [module.name for module in found]
    for module in map(importlib.import_module, [*names, "transfer.merge"]):
        for name, value in vars(module).items():
            if isinstance(value, JITFunction) and name.endswith("_kernel"):
                yield module, name, value


KERNELS = sorted({name for _, name, _ in _kernels()})


class Recorder:
    """Stands in for a kernel and keeps its launches: `recorder[grid](*args, **options)`."""

    def __init__(self, kernel: JITFunction, launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(size > 0 for size in grid)
        return lambda *args, **options: self.launches.append((self.kernel, args, options))


def _source(kernel: JITFunction, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[ASTSource, dict[str, int]]:
    """What Triton's launcher would compile: pointers and integers divisible by 16 are marked so and ones are constants,
    but for those that the kernel says are not to be looked at.
    """
    options = dict(options)
    compile_options = {name: options.pop(name) for name in COMPILE_OPTIONS if name in options}
    assert set(options) <= set(kernel.arg_names), "what the kernel knows"
    options = {name: options[name] for name in kernel.arg_names if name in options}
    signature, constants, attributes = {}, {}, {}
    for index, (name, value) in enumerate({**dict(zip(kernel.arg_names, args, strict=False)), **options}.items()):
        is_looked_at = not kernel.params[index].do_not_specialize
        if name in options or (isinstance(value, int) and value == 1 and is_looked_at):
            signature[name], constants[(index,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], attributes[(index,)] = TRITON_TYPES[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i32" if value < 2**31 else "i64"
            if value % 16 == 0 and is_looked_at:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    assert list(signature) == kernel.arg_names
    return ASTSource(kernel, signature, constants, attributes), compile_options


@pytest.fixture(scope="module")
def launches() -> list[Launch]:
    """Each distinct launch of the shapes that are served."""
    return _record(CALLS, SERVED) + _record([_experts], MIXTURES)


@pytest.fixture(scope="module")
def family_launches() -> list[Launch]:
    """Of other families' shapes."""
    calls = (_rope, _attention, _projections, _swiglu, _mac, _rows, _codes, _prefill, _pack, _gather, _merge, _pieces,
             _fused, _scattered, _index)  # fmt: skip
    return _record(calls, FAMILIES)


def _record(calls: Iterable[Callable[[Architecture, torch.dtype], None]], shapes: Sequence[str]) -> list[Launch]:
    recorded: list[Launch] = []
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode():
        properties = SimpleNamespace(multi_processor_count=128, shared_memory_per_block_optin=99 * 2**10)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        for module, name, kernel in list(_kernels()):
            patch.setattr(module, name, Recorder(kernel, recorded))
        for call in calls:
            for name in shapes:
                for dtype in COMPILED_DTYPES:
                    call(NAMED_SHAPES[name], dtype)
    return recorded


# Those with launches that take seconds, up to 40 in float32: one in bfloat16, and all of them in the long tests.
SLOW = (
    "_adapter_down_kernel", "_attend_kernel", "_balanced_kernel", "_block_sparse_kernel", "_chunk_kernel",
    "_delta_chunk_kernel", "_delta_inputs_kernel", "_delta_scan_kernel", "_delta_step_kernel", "_estimate_kernel",
    "_fetch_kernel", "_gate_up_kernel", "_index_kernel", "_latent_split_kernel", "_look_kernel", "_match_kernel",
    "_packed_expert_tiles_kernel", "_packed_tiles_kernel", "_predict_kernel", "_query_sparse_kernel",
    "_read_again_kernel", "_rope_kv_write_kernel", "_scattered_attention_kernel", "_score_kernel", "_split_kernel",
    "_tiles_kernel", "_unite_kernel", "_write_rows_kernel",
)  # fmt: skip
QUICK = ("_swiglu_kernel", "_merge_kernel")  # every launch, on the card with more shared memory too


FAMILY_KERNELS = (
    "_rope_kv_write_kernel", "_split_kernel", "_reduce_kernel", "_gemv_kernel", "_swiglu_kernel",
    "_balanced_kernel", "_match_kernel", "_complete_kernel", "_offload_kernel", "_restore_kernel", "_sum_kernel",
    "_encode_kernel", "_query_sparse_kernel", "_block_sparse_kernel", "_pack_kernel", "_gather_pages_kernel",
    "_merge_kernel", "_merge_attended_kernel", "_fuse_kernel", "_widen_kernel", "_scattered_attention_kernel",
    "_index_kernel", "_score_kernel", "_choose_tokens_kernel", "_estimate_kernel", "_attend_kernel",
)  # fmt: skip
WIDE_KERNELS = (
    "_rope_kv_write_kernel", "_split_kernel", "_reduce_kernel", "_balanced_kernel", "_merge_pieces_kernel",
    "_gather_pages_kernel", "_read_rows_kernel", "_write_rows_kernel", "_merge_attended_kernel", "_merge_kernel",
    "_match_kernel", "_bounds_kernel", "_complete_kernel",
)  # fmt: skip
QUICK_OF_FAMILIES = ("_rope_kv_write_kernel", "_offload_kernel")


@pytest.mark.parametrize("name", KERNELS)
def test_a_launch_with_each_constant_and_type_compiles_within_the_shared_memory_of_the_smaller_card(name, launches):
    _compile(_fewest(_sources(name, launches)), 89)


@pytest.mark.parametrize("name", QUICK_OF_FAMILIES)
def test_a_launch_of_other_families_with_each_constant_and_type_compiles_likewise(name, family_launches):
    _compile(_fewest(_sources(name, family_launches)), 89)


@pytest.fixture(scope="module")
def wide_launches() -> list[Launch]:
    """Of shapes with heads of 512, which the host does not read: so not all kernels take them."""
    return _record((_rope, _attention, _gather, _coded, _pieces, _merge, _mac), WIDE)


@pytest.mark.parametrize("name", WIDE_KERNELS)
def test_a_launch_of_heads_of_512_with_each_constant_and_type_compiles_likewise(name, wide_launches):
    _compile(_fewest(_sources(name, wide_launches)), 89)


@pytest.mark.long
@pytest.mark.parametrize("name", WIDE_KERNELS)
def test_every_launch_of_heads_of_512_compiles_likewise(name, wide_launches):
    for capability in SHARED_KIB:
        _compile(_sources(name, wide_launches), capability)


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        pytest.param(name, capability, marks=[] if name in QUICK else pytest.mark.long)
        for name in KERNELS
        for capability in SHARED_KIB
    ],
)
def test_every_launch_compiles_within_the_shared_memory_of_the_card(name, capability, launches):
    _compile(_sources(name, launches), capability)


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILY_KERNELS)
def test_every_launch_of_other_families_compiles_likewise(name, family_launches):
    _compile(_sources(name, family_launches), 89)


def _sources(name: str, launches: list[Launch]) -> list[Source]:
    """Return what a kernel's launches compile, each once."""
    found: dict[str, Source] = {}
    for kernel, args, options in launches:
        if kernel.__name__ == name:
            source, compile_options = _source(kernel, args, options)
            key = f"{source.signature} {source.constants} {source.attrs} {compile_options}"
            found.setdefault(key, (source, tuple(compile_options.items())))
    assert found, f"{name} was not launched: add a call of it to CALLS"
    return list(found.values())


def _fewest(sources: list[Source]) -> list[Source]:
    """Return a few sources that have every value of every constant and type; those of the larger models come first.
    Of a SLOW kernel return one.
    """
    if sources[0][0].name in SLOW:
        return [max(reversed(sources), key=lambda one: [*one[0].signature.values()].count("*bf16"))]
    left = {source: _choices(*source) for source in reversed(sources)}
    missing, chosen = set().union(*left.values()), []
    while missing:
        chosen.append(max(left, key=lambda source: len(left[source] & missing)))
        missing -= left[chosen[-1]]
    return chosen


def _choices(source: ASTSource, compile_options: tuple[tuple[str, Any], ...]) -> set[tuple[str, Any]]:
    """Return the value of each constant, the type of each other argument, and the options."""
    names = source.fn.arg_names
    constants = {(names[place], value) for (place,), value in source.constants.items()}
    return {*source.signature.items(), *constants, *compile_options}


def _compile(sources: list[Source], capability: int) -> None:
    for source, compile_options in sources:
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(compile_options))
        assert compiled.metadata.shared <= SHARED_KIB[capability] * 1024, (source.name, source.constants)


def test_tiles_of_every_format_are_compiled_with_experts_left_out_and_far_away(launches):
    """As steps have them whose experts the CPU computes, and as those that fetch; few tokens and many."""
    found = {True: set(), False: set()}
    for kernel, _, options in launches:
        if kernel.__name__ == "_packed_expert_tiles_kernel" and options["HAS_FAR"]:
            stored = options["KIND"], options["GROUP"], options["NUM_RUNS"] > 0
            found[options["LEAVES_OUT"]].add((*stored, options["ROUTES"], options["ACTIVATION"]))
    assert found[True] == found[False]
    assert len({(kind, group) for kind, group, *_ in found[True]}) == 7  # runs of int4 and int8 are groups of their own
    gated, ungated = 7 * 3, 5 * 2  # of tokens that find their pairs, and of listed ones; downs, which are the same
    assert len(found[True]) == gated + ungated


@pytest.mark.parametrize("tokens", [1, 16])
def test_numbers_of_an_output_matrix_in_groups_of_16_do_not_go_through_shared_memory(tokens, launches):
    """GGUF's Q6_K. What lies there is what was copied ahead; one layout is turned into another for the result alone."""
    kernel, args, options = next(
        launch for launch in launches if launch[0].__name__ == "_packed_tiles_kernel"
        and launch[2]["GROUP"] == 16 and launch[1][6:8] == (tokens, NAMED_SHAPES[SERVED[1]].vocab_size)
    )  # fmt: skip
    source, compile_options = _source(kernel, args, options)
    code = triton.compile(source, target=GPUTarget("cuda", 89, 32), options=compile_options).asm["ttgir"]
    assert "ttg.async_copy_global_to_local" in code
    assert not re.findall(r"ttg\.local_alloc %\w+", code)
    assert code.count("ttg.convert_layout") == 1
    products = re.findall(r"tt\.dot [^\n]*?x(\d+)xbf16, #ttg\.dot_op<\{opIdx = 0[^}]*?kWidth = (\d+)", code)
    assert products
    assert all(4 * int(width) <= int(columns) for columns, width in products)  # else four threads hold a column twice


@pytest.mark.parametrize("capability", [80, 89, 90])
def test_int8_codes_are_multiplied_as_they_are(capability, launches):
    """Nothing widens them, and what is copied ahead is read without another copy in shared memory."""
    kernel, args, options = next(
        launch for launch in launches
        if launch[0].__name__ == "_split_kernel" and launch[2]["INTEGERS"] and launch[2]["DIM"] == 128
    )  # fmt: skip
    source, compile_options = _source(kernel, args, options)
    code = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=compile_options).asm["ptx"]
    products = re.findall(r"mma\.sync\S*m16n8k\d+\S*", code)
    assert products
    assert all("m16n8k32" in product and "s32.s8.s8.s32" in product for product in products)
    assert "fma.rn.bf16x2" not in code


@pytest.mark.parametrize("name", ["_pack_kernel", "_request_experts_kernel"])
def test_an_asks_flag_is_stored_once_behind_its_row_and_nothing_goes_over_the_link_and_back(name, launches):
    kernel, args, options = next(launch for launch in launches if launch[0].__name__ == name)
    source, compile_options = _source(kernel, args, options)
    lines = triton.compile(source, target=GPUTarget("cuda", 89, 32), options=compile_options).asm["ptx"].splitlines()
    (flag,) = (number for number, line in enumerate(lines) if "st.release.sys" in line)
    before = max(number for number, line in enumerate(lines[:flag]) if "st.global" in line)
    assert any("bar.sync" in line for line in lines[before:flag])
    assert not any("atom." in line for line in lines)


def test_one_thread_looks_whether_blocks_are_late_and_all_threads_of_their_program_do_as_it_saw(launches):
    """The step may end between two looks: some warps would write rows of a block that others have left out."""
    kernel, args, options = next(
        launch for launch in launches if launch[0].__name__ == "_fetch_kernel" and launch[2]["LEAVES"]
    )
    source, compile_options = _source(kernel, args, options)
    assert compile_options["num_warps"] > 1
    lines = triton.compile(source, target=GPUTarget("cuda", 89, 32), options=compile_options).asm["ptx"].splitlines()
    (looks,) = (number for number, line in enumerate(lines) if re.search(r"volatile|relaxed", line))
    branch = next(number for number, line in enumerate(lines) if number > looks and re.search(r"@%p\d+ bra", line))
    assert re.match(r"\s*@%p", lines[looks])
    told = [found[0] for line in lines[looks:branch] if (found := re.search(r"st\.shared|bar\.sync|ld\.shared", line))]
    assert told == ["st.shared", "bar.sync", "ld.shared"]


def test_a_unit_of_momo_runs_what_another_one_compiled():
    """Of any number of query blocks at any place: the first long prompt finds what was compiled at start."""
    sources: dict[str, set[str]] = {}
    for begin, tokens in ((24_576, 8_064), (32_768, 8_192), (128, 128), (0, 2_048)):
        for kernel, args, options in _record([lambda *_: _momo_unit(begin, tokens)], SERVED[:1]):  # noqa: B023
            source, compile_options = _source(kernel, args, options)
            sources.setdefault(kernel.__name__, set()).add(f"{source.constants} {source.attrs} {compile_options}")
    assert {name: len(kinds) for name, kinds in sources.items()} == dict.fromkeys(sources, 1)
    assert len(sources) == 3


def _momo_unit(begin: int, tokens: int) -> None:
    query = empty(tokens, 32, 128, dtype=torch.bfloat16)
    keys = empty(8, begin + tokens, 128, dtype=torch.bfloat16)
    rows = query_sparse_attention(query, keys, keys, begin, 16, 64, MomoSettings().k, 1.0)
    lists = unite(rows, begin // 64, 8, 2, 64)
    block_sparse_attention(query, keys, keys, begin, 128, 64, lists, 1.0)


def test_experts_of_any_number_of_tokens_are_run_by_what_was_compiled_at_start():
    """Sizes of tiles and of sorted blocks hang on that number; a deployment's first requests have any."""

    def sources(run: Callable[[ExpertMlp, torch.Tensor], None]) -> set[str]:
        def call(shape: Architecture, dtype: torch.dtype) -> None:
            spec = next(one for one in shape.layer_pattern if one.experts is not None)
            experts, first = spec.experts, spec.first_rows(spec.experts.intermediate)
            gate_up, down = (
                empty(experts.num_experts * rows, inner, dtype=dtype)
                for rows, inner in ((first, shape.hidden), (shape.hidden, experts.intermediate))
            )
            router, norm = (empty(*size, shape.hidden, dtype=dtype) for size in (
                (experts.num_experts,), ()))  # fmt: skip
            run(ExpertMlp(ExpertWeights(router, gate_up, down), experts, spec.activation), norm)

        found = set()
        for kernel, args, options in _record([call], ("tiny-qwen3-moe", *MIXTURES)):
            source, compile_options = _source(kernel, args, options)
            found.add(f"{kernel.__name__} {source.signature} {source.constants} {source.attrs} {compile_options}")
        return found

    def all_sizes(mlp: ExpertMlp, norm: torch.Tensor) -> None:
        for tokens in (*range(1, 80), *range(80, 140, 7), *range(140, 8192, 311), 8192):
            mlp(torch.empty(tokens, len(norm), dtype=norm.dtype, device="cuda"), norm, 1e-5)

    assert sources(all_sizes) == sources(lambda mlp, norm: mlp.warm_up(8192, norm))


def test_a_kernel_that_needs_too_much_shared_memory_is_seen(launches):
    kernel, args, options = next(launch for launch in launches if launch[0].__name__ == "_split_kernel")
    source, _ = _source(kernel, args, {**options, "BLOCK_TOKENS": 256})
    compiled = triton.compile(source, target=GPUTarget("cuda", 80, 32), options={"num_warps": 4, "num_stages": 5})
    assert compiled.metadata.shared > SHARED_KIB[89] * 1024

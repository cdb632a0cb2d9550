"""Time attention of one layer on the device: of a decode step over pages, and of a prompt's prefill."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.benchmark_rows import require
from bench.op.frame import COLD_BYTES, SEED, Asked, Call, Case, Work, relative_error
from gpu.attention.prefill_query import PrefillQuery
from gpu.methods.momo.query_blocks import Momo
from gpu.methods.momo.settings import MomoSettings
from gpu.operations.decode_attention.decode_launch import PagedReads
from gpu.operations.decode_attention.paged_decode_attention import paged_decode_attention, workspace_for
from gpu.operations.kv.kv_rows import CODE_DTYPES, SCALE_BYTES, read_cells, write_rows
from gpu.prefill.dense import Dense

KV_KINDS = ("plain", "fp8", "int8")
PREFILL_KINDS = ("dense", "momo")
PAGE_TOKENS = 16
UNIT_TOKENS = 8192  # queries of a prompt's last prefill unit
PAGES_AT_ONCE = 4096  # pages that are encoded together
GATE_HEADS, GATE_TOKENS = 4, 512
MOST_ERROR = 2e-2  # relative error of an output in bf16


def decode_cases(asked: Asked) -> Iterator[Case]:
    """Yield cases of decode attention over whole contexts, by format of keys and values, and by batch."""
    for kind in asked.choose(KV_KINDS):
        for batch in asked.batches:
            yield _decode_case(asked, kind, batch)


def _decode_case(asked: Asked, kind: str, batch: int) -> Case:
    shape, device, tokens = asked.shape, asked.device, asked.tokens
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.dim
    row_bytes = dim * asked.dtype.itemsize if kind == "plain" else dim + SCALE_BYTES
    num_bytes = 2 * batch * tokens * kv_heads * row_bytes
    layers = 1 + COLD_BYTES // num_bytes if device.type == "cuda" else 1
    pages_each = -(-tokens // PAGE_TOKENS)
    generator = torch.Generator(device).manual_seed(SEED)

    def make_pages() -> Tensor:
        plain = torch.empty(batch * pages_each, kv_heads, PAGE_TOKENS, dim, dtype=asked.dtype, device=device)
        plain.normal_(generator=generator)
        return plain if kind == "plain" else encode_pages(plain, CODE_DTYPES[kind])

    pages = [(make_pages(), make_pages()) for _ in range(layers)]
    table = torch.randperm(batch * pages_each, generator=generator, device=device).int().view(batch, -1)
    query = torch.empty(batch, heads, dim, dtype=asked.dtype, device=device).normal_(generator=generator)
    slots = torch.arange(batch, dtype=torch.int32, device=device)
    lengths = torch.full((batch,), tokens, dtype=torch.int32, device=device)
    workspace = workspace_for(batch, heads, kv_heads, dim, tokens, device)

    def attend(keys: Tensor, values: Tensor) -> Tensor:
        near = paged_decode_attention(PagedReads(query, keys, values, table, slots, lengths, dim**-0.5), workspace).near
        return near.out

    def check() -> None:
        """Compare some heads of the first row with float64 attention over the decoded pages."""
        got, offsets = attend(*pages[0])[0], torch.arange(PAGE_TOKENS, device=device)
        for head in range(min(GATE_HEADS, heads)):
            keys, values = (
                read_cells(part, table[0].long()[:, None], head * kv_heads // heads, offsets, torch.float64)
                for part in pages[0]
            )
            keys, values = (part.reshape(-1, dim)[:tokens] for part in (keys, values))
            wanted = (keys @ query[0, head].double() * dim**-0.5).softmax(0) @ values
            error = relative_error(got[head], wanted)
            require(error < MOST_ERROR, f"decode attention, {kind}: head {head} is {error:.1e} from float64's")

    return Case(
        f"decode attention, {kind}", f"{batch} x {tokens:,}, {heads}/{kv_heads} heads", Work(num_bytes, asked.stream),
        check=check, run=lambda: [attend(*layer) for layer in pages], times=layers,
        peer_name="torch's attention over contiguous rows", peer=_attend_contiguous(asked, batch),
        config={"kv": kind, "batch": batch, "tokens": tokens},
    )  # fmt: skip


def encode_pages(pages: Tensor, stored: torch.dtype) -> Tensor:
    """Return pages with the same rows in 8 bits. PAGES_AT_ONCE pages are encoded at a time."""
    coded = torch.zeros(*pages.shape[:3], pages.shape[3] + SCALE_BYTES, dtype=stored, device=pages.device)
    for first in range(0, len(pages), PAGES_AT_ONCE):
        own = pages[first : first + PAGES_AT_ONCE]
        ids = torch.arange(first, first + len(own), device=pages.device)
        write_rows(own.transpose(0, 1).flatten(1, 2), ids, None, coded)
    return coded


def _attend_contiguous(asked: Asked, batch: int) -> Call:
    """Return a call that attends to contiguous rows in the compute dtype, a group's heads as queries of a KV head."""
    shape, options = asked.shape, {"dtype": asked.dtype, "device": asked.device}
    query = torch.randn(batch, shape.num_kv_heads, shape.group, shape.dim, **options)
    keys, values = (torch.randn(batch, shape.num_kv_heads, asked.tokens, shape.dim, **options) for _ in range(2))
    return lambda: F.scaled_dot_product_attention(query, keys, values)


def prefill_cases(asked: Asked) -> Iterator[Case]:
    """Yield a prompt's last prefill unit by method. All methods read the same random keys and values."""
    shape = asked.shape
    block = MomoSettings().query_block
    tokens = max(1, asked.tokens // block) * block  # whole query blocks
    begin = (tokens - 1) // UNIT_TOKENS * UNIT_TOKENS
    unit = _make_unit(asked, begin, tokens)
    dense = Dense()
    dense.choose(unit.keys, unit.values, shape.num_heads, UNIT_TOKENS)
    momo = Momo(MomoSettings(dense_until_tokens=0, dense_layers=0), dense)
    sides = {"dense": dense, "momo": momo}
    pairs = len(unit.query) * (begin + len(unit.query) / 2)
    row_bytes = shape.dim * asked.dtype.itemsize
    num_bytes = (2 * tokens * shape.num_kv_heads + 2 * len(unit.query) * shape.num_heads) * row_bytes
    for kind in asked.choose(PREFILL_KINDS):
        yield Case(
            f"prefill attention, {kind}", f"{len(unit.query):,} of {tokens:,}, {shape.num_heads} heads",
            Work(num_bytes, asked.stream, 4 * shape.num_heads * shape.dim * pairs),
            check=lambda: _check_dense(asked), run=lambda side=sides[kind]: side.attend(unit),
            peer_name=None if kind == "dense" else "dense attention of the same unit",
            peer=None if kind == "dense" else lambda: dense.attend(unit), as_graph=False,
            config={"method": kind, "tokens": tokens, "unit_tokens": UNIT_TOKENS},
        )  # fmt: skip


def _make_unit(asked: Asked, begin: int, end: int) -> PrefillQuery:
    shape, options = asked.shape, {"dtype": asked.dtype, "device": asked.device}
    query = torch.randn(end - begin, shape.num_heads, shape.dim, **options)
    keys, values = (torch.randn(shape.num_kv_heads, end, shape.dim, **options) for _ in range(2))
    positions = torch.arange(begin, end, device=asked.device)
    # one block more than the unit has, since methods read a prompt's last block in full
    return PrefillQuery(
        0, query, query, keys, values, positions, begin, end + MomoSettings().query_block, shape.dim**-0.5, None
    )


def _check_dense(asked: Asked) -> None:
    """Compare dense attention of a short unit with float64 attention."""
    unit = _make_unit(asked, GATE_TOKENS // 2, GATE_TOKENS)
    group = asked.shape.group
    key, value = (part.double().repeat_interleave(group, 0) for part in (unit.keys, unit.values))
    logits = unit.query.double().transpose(0, 1) @ key.transpose(1, 2) * unit.scale
    hidden = torch.arange(GATE_TOKENS, device=asked.device) > unit.positions[:, None]
    wanted = (logits.masked_fill(hidden, -torch.inf).softmax(-1) @ value).transpose(0, 1)
    error = relative_error(Dense().attend(unit).out, wanted)
    require(error < MOST_ERROR, f"dense attention of a unit is {error:.1e} from float64's")

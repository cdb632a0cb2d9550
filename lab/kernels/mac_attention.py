"""Time MAC-Attention of one layer of decode, part by part, beside plain attention over the same lengths: `mac`.

A graph holds some layers in a row, each with rings, hits and pages of its own, as a step does, so nothing waits in the
cache for the next replay. How hits come about: rings hold random queries, which match nothing, and for each head that
is to hit, a copy of its query, moved a little, stands at the gap that was drawn; so the kernels that serve are timed as
they are. The peer is the fastest of cuDNN's and FlashAttention's decode attention over contiguous keys and values, a
group's heads as its queries. A sample of each layer's heads is compared with float64, and every match with the one that
was meant, before anything is timed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from bench.benchmark_rows import Row, Timing, measure, require
from bench.rates import device_name, measure_device_rates
from cpu.memory_rates import measure_host_rates
from gpu.methods.mac.complete import complete
from gpu.methods.mac.match import NUM_COUNTS, Limits, Matched, match
from gpu.methods.mac.rings import Ring
from gpu.operations.decode_attention.paged_decode_attention import (
    DevicePartials,
    Workspace,
    paged_decode_attention,
    workspace_for,
)
from gpu.operations.kv.kv_rows import CODE_DTYPES, SCALE_BYTES, has_codes, read_cells, write_rows
from transfer.partial import Partial

DIM, PAGE_TOKENS, SINK, TAU = 128, 16, 16, 0.45
NOISE = 0.1  # of a query that matches, a component: a tenth of the distance that is allowed
COLD_BYTES = 256 * 2**20  # several times the cache of any card
MOST_LAYERS = 16
WARMUPS, REPEATS = 2, 7
PAGES_AT_ONCE = 4096  # made codes of
GATE_HEADS = 8  # of a layer, compared with float64
MOST_ERROR = 2e-2  # relative norm of an output in bf16
PARTS = ("match", "attention", "complete")


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a step. capacity: entries of a ring (the paper's K); band: its r; outs: of summaries in the ring."""

    heads: int
    kv_heads: int
    capacity: int
    band: int
    outs: torch.dtype

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def limits(self) -> Limits:
        distance2 = 2 * DIM * (1 - TAU) ** 2
        # the entry of gap K is the one that a step overwrites: with it, a replay would match itself
        return Limits(SINK, self.band, distance2, self.capacity - 1, 4 * self.capacity, 0, 1.0)


@dataclass(frozen=True, slots=True)
class Pages:
    """Keys and values of `batch` contexts of `tokens`, `[num_pages, kv_heads, page_tokens, dim]`, and a workspace."""

    keys: Tensor
    values: Tensor
    dtype: torch.dtype
    batch: int
    tokens: int
    workspace: Workspace

    def peers(self, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
        """Return a query, and the same memory as if it were contiguous: `[batch, kv_heads, group or tokens, dim]`."""
        rows = (self.batch, shape.kv_heads)
        query = torch.randn(*rows, shape.group, DIM, device=self.keys.device).to(self.keys.dtype)
        used = self.batch * self.tokens * shape.kv_heads * DIM
        return query, *(part.view(-1)[:used].view(*rows, self.tokens, DIM) for part in (self.keys, self.values))


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of a step: queries before RoPE and after (here the same), rings, pages, and the entries to be found."""

    query: Tensor
    ring: Ring
    page_table: Tensor
    wanted: Tensor


@dataclass(frozen=True, slots=True)
class Fixed:
    """What all layers of a step share."""

    rings: Tensor
    cells: Tensor
    skips: Tensor
    slots: Tensor
    context_lens: Tensor
    is_matching: Tensor
    counts: Tensor
    is_estimate: Tensor


def make_pages(
    shape: Shape, batch: int, tokens: int, device: torch.device, kv: Literal["plain", "fp8", "int8"] = "plain"
) -> Pages:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    size = (batch * -(-tokens // PAGE_TOKENS), shape.kv_heads, PAGE_TOKENS, DIM)
    keys, values = (torch.empty(size, dtype=dtype, device=device).normal_() for _ in range(2))
    if kv != "plain":
        keys, values = make_codes_of(keys, CODE_DTYPES[kv]), make_codes_of(values, CODE_DTYPES[kv])
    workspace = workspace_for(batch, shape.heads, shape.kv_heads, DIM, tokens, device, has_far=True)
    return Pages(keys, values, dtype, batch, tokens, workspace)


def make_codes_of(pages: Tensor, stored: torch.dtype) -> Tensor:
    """Return pages of the same rows, some at a time."""
    coded = torch.zeros(*pages.shape[:3], DIM + SCALE_BYTES, dtype=stored, device=pages.device)
    for first in range(0, len(pages), PAGES_AT_ONCE):
        own = pages[first : first + PAGES_AT_ONCE]
        ids = torch.arange(first, first + len(own), device=pages.device)
        write_rows(own.transpose(0, 1).flatten(1, 2), ids, None, coded)
    return coded


def draw_gaps(shape: Shape, batch: int, rate: float, is_shared: bool, generator: torch.Generator) -> Tensor:
    """Return cells back to what a head matches, int64 `[batch, heads]`, 0 where it misses: `rate` of all heads, uniform
    in [1, K); with `is_shared`, drawn for each KV head.
    """
    heads = shape.kv_heads if is_shared else shape.heads
    device, count = generator.device, batch * heads
    gaps = torch.randint(1, shape.capacity, (count,), generator=generator, device=device)
    gaps[torch.randperm(count, generator=generator, device=device)[round(rate * count) :]] = 0
    return gaps.view(batch, heads).repeat_interleave(shape.heads // heads, 1)


def make_layer(shape: Shape, pages: Pages, rate: float, is_shared: bool, generator: torch.Generator) -> Layer:
    device, batch, m = pages.keys.device, pages.batch, pages.tokens - 1
    size = (batch, shape.heads, shape.capacity)

    def normal(*of: int) -> Tensor:
        return torch.randn(*of, generator=generator, device=device)

    query = normal(batch, shape.heads, DIM).to(torch.bfloat16)
    queries = torch.empty(*size, DIM, dtype=torch.bfloat16, device=device).normal_(generator=generator)
    gaps = draw_gaps(shape, batch, rate, is_shared, generator)
    entry = (m - gaps) % shape.capacity
    row, head = (gaps > 0).nonzero().unbind(1)
    near = query.float() + NOISE * normal(*query.shape)
    queries[row, head, entry[row, head]] = near[row, head].to(torch.bfloat16)
    cells = m - 1 - (m - 1 - torch.arange(shape.capacity, device=device)) % shape.capacity
    ring = Ring(
        queries,
        queries.float().square().sum(-1),
        torch.empty(*size, DIM, dtype=shape.outs, device=device).normal_(generator=generator),
        normal(*size) + 10,
        cells.int().expand(size).contiguous(),
        torch.zeros(size, dtype=torch.uint8, device=device),
    )
    order = torch.randperm(len(pages.keys), generator=generator, device=device)
    table = order.int().view(batch, -1)
    return Layer(query.to(pages.dtype), ring, table, torch.where(gaps > 0, entry, -1))


def make_fixed(pages: Pages) -> Fixed:
    device, batch = pages.keys.device, pages.batch
    rows = torch.arange(batch, dtype=torch.int32, device=device)
    return Fixed(
        rings=rows.clone(),
        cells=torch.full((batch,), pages.tokens - 1, dtype=torch.int64, device=device),
        skips=torch.full((3, batch), SINK, dtype=torch.int32, device=device),
        slots=rows,
        context_lens=torch.full((batch,), pages.tokens, dtype=torch.int32, device=device),
        is_matching=torch.ones(1, dtype=torch.int32, device=device),
        counts=torch.zeros(NUM_COUNTS, dtype=torch.int64, device=device),
        is_estimate=torch.zeros(batch, dtype=torch.uint8, device=device),
    )


@dataclass(frozen=True, slots=True)
class Path:
    """The attention of a layer, as a step does it."""

    shape: Shape
    pages: Pages
    fixed: Fixed

    def match(self, layer: Layer) -> Matched:
        fixed = self.fixed
        return match(layer.query, layer.ring, fixed.rings, fixed.cells, fixed.skips, self.shape.limits,
                     fixed.is_matching, fixed.counts, self.shape.kv_heads)  # fmt: skip

    def attend(self, layer: Layer, bounds: Tensor | None) -> DevicePartials:
        fixed, pages = self.fixed, self.pages
        return paged_decode_attention(
            layer.query, pages.keys, pages.values, layer.page_table, fixed.slots, fixed.context_lens, DIM**-0.5,
            pages.workspace, bounds, has_far=bounds is not None,
        )  # fmt: skip

    def complete(self, layer: Layer, reading: DevicePartials, matched: Matched) -> Partial:
        fixed = self.fixed
        assert reading.far is not None
        return complete(reading.near, reading.far, None, layer.query, matched, layer.ring, fixed.rings, fixed.cells,
                        self.shape.limits, fixed.is_estimate)  # fmt: skip

    def whole(self, layer: Layer) -> Partial:
        matched = self.match(layer)
        return self.complete(layer, self.attend(layer, matched.bounds), matched)


def mac_rows(
    shape: Shape, lengths: Sequence[int], batches: Sequence[int], rates: Sequence[float], shared: Sequence[bool],
    device: torch.device, console: Console,
) -> list[Row]:  # fmt: skip
    """Return a row for each length, batch, hit rate and way to draw gaps. Raises GateError."""
    is_host = device.type != "cuda"
    measured = measure_host_rates(torch.get_num_threads(), gib=0.25) if is_host else measure_device_rates(device)
    gb_s = measured["host_stream_gb_s" if is_host else "device_stream_gb_s"]
    rows = []
    for batch in batches:
        for tokens in lengths:
            pages = make_pages(shape, batch, tokens, device)
            peers = time_peers(shape, pages)
            peer = min(peers, key=peers.__getitem__)
            plain_us = 1e3 * pages_bytes(shape, batch * tokens) / gb_s / 1e6
            console.print(f"{tokens:,} tokens, batch {batch}: KV at {gb_s:,.0f} GB/s takes {plain_us:.1f} us; "
                          + ", ".join(f"{name} {us:.1f}" for name, us in peers.items()), highlight=False)  # fmt: skip
            for is_shared in shared:
                for rate in rates:
                    times, bytes_of = time_path(shape, pages, rate, is_shared, device)
                    floors = {part: num_bytes / gb_s * 1e-3 for part, num_bytes in bytes_of.items()}
                    total, floor_us = times.pop("whole"), sum(floors.values())
                    ways = "a group" if is_shared else "a head"
                    console.print(
                        f"  hits {rate:4.0%} {ways:7}  {1e3 * total.ms:8.1f} us, {peers[peer] / total.ms / 1e3:5.2f} x "
                        f"{peer}; floor {floor_us:7.1f}; "
                        + ", ".join(f"{part} {1e3 * times[part].ms:.1f} ({floors[part]:.1f})" for part in PARTS),
                        highlight=False,
                    )
                    rows.append(Row(
                        name="mac attention of a layer",
                        shape=f"{batch} x {tokens:,}, {shape.heads}/{shape.kv_heads}, hits {rate:.0%} {ways}",
                        device=device_name(device), ms=total.ms, p10=total.p10, p90=total.p90,
                        floor=f"{sum(bytes_of.values()) / 1e6:.1f} MB at {gb_s:,.0f} GB/s", floor_ms=floor_us / 1e3,
                        peer="the faster of torch's decode attentions", peer_ms=peers[peer] / 1e3, rates=measured,
                        extras={"peer": peer, **{f"{name}_us": us for name, us in peers.items()},
                                **{f"{part}_us": 1e3 * times[part].ms for part in PARTS},
                                **{f"{part}_floor_us": floors[part] for part in PARTS}},
                        config={"capacity": shape.capacity, "band": shape.band, "outs": str(shape.outs), "sink": SINK,
                                "rate": rate, "is_shared": is_shared},
                    ))  # fmt: skip
            del pages
    return rows


def pages_bytes(shape: Shape, cells: float, pages: Tensor | None = None) -> float:
    """Of keys and values of cells that all KV heads read, in codes as `pages` are, else in bfloat16."""
    row_bytes = DIM + SCALE_BYTES if pages is not None and has_codes(pages) else 2 * DIM
    return 2 * row_bytes * shape.kv_heads * cells


def count_layers(shape: Shape, batch: int) -> int:
    """So many that what all heads read at the least is not in the cache any more when it is read again."""
    least = batch * (shape.heads * shape.capacity * 2 * DIM + int(pages_bytes(shape, shape.band)))
    return max(2, min(MOST_LAYERS, -(-COLD_BYTES // least)))


def time_path(
    shape: Shape, pages: Pages, rate: float, is_shared: bool, device: torch.device
) -> tuple[dict[str, Timing], dict[str, float]]:
    """Return milliseconds of a layer, `whole` and by part; and the bytes that each part must move."""
    generator = torch.Generator(device).manual_seed(7)
    path = Path(shape, pages, make_fixed(pages))
    count = count_layers(shape, pages.batch)
    layers = [make_layer(shape, pages, rate, is_shared, generator) for _ in range(count)]
    check_layer(path, layers[0])
    matched = [path.match(layer) for layer in layers]
    require(
        all(torch.equal(found.entries.long(), layer.wanted) for found, layer in zip(matched, layers, strict=True)),
        "other entries were matched than those that were to be",
    )
    readings = [path.attend(layer, found.bounds) for layer, found in zip(layers, matched, strict=True)]

    def all_layers(call: Callable[[int], object]) -> Callable[[], object]:
        return lambda: [call(index) for index in range(count)]

    calls = {
        "whole": all_layers(lambda index: path.whole(layers[index])),
        "match": all_layers(lambda index: path.match(layers[index])),
        "attention": all_layers(lambda index: path.attend(layers[index], matched[index].bounds)),
        "complete": all_layers(lambda index: path.complete(layers[index], readings[index], matched[index])),
    }
    times = {name: time_graph(call, count, device) for name, call in calls.items()}
    read = sum(cells_read(shape, pages.tokens, found) for found in matched) / count
    summary_bytes = DIM * (2 if shape.outs == torch.bfloat16 else 4)
    entries = pages.batch * shape.heads * shape.capacity
    ends = pages.batch * shape.heads * (4 * 3 * DIM + 2 * 2 * DIM + (1 + rate) * summary_bytes)
    attention = pages_bytes(shape, read, pages.keys) / shape.kv_heads
    return times, {"match": entries * (2 * DIM + 8), "attention": attention, "complete": ends}


def cells_read(shape: Shape, tokens: int, matched: Matched) -> float:
    """Of all KV heads of all rows: from the first that a head of the group reads behind the sink to the end."""
    skip_begin, skip_end, _ = matched.bounds.view(3, -1, shape.kv_heads, shape.group)
    skipped = (skip_end - skip_begin).amin(-1)  # of a miss, none
    return float((tokens - skipped).sum())


def time_graph(call: Callable[[], object], layers: int, device: torch.device) -> Timing:
    """Return milliseconds of one layer: of a CUDA graph's replays, or of the call itself."""
    if device.type != "cuda":
        timing = measure(call, device, 1, 3)
        return Timing(timing.ms / layers, timing.p10 / layers, timing.p90 / layers)
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()
    timing = measure(graph.replay, device, WARMUPS, REPEATS)
    del kept
    return Timing(timing.ms / layers, timing.p10 / layers, timing.p90 / layers)


def time_peers(shape: Shape, pages: Pages) -> dict[str, float]:
    """Return microseconds of plain attention over all tokens, by way; one that torch refuses for this shape is left
    out.
    """
    query, keys, values = pages.peers(shape)
    device, scale, aten = keys.device, DIM**-0.5, torch.ops.aten
    if device.type != "cuda":
        return {"sdpa": 1e3 * measure(lambda: F.scaled_dot_product_attention(query, keys, values), device, 1, 3).ms}
    single = query.reshape(pages.batch, shape.heads, 1, DIM)
    ways: dict[str, Callable[[], object]] = {
        "flash": lambda: aten._scaled_dot_product_flash_attention(query, keys, values, 0.0, False, False, scale=scale),
        "cudnn": lambda: aten._scaled_dot_product_cudnn_attention(
            query, keys, values, None, False, 0.0, False, False, scale=scale
        ),
        "cudnn of single queries": lambda: aten._scaled_dot_product_cudnn_attention(
            single, keys, values, None, False, 0.0, False, False, scale=scale
        ),
        "flash of single queries": lambda: aten._flash_attention_forward(
            single.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), None, None, 1, pages.tokens, 0.0,
            False, False, scale=scale,
        ),
    }  # fmt: skip
    times = {}
    for name, way in ways.items():
        try:
            times[name] = 1e3 * time_graph(way, 1, device).ms
        except RuntimeError as error:  # of torch's own dispatch: no kernel for this shape
            print(f"no {name}: {str(error).splitlines()[0]}")
    return times


def check_layer(path: Path, layer: Layer) -> None:
    """The gate: eq. (7) in float64 of some heads, hits and misses, of the first row."""
    shape, m = path.shape, path.pages.tokens - 1
    ring, query = layer.ring, layer.query[0].double()
    entries, kept = layer.wanted[0].tolist(), (ring.outs[0].double(), ring.lses[0].double())
    pages = layer.page_table[0].long()
    heads = sorted(range(shape.heads), key=lambda head: (entries[head] >= 0, head))
    chosen = heads[: GATE_HEADS // 2] + heads[-GATE_HEADS // 2 :]
    wanted, offsets = [], torch.arange(PAGE_TOKENS, device=pages.device)
    for head in chosen:
        keys, values = (
            read_cells(part, pages[:, None], head // shape.group, offsets, torch.float64).reshape(-1, DIM)[: m + 1]
            for part in (path.pages.keys, path.pages.values)
        )
        logits = keys @ query[head] * DIM**-0.5
        sides, lses = values, logits
        if entries[head] >= 0:
            p = m - (m - entries[head]) % shape.capacity
            begin = p + 1 - shape.band
            own = kept[0][head, entries[head]][None], kept[1][head, entries[head]][None]
            sides = torch.cat([values[:SINK], own[0], values[begin:]])
            lses = torch.cat([logits[:SINK], own[1], logits[begin:]])
        wanted.append(lses.softmax(0) @ sides)
    expected = torch.stack(wanted)
    got = path.whole(layer).out[0, chosen].double()
    error = float(((got - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
    require(error < MOST_ERROR, f"mac attention is {error:.1e} off eq. (7)")

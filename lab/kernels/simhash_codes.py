"""Times SimHash codes of a layer's keys and of a decode step's queries against their products alone: `simhash`.

It refuses to know tables and sampling; the shape is a layer of Llama 3.1 8B. Codes are compared with the plain ones
before anything is timed. Rows of queries count 1,000 launches out of a CUDA graph: their milliseconds are microseconds.
"""

from collections.abc import Callable

import torch
from rich.console import Console
from torch import Tensor

from bench.rates import device_name, measure_device_rates
from bench.rows import Row, Timing, announce, measure, require, summarise
from gpu.methods.sampled.encode import Hyperplanes, arrange, encode_keys, encode_queries
from gpu.methods.sampled.projections import Projections, draw_projections, encode_reference

HEADS, KV_HEADS, DIM = 32, 8, 128
LAUNCHES = 1000
LAUNCHES_PER_GRAPH = 50
CHECKED_ROWS = 512
LEAST_AGREEMENT = 0.999  # a product within some ulps of zero falls to one side or the other
WARMUPS, REPEATS = 3, 10


def simhash_rows(
    tokens: int, batches: tuple[int, ...], bits: int, tables: int, device: torch.device, console: Console
) -> list[Row]:
    """Rows of keys `[kv_heads, tokens, dim]`, and of queries of each batch size. Raises GateError."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    projections = draw_projections(DIM, bits, tables, 0, dtype, device)
    rates = measure_device_rates(device) if device.type == "cuda" else {}
    rows = [_key_row(tokens, projections, rates, device, console)]
    return rows + [_query_row(batch, projections, rates, device, console) for batch in batches]


def _key_row(
    tokens: int, projections: Projections, rates: dict[str, float], device: torch.device, console: Console
) -> Row:
    planes = arrange(projections)
    keys = torch.randn(KV_HEADS, tokens, DIM, device=device).to(planes.planes.dtype)
    codes = torch.empty(KV_HEADS, projections.num_tables, tokens, dtype=torch.uint16, device=device)
    encode_keys(keys, planes, codes)
    _require_codes(codes[-1, :, -CHECKED_ROWS:].t(), keys[-1, -CHECKED_ROWS:], projections)
    floor, floor_ms = _floor(KV_HEADS * tokens, keys.nbytes + codes.nbytes, planes, rates)
    if floor_ms is not None:
        announce(console, "simhash of keys", floor, floor_ms)
    timing = measure(lambda: encode_keys(keys, planes, codes), device, WARMUPS, REPEATS)
    peer = measure(lambda: [head @ projections.matrix for head in keys], device, WARMUPS, REPEATS)
    return _row("simhash of keys", f"{KV_HEADS} x {tokens:,} x {DIM}", timing, peer, floor, floor_ms, projections,
                rates, device)  # fmt: skip


def _query_row(
    batch: int, projections: Projections, rates: dict[str, float], device: torch.device, console: Console
) -> Row:
    planes = arrange(projections)
    queries = torch.randn(batch, HEADS, DIM, device=device).to(planes.planes.dtype)
    _require_codes(encode_queries(queries, planes).flatten(0, 1), queries.flatten(0, 1), projections)
    num_bytes = queries.nbytes + 2 * batch * HEADS * projections.num_tables + planes.planes.nbytes
    floor, floor_ms = _floor(batch * HEADS, num_bytes, planes, rates)
    if floor_ms is not None:
        floor_ms *= LAUNCHES
        announce(console, "simhash of queries, 1,000 launches", floor, floor_ms)
    timing = _time_launches(lambda: encode_queries(queries, planes), device)
    peer = _time_launches(lambda: queries.flatten(0, 1) @ projections.matrix, device)
    return _row("simhash of queries", f"1,000 launches of {batch} x {HEADS} x {DIM}", timing, peer, floor, floor_ms,
                projections, rates, device)  # fmt: skip


def _require_codes(codes: Tensor, rows: Tensor, projections: Projections) -> None:
    wanted = encode_reference(rows, projections).cpu().to(torch.int32)
    agreement = (codes.cpu().to(torch.int32) == wanted).float().mean().item()
    require(agreement > LEAST_AGREEMENT, f"{agreement:.4%} of the codes are the plain ones")


def _floor(rows: int, num_bytes: int, planes: Hyperplanes, rates: dict[str, float]) -> tuple[str, float | None]:
    """The slower of the bytes and the products, which the machine's own rates take."""
    if not rates:
        return "none: rates are of a CUDA device", None
    flops = 2 * rows * DIM * planes.bits_per_table * planes.num_tables
    bytes_ms = num_bytes / rates["device_stream_gb_s"] / 1e6
    flops_ms = flops / rates["bf16_matmul_tflop_s"] / 1e9
    if bytes_ms > flops_ms:
        return f"{num_bytes / 1e6:.2f} MB at {rates['device_stream_gb_s']:.0f} GB/s", bytes_ms
    return f"{flops / 1e12:.2f} TFLOP at {rates['bf16_matmul_tflop_s']:.0f} TFLOP/s", flops_ms


def _time_launches(call: Callable[[], object], device: torch.device) -> Timing:
    """Milliseconds of 1,000 launches: out of a CUDA graph, one after another elsewhere."""
    if device.type != "cuda":
        one = measure(call, device, WARMUPS, REPEATS)
        return summarise([LAUNCHES * ms for ms in (one.p10, one.ms, one.p90)])
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES_PER_GRAPH):
            call()

    def replay() -> None:
        for _ in range(LAUNCHES // LAUNCHES_PER_GRAPH):
            graph.replay()

    return measure(replay, device, WARMUPS, REPEATS)


def _row(
    name: str, shape: str, timing: Timing, peer: Timing, floor: str, floor_ms: float | None, projections: Projections,
    rates: dict[str, float], device: torch.device,
) -> Row:  # fmt: skip
    bits, tables = projections.bits_per_table, projections.num_tables
    return Row(
        name=name, shape=f"{shape}, K {bits}, L {tables}", device=device_name(device), ms=timing.ms, p10=timing.p10,
        p90=timing.p90, floor=floor, floor_ms=floor_ms, peer="torch's products alone, written and not packed",
        peer_ms=peer.ms, rates=rates, config={"bits_per_table": bits, "num_tables": tables},
    )  # fmt: skip

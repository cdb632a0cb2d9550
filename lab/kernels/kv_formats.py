"""Time decode attention of one layer over rows in bf16 and in codes of 8 bits, without reuse and with MAC: `kv`.

The layers, the graph and the gate are those of `lab.kernels.mac_attention`;
of every format a sample of heads is compared with float64 over what its rows mean, before anything is timed. The peer
of codes is the same attention over bf16 in the same run.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from rich.console import Console

from bench.rates import device_name, measure_device_rates
from bench.rows import Row, Timing
from cpu.rates import measure_host_rates
from lab.kernels.mac_attention import Path as Layers
from lab.kernels.mac_attention import (
    Shape,
    check_layer,
    count_layers,
    make_fixed,
    make_layer,
    make_pages,
    pages_bytes,
    time_graph,
    time_path,
)

Format = Literal["plain", "fp8", "int8"]
FORMATS: tuple[Format, ...] = get_args(Format)


def kv_rows(
    shape: Shape, lengths: Sequence[int], batches: Sequence[int], rates: Sequence[float], device: torch.device,
    console: Console,
) -> list[Row]:  # fmt: skip
    """Rows for each length, batch and format: whole contexts, then MAC at each share of heads that hit. Raises
    GateError.
    """
    is_host = device.type != "cuda"
    measured = measure_host_rates(torch.get_num_threads(), gib=0.25) if is_host else measure_device_rates(device)
    gb_s, rows = measured["host_stream_gb_s" if is_host else "device_stream_gb_s"], []
    for tokens in lengths:
        for batch in batches:
            peers: dict[str, Timing] = {}
            for kv in FORMATS:
                for name, timing, num_bytes in _time(shape, batch, tokens, kv, rates, device):
                    peer = peers.setdefault(name, timing)
                    floor_ms = num_bytes / gb_s / 1e6
                    console.print(
                        f"{tokens:,} tokens, batch {batch}, {name}, {kv}: {1e3 * timing.ms:.1f} us, "
                        f"{timing.ms / peer.ms:.3f} of plain, floor {1e3 * floor_ms:.1f}",
                        highlight=False,
                    )
                    rows.append(Row(
                        name=f"{name}, {kv}", shape=f"{batch} x {tokens:,}, {shape.heads}/{shape.kv_heads}",
                        device=device_name(device), ms=timing.ms, p10=timing.p10, p90=timing.p90,
                        floor=f"{num_bytes / 1e6:.1f} MB at {gb_s:,.0f} GB/s", floor_ms=floor_ms,
                        peer="the same over rows in the compute dtype", peer_ms=peer.ms, rates=measured,
                        extras={"of_plain": timing.ms / peer.ms}, config={"kv": kv, "batch": batch, "tokens": tokens},
                    ))  # fmt: skip
    return rows


def _time(
    shape: Shape, batch: int, tokens: int, kv: Format, rates: Sequence[float], device: torch.device
) -> list[tuple[str, Timing, float]]:
    """What was timed, milliseconds of a layer, and the bytes that it must move."""
    pages = make_pages(shape, batch, tokens, device, kv)
    path, count = Layers(shape, pages, make_fixed(pages)), count_layers(shape, batch)
    generator = torch.Generator(device).manual_seed(5)
    layers = [make_layer(shape, pages, 0.0, False, generator) for _ in range(count)]
    check_layer(path, layers[0])
    timing = time_graph(lambda: [path.attend(layer, None) for layer in layers], count, device)
    timed = [("decode attention", timing, pages_bytes(shape, batch * tokens, pages.keys))]
    for rate in rates:
        times, bytes_of = time_path(shape, pages, rate, False, device)
        timed.append((f"MAC at {rate:.0%} hits", times["whole"], sum(bytes_of.values())))
    return timed

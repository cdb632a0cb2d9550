"""Times the output matrix alone, as weights of each kind have it; `weights` prints it below a layer's matrices.

It refuses to know layers. The size is a named model's; numbers are random, as many matrices of them as no cache holds,
multiplied one after another in a CUDA graph. Each product is compared with that of the unpacked numbers in float64
before anything is timed. Floor: as a layer's. Peer: the same product by the vendor's library in bf16.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from bench.rates import device_name, measure_device_rates
from bench.rows import Row, announce, measure, require
from gpu.model.architecture import named_shape
from gpu.model.matrix_format import MatrixFormat
from gpu.model.matrix_formats import output_format
from gpu.model.spec import Architecture
from gpu.operations.linear.packed_matrix import Stored
from gpu.weights.matrix import Matrix, as_matrix
from gpu.weights.weights import allocate_packed, draw_packed
from lab.kernels.gpu_kernels_sweep import relative_error
from lab.kernels.matrices import COLD_BYTES, MOST_ERROR, REPEATS, SEED, WARMUPS, floor_of, graph_of, stored_in


def output_rows(
    shape_name: str, batches: Sequence[int], kinds: Sequence[str], device: torch.device, console: Console
) -> list[Row]:
    """A row for each format that weights of these kinds have the output matrix in, and each batch: milliseconds of
    logits, without the norm before them. Raises GateError.
    """
    rates, shape, rows = measure_device_rates(device), named_shape(shape_name), []
    found: dict[MatrixFormat | None, list[str]] = {}
    for kind in kinds:
        found.setdefault(output_format(stored_in(shape, kind)), []).append(kind)
    plain = _draw(shape, None, device)
    for stored, of_kinds in found.items():
        held = [as_matrix(one) for one in (plain if stored is None else _draw(shape, stored, device))]
        what = "bf16" if stored is None else f"{stored.kind} in groups of {stored.group}"
        for batch in batches:
            x = torch.randn(batch, shape.hidden, dtype=torch.bfloat16, device=device)
            _check(held[0], x)
            floor, floor_ms = floor_of(shape.vocab_size * shape.hidden, held[0].nbytes, batch, rates)
            if floor_ms is not None:
                announce(console, f"output matrix, {what}, batch {batch}", floor, floor_ms)
            timing = measure(graph_of(lambda held=held, x=x: [one.logits(x) for one in held], device), device,
                             WARMUPS, REPEATS)  # fmt: skip
            peer = measure(graph_of(lambda x=x: [F.linear(x, one) for one in plain], device), device, WARMUPS, REPEATS)
            rows.append(
                Row(
                    name="output matrix", shape=f"{shape_name} {what}, batch {batch}", device=device_name(device),
                    ms=timing.ms / len(held), p10=timing.p10 / len(held), p90=timing.p90 / len(held), floor=floor,
                    floor_ms=floor_ms, peer="the vendor's library in bf16", peer_ms=peer.ms / len(plain), rates=rates,
                    config={"kinds": of_kinds, "batch": batch, "bytes": held[0].nbytes, "matrices": len(held)},
                )
            )  # fmt: skip
    return rows


def _draw(shape: Architecture, stored: MatrixFormat | None, device: torch.device) -> list[Stored]:
    """As many as no cache holds; None: plain ones."""
    rows, inner = shape.vocab_size, shape.hidden
    num_bytes = 2 * rows * inner if stored is None else stored.num_bytes(rows, inner)
    generator = torch.Generator(device=device).manual_seed(SEED)

    def draw() -> Stored:
        if stored is None:
            plain = torch.empty(rows, inner, dtype=torch.bfloat16, device=device)
            return plain.normal_(0.0, inner**-0.5, generator=generator)
        packed = allocate_packed(rows, inner, stored, torch.bfloat16, device, torch.bfloat16)
        draw_packed(packed, inner**-0.5, generator)
        return packed

    return [draw() for _ in range(1 + COLD_BYTES // num_bytes if device.type == "cuda" else 1)]


def _check(matrix: Matrix, x: Tensor) -> None:
    error = relative_error(matrix.logits(x), x.double() @ matrix.unpack().double().t())
    require(error < MOST_ERROR, f"logits of {len(x)} tokens are {error:.1e} from float64's")

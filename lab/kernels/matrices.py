"""Times one layer's matrices in bf16, FP8, int8, int4 and GGUF's blocks, with the fusions of a decode step: `weights`.

It refuses to know attention. Shapes are those of a named model; weights are random, as many layers of them as no cache
holds, multiplied one after another in a CUDA graph. A product is compared with that of the unpacked numbers in float64
before anything is timed. Floor: the bytes that are held over the rate of reading, or FLOPs over that of products,
whichever takes longer. Peer: the same four products by the vendor's library in bf16; beside it, where torch has them,
its own products of int4 and FP8. Prefill: a prompt's products, for which a matrix of few bits is widened once a layer.
Kinds that begin with `humming-` are multiplied by that library, our norms and activations around it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from bench.rates import device_name, measure_device_rates
from bench.rows import Row, announce, measure, require
from gpu.layers.projections import Projections
from gpu.model.architecture import named_shape
from gpu.model.gguf.kinds import BLOCK_KINDS
from gpu.model.gguf.tensors import stored_as
from gpu.model.humming_formats import multiplied
from gpu.model.matrix_formats import rounded
from gpu.model.spec import Architecture
from gpu.operations.linear.packed_linear import widen
from gpu.operations.linear.packed_matrix import Packed
from gpu.weights.humming_matrix import UNPACKED_COLUMNS, prepare
from gpu.weights.matrix import as_matrix
from gpu.weights.weights import LayerWeights, Weights, random_weights

KINDS = ("bfloat16", "fp8", "int8", "int4", "Q8_0", "Q6_K", "Q4_0", "Q4_K")
LIBRARY_KINDS = ("humming-fp8", "humming-int8", "humming-int4")
COLD_BYTES = 512 * 2**20  # several times the L2 of an H200
MOST_ERROR = 1.5e-2  # of a product behind a norm, against float64
SEED, WARMUPS, REPEATS = 1, 3, 20
GATED = 1, 5  # tokens of products that are compared before any is timed
PREFILL_LAYERS, PREFILL_REPEATS = 2, 5
INT4_GROUP, INNER_TILES = 128, 8  # of torch's own int4


def matrix_rows(
    shape_name: str, batches: Sequence[int], kinds: Sequence[str], device: torch.device, console: Console
) -> list[Row]:
    """A row for each kind and batch: milliseconds of one layer's matrices. Raises GateError."""
    rates = measure_device_rates(device)
    plain, rows = _draw(shape_name, "bfloat16", device), []
    for kind in kinds:
        shape, weights = plain if kind == "bfloat16" else _draw(shape_name, kind, device)
        prepare(weights.matrices, {*GATED, UNPACKED_COLUMNS, *batches}, lambda fraction: None)
        layer_bytes = sum(as_matrix(matrix).nbytes for matrix in _matrices(weights.layers[0]))
        _check(shape, weights)
        for batch in batches:
            floor, floor_ms = floor_of(shape.num_layer_weights, layer_bytes, batch, rates)
            if floor_ms is not None:
                announce(console, f"layer, {kind}, batch {batch}", floor, floor_ms)
            timing = measure(graph_of(_layers(shape, weights, batch), device), device, WARMUPS, REPEATS)
            peer = measure(graph_of(_library(plain[1], batch), device), device, WARMUPS, REPEATS)
            others = _torch_times(kind, plain[1], batch)
            count, plain_count = len(weights.layers), len(plain[1].layers)
            rows.append(
                Row(
                    name="layer's matrices", shape=f"{shape_name} {kind}, batch {batch}", device=device_name(device),
                    ms=timing.ms / count, p10=timing.p10 / count, p90=timing.p90 / count, floor=floor,
                    floor_ms=floor_ms, peer="the vendor's library in bf16", peer_ms=peer.ms / plain_count, rates=rates,
                    extras=others, config={"kind": kind, "batch": batch, "bytes": layer_bytes, "layers": count},
                )
            )  # fmt: skip
    return rows


def prefill_rows(
    shape_name: str, tokens: int, unit_tokens: int, kinds: Sequence[str], device: torch.device, console: Console
) -> list[Row]:
    """A row for each kind: milliseconds of one layer's matrices times a prompt, in units of tokens, layer by layer as
    prefill goes. Peer: the same in bf16. Raises GateError.
    """
    rates = measure_device_rates(device)
    plain = _draw(shape_name, "bfloat16", device)
    layers = min(PREFILL_LAYERS, plain[0].num_layers)
    peer = measure(_prompt(*plain, layers, tokens, unit_tokens), device, 1, PREFILL_REPEATS).ms / layers
    rows = []
    for kind in kinds:
        shape, weights = plain if kind == "bfloat16" else _draw(shape_name, kind, device)
        counts = {*GATED, UNPACKED_COLUMNS, min(tokens, unit_tokens), tokens % unit_tokens or 1}
        prepare(weights.matrices, counts, lambda fraction: None)
        _check(shape, weights)
        packed = [one for one in _matrices(weights.layers[0]) if isinstance(one, Packed)]
        wide_bytes = sum(one.rows * one.inner * one.dtype.itemsize for one in packed)
        moved_bytes = wide_bytes + sum(one.nbytes for one in packed)
        flops, gb_s = 2 * tokens * shape.num_layer_weights, rates.get("device_stream_gb_s")
        floor, floor_ms = "none: rates are of a CUDA device", None
        if gb_s is not None:
            tflop_s = rates["bf16_matmul_tflop_s"]
            floor_ms = flops / tflop_s / 1e9 + moved_bytes / gb_s / 1e6
            floor = f"{flops / 1e12:.3g} TFLOP at {tflop_s:.0f} TFLOP/s, {moved_bytes / 1e6:.0f} MB to widen, once"
            announce(console, f"layer, {kind}, prefill of {tokens:,}", floor, floor_ms)
        timing = measure(_prompt(shape, weights, layers, tokens, unit_tokens), device, 1, PREFILL_REPEATS)
        widening = measure(lambda held=packed: [widen(one) for one in held], device, 1, PREFILL_REPEATS)
        rows.append(
            Row(
                name="layer's matrices", shape=f"{shape_name} {kind}, prefill of {tokens:,} tokens",
                device=device_name(device), ms=timing.ms / layers, p10=timing.p10 / layers, p90=timing.p90 / layers,
                floor=floor, floor_ms=floor_ms, peer="of prefill: the same in bf16", peer_ms=peer, rates=rates,
                extras={"widening_ms": widening.ms, "widening_bytes": moved_bytes},
                config={"kind": kind, "tokens": tokens, "unit_tokens": unit_tokens, "layers": layers},
            )
        )  # fmt: skip
        of_plain = f"{kind}, prefill of {tokens:,}: {timing.ms / layers / peer:.3f} of bf16's time"
        console.print(f"{of_plain}, widening alone {widening.ms:.3f} ms of {timing.ms / layers:.3f}", highlight=False)
    return rows


def _prompt(
    shape: Architecture, weights: Weights, layers: int, tokens: int, unit_tokens: int
) -> Callable[[], object]:  # fmt: skip
    """Products of a prompt with the first layers. Inputs are one unit's, again and again."""
    projections, device = Projections(weights, shape), weights.embedding.device
    hidden = torch.randn(min(tokens, unit_tokens), shape.hidden, dtype=torch.bfloat16, device=device)
    attended = torch.randn(len(hidden), shape.num_heads * shape.dim, dtype=torch.bfloat16, device=device)
    units = [min(unit_tokens, tokens - begin) for begin in range(0, tokens, unit_tokens)]

    def run() -> None:
        for layer in range(layers):
            for count in units:
                projections.qkv(layer, hidden[:count])
                projections.mlp(layer, projections.output(layer, attended[:count], hidden[:count]))

    return run


def _draw(shape_name: str, kind: str, device: torch.device) -> tuple[Architecture, Weights]:
    """As many layers as no cache holds, and a vocabulary that does not matter."""
    shape = replace(named_shape(shape_name), num_layers=1, vocab_size=1024, tied_embeddings=True)
    bits = {"bfloat16": 16, "int4": 4, "humming-int4": 4, "Q4_0": 4, "Q4_K": 4}.get(kind, 8)
    layers = 1 + COLD_BYTES * 8 // (bits * shape.num_layer_weights) if device.type == "cuda" else 1
    shape = stored_in(replace(shape, num_layers=layers), kind)
    return shape, random_weights(shape, SEED, torch.bfloat16, device, lambda _: None)


def stored_in(shape: Architecture, kind: str) -> Architecture:
    """With matrices of a kind of KINDS or LIBRARY_KINDS."""
    if kind in LIBRARY_KINDS:
        products, rounded_to = kind.split("-")
        return multiplied(rounded(shape, rounded_to, "--kinds"), products, "--kinds")
    return stored_as(shape, kind) if kind in BLOCK_KINDS else rounded(shape, kind, "--kinds")


def _matrices(layer: LayerWeights) -> tuple:
    return layer.qkv, layer.output, *layer.mlp


def _check(shape: Architecture, weights: Weights) -> None:
    """The product behind the norm of a layer, of one token and of several."""
    for tokens in GATED:
        x = torch.randn(tokens, shape.hidden, dtype=torch.bfloat16, device=weights.embedding.device)
        got = Projections(weights, shape).qkv(0, x).double()
        wide = x.double() * (x.double().square().mean(-1, keepdim=True) + shape.rms_norm_eps).rsqrt()
        wanted = wide @ as_matrix(weights.layers[0].qkv).unpack().double().t()
        error = float((got - wanted).norm() / wanted.norm())
        require(error < MOST_ERROR, f"a product of {tokens} tokens is {error:.1e} from float64's")


def _layers(shape: Architecture, weights: Weights, batch: int) -> Callable[[], object]:
    projections = Projections(weights, shape)
    hidden = torch.randn(batch, shape.hidden, dtype=torch.bfloat16, device=weights.embedding.device)
    attended = torch.randn(batch, shape.num_heads * shape.dim, device=hidden.device)

    def run() -> None:
        for layer in range(shape.num_layers):
            projections.qkv(layer, hidden)
            projections.mlp(layer, projections.output(layer, attended, hidden))

    return run


def _library(weights: Weights, batch: int) -> Callable[[], object]:
    def run() -> None:
        for layer, tokens in zip(weights.layers, inputs, strict=True):
            for matrix, x in zip(_matrices(layer), tokens, strict=True):
                F.linear(x, matrix)

    inputs = [_inputs(layer, batch) for layer in weights.layers]
    return run


def _inputs(layer: LayerWeights, batch: int) -> list[Tensor]:
    return [torch.randn(batch, m.shape[1], dtype=torch.bfloat16, device=m.device) for m in _matrices(layer)]


def _torch_times(kind: str, weights: Weights, batch: int) -> dict[str, float | str]:
    """Milliseconds of a layer by torch's own product of a kind, or why it has none; of other kinds, and off CUDA:
    nothing.
    """
    layers, device = weights.layers, weights.layers[0].qkv.device
    if device.type != "cuda" or kind not in ("int4", "fp8"):
        return {}
    make = _int4_layer if kind == "int4" else _fp8_layer
    try:
        calls = [call for layer in layers for call in make(layer, batch)]
        for call in calls[:4]:
            call()
        torch.cuda.synchronize()
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        return {f"torch_{kind}": f"not here: {str(error).splitlines()[0][:60]}"}
    timing = measure(graph_of(lambda: [call() for call in calls], device), device, WARMUPS, REPEATS)
    return {f"torch_{kind}_ms": timing.ms / len(layers)}


def _int4_layer(layer: LayerWeights, batch: int) -> list[Callable[[], object]]:
    calls: list[Callable[[], object]] = []
    for matrix, x in zip(_matrices(layer), _inputs(layer, batch), strict=True):
        numbers = torch.randint(0, 256, (matrix.shape[0], matrix.shape[1] // 2), dtype=torch.uint8, device=x.device)
        packed = torch.ops.aten._convert_weight_to_int4pack(numbers, INNER_TILES)
        scales = torch.ones(matrix.shape[1] // INT4_GROUP, matrix.shape[0], 2, dtype=torch.bfloat16, device=x.device)
        calls.append(lambda x=x, p=packed, s=scales: torch.ops.aten._weight_int4pack_mm(x, p, INT4_GROUP, s))
    return calls


def _fp8_layer(layer: LayerWeights, batch: int) -> list[Callable[[], object]]:
    calls: list[Callable[[], object]] = []
    one = torch.ones((), device=layer.qkv.device)
    for matrix, x in zip(_matrices(layer), _inputs(layer, max(16, batch)), strict=True):
        narrow, columns = x.to(torch.float8_e4m3fn), matrix.to(torch.float8_e4m3fn).t()
        calls.append(
            lambda x=narrow, w=columns: torch._scaled_mm(x, w, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        )
    return calls


def graph_of(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """The same without the host's part."""
    if device.type != "cuda":
        return call
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def floor_of(num_weights: int, num_bytes: int, batch: int, rates: dict[str, float]) -> tuple[str, float | None]:
    """Of so many weights that take so many bytes."""
    if "device_stream_gb_s" not in rates:
        return "none: rates are of a CUDA device", None
    flops, gb_s, tflop_s = 2 * batch * num_weights, rates["device_stream_gb_s"], rates["bf16_matmul_tflop_s"]
    if flops / tflop_s / 1e9 > num_bytes / gb_s / 1e6:
        return f"{flops / 1e12:.3g} TFLOP at {tflop_s:.0f} TFLOP/s", flops / tflop_s / 1e9
    return f"{num_bytes / 1e6:.1f} MB at {gb_s:.0f} GB/s", num_bytes / gb_s / 1e6

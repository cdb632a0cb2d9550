"""Time a layer's matrices and the output matrix of a named shape, in bf16 and in formats of few bits."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.benchmark_rows import require
from bench.op.frame import COLD_BYTES, SEED, Asked, Call, Case, Work, relative_error
from gpu.layers.projections import Projections
from gpu.model.gguf.kinds import BLOCK_KINDS
from gpu.model.gguf_translation.tensor_names import stored_as
from gpu.model.humming_formats import multiplied
from gpu.model.matrix_format import MatrixFormat
from gpu.model.matrix_formats import output_format, rounded
from gpu.model.spec import Architecture
from gpu.operations.linear.packed_matrix import Stored
from gpu.weights.drawing import draw_packed, random_weights
from gpu.weights.humming_matrix import UNPACKED_COLUMNS, prepare, require_products
from gpu.weights.matrix import as_matrix
from gpu.weights.weight_allocation import allocate_packed
from gpu.weights.weights import LayerWeights, Weights

LIBRARY_KINDS = ("humming-fp8", "humming-int8", "humming-int4", "fp8-fp8")
_OF_FILES = tuple(name for name, kind in BLOCK_KINDS.items() if kind.stored is not None)
KINDS = ("bfloat16", "fp8", "int8", "int4", *_OF_FILES, *LIBRARY_KINDS)
DEFAULT_KINDS = ("bfloat16", "fp8", "int8", "int4")
MOST_ERROR = 1.5e-2  # relative error of a product after a norm, against float64
GATED = 1, 5  # tokens of products that are checked before any is timed
PEER = "the vendor's library in bf16"


def linear_cases(asked: Asked) -> Iterator[Case]:
    """Yield the four products of one layer, with the fusions of a decode step, by kind and batch."""
    plain = _draw_layers(asked, "bfloat16")
    for kind in asked.choose(KINDS) if asked.kinds else DEFAULT_KINDS:
        if kind in LIBRARY_KINDS:
            require_products(kind.split("-")[0], asked.device, "bfloat16")
        shape, weights = plain if kind == "bfloat16" else _draw_layers(asked, kind)
        prepare(weights.matrices, {*GATED, UNPACKED_COLUMNS, *asked.batches}, lambda fraction: None)
        layer_bytes = sum(as_matrix(matrix).nbytes for matrix in _matrices(weights.layers[0]))
        for batch in asked.batches:
            yield Case(
                "layer's matrices", f"{asked.shape_name} {kind}, batch {batch}",
                Work(layer_bytes, asked.stream, 2 * batch * shape.num_layer_weights),
                check=lambda shape=shape, weights=weights: _check_layer(shape, weights),
                run=_run_layers(shape, weights, batch), times=len(weights.layers),
                peer_name=PEER, peer=_run_library(plain[1], batch), peer_times=len(plain[1].layers),
                config={"kind": kind, "batch": batch, "bytes": layer_bytes},
            )  # fmt: skip


def output_cases(asked: Asked) -> Iterator[Case]:
    """Yield the output matrix by batch, and by the format in which each kind stores it."""
    shape, device = asked.shape, asked.device
    formats: dict[MatrixFormat | None, list[str]] = {}
    for kind in asked.choose(KINDS) if asked.kinds else DEFAULT_KINDS:
        formats.setdefault(output_format(stored_in(shape, kind)), []).append(kind)
    plain = _draw_outputs(shape, None, device)
    for stored, kinds in formats.items():
        matrices = [as_matrix(one) for one in (plain if stored is None else _draw_outputs(shape, stored, device))]
        name = "bf16" if stored is None else f"{stored.kind} in groups of {stored.group}"
        for batch in asked.batches:
            x = torch.randn(batch, shape.hidden, dtype=torch.bfloat16, device=device)

            def check(matrix: object = matrices[0], x: Tensor = x) -> None:
                error = relative_error(matrix.logits(x), x.double() @ matrix.unpack().double().t())
                require(error < MOST_ERROR, f"logits of {len(x)} tokens are {error:.1e} from float64's")

            yield Case(
                "output matrix", f"{asked.shape_name} {name}, batch {batch}",
                Work(matrices[0].nbytes, asked.stream, 2 * batch * shape.vocab_size * shape.hidden), check=check,
                run=lambda matrices=matrices, x=x: [one.logits(x) for one in matrices], times=len(matrices),
                peer_name=PEER, peer=lambda x=x: [F.linear(x, one) for one in plain], peer_times=len(plain),
                config={"kinds": kinds, "batch": batch, "bytes": matrices[0].nbytes},
            )  # fmt: skip


def stored_in(shape: Architecture, kind: str) -> Architecture:
    """Return the shape with its matrices stored as a kind of KINDS."""
    if kind in LIBRARY_KINDS:
        products, rounded_to = kind.split("-")
        return multiplied(rounded(shape, rounded_to, "--kinds"), products, "--kinds")
    return stored_as(shape, kind) if kind in BLOCK_KINDS else rounded(shape, kind, "--kinds")


def _draw_layers(asked: Asked, kind: str) -> tuple[Architecture, Weights]:
    """Draw more layers than any cache holds, with a small vocabulary."""
    if any(spec.experts is not None for spec in asked.shape.layer_pattern):
        raise ValueError(f"--shape: got {asked.shape_name}, a mixture of experts; wanted a shape without experts")
    shape = replace(asked.shape, num_layers=1, vocab_size=1024, tied_embeddings=True)
    bits = 16 if kind == "bfloat16" else 4 if "4" in kind else 8
    layers = 1 + COLD_BYTES * 8 // (bits * shape.num_layer_weights) if asked.device.type == "cuda" else 1
    shape = stored_in(replace(shape, num_layers=layers), kind)
    return shape, random_weights(shape, SEED, torch.bfloat16, asked.device, lambda _: None)


def _draw_outputs(shape: Architecture, stored: MatrixFormat | None, device: torch.device) -> list[Stored]:
    """Draw more output matrices than any cache holds. stored None: in bf16."""
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


def _matrices(layer: LayerWeights) -> Sequence[Stored]:
    return layer.qkv, layer.output, *layer.mlp


def _check_layer(shape: Architecture, weights: Weights) -> None:
    """Compare the product after a layer's norm with float64, for one token and for several."""
    for tokens in GATED:
        x = torch.randn(tokens, shape.hidden, dtype=torch.bfloat16, device=weights.embedding.device)
        wide = x.double() * (x.double().square().mean(-1, keepdim=True) + shape.rms_norm_eps).rsqrt()
        wanted = wide @ as_matrix(weights.layers[0].qkv).unpack().double().t()
        error = relative_error(Projections(weights, shape).qkv(0, x), wanted)
        require(error < MOST_ERROR, f"a product of {tokens} tokens is {error:.1e} from float64's")


def _run_layers(shape: Architecture, weights: Weights, batch: int) -> Call:
    projections = Projections(weights, shape)
    hidden = torch.randn(batch, shape.hidden, dtype=torch.bfloat16, device=weights.embedding.device)
    attended = torch.randn(batch, shape.num_heads * shape.dim, device=hidden.device)

    def run() -> None:
        for layer in range(shape.num_layers):
            projections.qkv(layer, hidden)
            projections.mlp(layer, projections.output(layer, attended, hidden))

    return run


def _run_library(weights: Weights, batch: int) -> Call:
    device = weights.embedding.device
    pairs = [
        (matrix, torch.randn(batch, matrix.shape[1], dtype=torch.bfloat16, device=device))
        for layer in weights.layers
        for matrix in _matrices(layer)
    ]
    return lambda: [F.linear(x, matrix) for matrix, x in pairs]

"""Matrices that the library humming-kernels multiplies: against float64 oracles of their numbers, by a stand-in on the
CPU and by the library on a GPU; which matrices those are, what they weigh, and what is refused.
"""

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.decode_loop import decode
from gpu.config import GpuConfig, ModelConfig
from gpu.layers.projections import Projections
from gpu.load import load_runner
from gpu.memory.plan import MemoryRequest, PlanError, PlannedSizes, plan_memory
from gpu.model import humming_formats
from gpu.model.architecture import load_architecture, named_shape
from gpu.model.gguf_translation.tensor_names import stored_as
from gpu.model.humming_formats import laying_out_bytes, multiplied, products_key
from gpu.model.matrix_format import MatrixFormat
from gpu.model.matrix_formats import rounded, weight_bytes
from gpu.model.spec import ModelError
from gpu.operations.linear.packed_matrix import Packed
from gpu.runner_settings import LoadSettings
from gpu.step import DENSE
from gpu.weights import humming_matrix
from gpu.weights.drawing import random_weights
from gpu.weights.humming_matrix import HummingMatrix, num_compiled, prepare
from gpu.weights.matrix import as_matrix
from gpu.weights.weights import Weights
from tests.gpu import kernel_oracles as oracle
from tests.gpu.humming_library import ENDS, Library, found_version, stand_in
from tests.gpu.kernel_oracles import NORM_EPS, distance, random, wide
from tests.gpu.packed_oracle import Drawn, draw_packed, poisoned
from tests.gpu.small_runner import load_small
from tests.tolerances import KERNEL_BFLOAT16, KERNEL_CHAIN_BFLOAT16
from transfer.machine import load_machine

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(find_spec("humming") is None, reason="needs the extra `humming`"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=on_gpu)]
# kind, rows, inner, group, row_block, has_zeros, has_order
MATRICES = {
    "int4-zeros": ("int4", 384, 4096, 128, 1, True, False),
    "int4": ("int4", 256, 1024, 32, 1, False, False),
    "int4-rows": ("int4", 128, 512, 512, 1, True, False),
    "int8": ("int8", 384, 1024, 128, 1, False, False),
    "int8-zeros": ("int8", 128, 640, 128, 1, True, False),
    "fp8-rows": ("fp8", 384, 4096, 4096, 1, False, False),
    "fp8-tensors": ("fp8", 384, 512, 512, 64, False, False),
    "fp8-blocks": ("fp8", 256, 1024, 128, 128, False, False),
    "fp8-groups": ("fp8", 128, 1024, 128, 1, False, False),
}
TOKENS = (1, 3, 17, 150)
CPU = torch.device("cpu")
CARD = load_machine(Path(__file__).parents[2] / "deploy" / "machines" / "rtx4090.json")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    return stand_in(monkeypatch)


@pytest.fixture(scope="module")
def on_card() -> dict[str, tuple[Drawn, HummingMatrix]]:
    """All of MATRICES, with kernels for what is multiplied here, compiled side by side."""
    counts = (*TOKENS, humming_matrix.UNPACKED_COLUMNS)
    drawn = {name: draw_packed(*made, torch.bfloat16, "cuda:0") for name, made in MATRICES.items()}
    laid_out = {name: (one, HummingMatrix(one.packed)) for name, one in drawn.items()}
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda name: laid_out[name][1].kernels.compile(counts), MATRICES))
    return laid_out


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=MATRICES)
def pair(device: str, request: pytest.FixtureRequest) -> tuple[Drawn, HummingMatrix]:
    """What was drawn, and the matrix, with what is not its own poisoned."""
    if device == "cuda":
        return request.getfixturevalue("on_card")[request.param]
    request.getfixturevalue("library")
    drawn = draw_packed(*MATRICES[request.param], torch.bfloat16, "cpu")
    return drawn, HummingMatrix(drawn.packed)


def _tokens(tokens: int, matrix: HummingMatrix, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator, nan = np.random.default_rng(tokens), float("nan")
    x = poisoned(random(generator, (tokens, matrix.inner), torch.bfloat16, device), nan)
    gain = poisoned(random(generator, (matrix.inner,), torch.bfloat16, device), nan)
    return x, gain, random(generator, (tokens, matrix.rows), torch.bfloat16, device)


def test_products_are_named_where_they_change_numbers() -> None:
    few = rounded(named_shape("llama-3.1-8b"), "int4", "weights")
    found = {
        (asked, device): products_key(multiplied(few, asked, "products"), device, is_packed=True)
        for asked in ("own", "auto", "integers", "humming")
        for device in ("cpu", "cuda")
    }
    named = {("auto", "cpu"): "integers", ("integers", "cpu"): "integers", ("humming", "cuda"): "humming"}
    assert {key: name for key, name in found.items() if name} == named
    assert products_key(multiplied(few, "auto", "products"), "cpu", is_packed=False) == "", "floats, as all is unpacked"
    assert products_key(named_shape("llama-3.1-8b"), "cpu", is_packed=True) == ""


@pytest.mark.parametrize("tokens", TOKENS)
def test_a_product_is_that_of_the_numbers_and_adds_the_residual(pair, tokens, device):
    drawn, matrix = pair
    x, _, residual = _tokens(tokens, matrix, device)
    product, before = wide(x) @ drawn.wanted.T, residual.clone()
    got = matrix.linear(x)
    assert got.dtype == torch.bfloat16
    assert distance(got, product) < KERNEL_BFLOAT16
    assert distance(matrix.linear(x, residual), product + wide(residual)) < KERNEL_BFLOAT16
    assert torch.equal(residual, before)
    assert distance(matrix.linear(x.float()), product) < KERNEL_BFLOAT16
    assert distance(matrix.logits(x), product) < KERNEL_BFLOAT16
    x[:, int((np.abs(wide(x)).max(0) * np.linalg.norm(drawn.wanted, axis=0)).argmax())] = 0
    assert distance(matrix.linear(x), product) > KERNEL_BFLOAT16


@pytest.mark.parametrize("tokens", [1, 17])
def test_a_norm_stands_before_and_a_bias_or_swiglu_behind(pair, tokens, device):
    drawn, matrix = pair
    x, gain, residual = _tokens(tokens, matrix, device)
    bias = residual[0].contiguous()
    wanted = oracle.rms_norm(wide(x), wide(gain), NORM_EPS) @ drawn.wanted.T
    assert distance(matrix.norm_linear(x, gain, NORM_EPS, None), wanted) < KERNEL_CHAIN_BFLOAT16
    got = matrix.norm_linear(x, gain, NORM_EPS, bias)
    assert distance(got, wanted + wide(bias)) < KERNEL_CHAIN_BFLOAT16
    assert distance(got, wanted) > KERNEL_CHAIN_BFLOAT16
    spread = np.linalg.norm(wanted) / wanted.size**0.5  # gates of order one
    small = gain / spread
    wanted = oracle.swiglu(oracle.rms_norm(wide(x), wide(small), NORM_EPS) @ drawn.wanted.T)
    got = matrix.norm_gate_up(x, small, NORM_EPS, "silu")
    assert got.shape == (tokens, matrix.rows // 2)
    assert distance(got, wanted) < KERNEL_CHAIN_BFLOAT16


def test_it_holds_the_numbers_once_and_in_the_bytes_that_are_planned(pair):
    drawn, matrix = pair
    packed = drawn.packed
    group = None if packed.group == packed.inner else packed.group
    stored = MatrixFormat(
        packed.kind, group, 4 if packed.kind == "fp8" else 2, packed.row_block, packed.zeros is not None
    )
    assert stored.why_not_humming(packed.rows, packed.inner) is None
    assert matrix.nbytes == replace(stored, humming=True).num_bytes(packed.rows, packed.inner)
    got = matrix.unpack()
    assert got.shape == drawn.wanted.shape
    assert distance(got, drawn.wanted) < KERNEL_BFLOAT16


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_gpu)], indirect=True)
@pytest.mark.parametrize("tokens", TOKENS)
def test_products_in_graphs_on_two_streams_at_once_are_those_outside(on_card, tokens, device):
    """Each has locks of its own: the same matrices, side by side, many times."""
    before = num_compiled()
    cases = [(matrix, _tokens(tokens, matrix, device)) for _, matrix in on_card.values()]
    wanted = [matrix.linear(x, residual) for matrix, (x, _, residual) in cases]
    graphs = []
    for _ in range(2):
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            got = [matrix.linear(x, residual) for matrix, (x, _, residual) in cases]
        graphs.append((stream, graph, got))
    for _ in range(50):
        for stream, graph, _ in graphs:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for _, _, got in graphs:
        for one, right in zip(got, wanted, strict=True):
            assert distance(one, wide(right)) < KERNEL_BFLOAT16  # sums meet in an order of their own
    assert num_compiled() == before


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_gpu)], indirect=True)
def test_a_model_decodes_and_prefills_as_its_unpacked_numbers_and_steps_compile_nothing(device):
    """A runner as it is served: what it compiles, it compiles while it loads; its steps run in graphs."""
    config = ModelConfig.model_validate({"random_weights": "tiny", "weights": "int4", "products": "humming"})
    told: list[tuple[str, float]] = []
    runner = load_small(
        config,
        GpuConfig.model_validate({"device": "cuda", "graph_batch_sizes": [1, 2]}),
        on_progress=lambda stage, fraction: told.append((stage, fraction)),
        max_running=2,
        max_context_tokens=256,
        chunk_tokens=64,
        max_hidden_tokens=256,
        num_pages=64,
    )
    of_products = [fraction for stage, fraction in told if stage == "products"]
    assert of_products == sorted(of_products)
    assert (of_products[0], of_products[-1]) == (0.0, 1.0)
    before = num_compiled()
    assert before > 0
    runner.rehearsal.time_prefill([63], DENSE)
    decoded = decode(runner, np.arange(14, dtype=np.int32).reshape(2, 7), 5)
    assert decoded.tokens.min() >= 0
    assert num_compiled() == before
    weights, shape = runner.weights, runner.architecture
    assert sum(isinstance(one, HummingMatrix) for one in weights.matrices) == 4 * shape.num_layers
    layers = [layer.changed(lambda held: as_matrix(held).unpack()) for layer in weights.layers]
    plain = Projections(Weights(weights.embedding, layers, weights.final_norm, weights.logits), shape)
    ours = Projections(weights, shape)
    x = torch.randn(5, shape.hidden, dtype=torch.bfloat16, device=device)
    for layer in range(shape.num_layers):
        assert distance(ours.qkv(layer, x), wide(plain.qkv(layer, x))) < KERNEL_CHAIN_BFLOAT16
        assert distance(ours.mlp(layer, x), wide(plain.mlp(layer, x))) < KERNEL_CHAIN_BFLOAT16


def test_a_layer_of_matrices_that_it_has_and_has_not_multiplies_as_its_unpacked_numbers(device, request):
    """Of 192 and of 96 rows there is no tile."""
    if device == "cpu":
        request.getfixturevalue("library")
    odd = replace(_shape("tiny", "int4"), num_layers=1, intermediate=96)
    shape = multiplied(odd, "humming", "key")
    weights = random_weights(shape, 1, torch.bfloat16, torch.device(device), lambda fraction: None)
    prepare(weights.matrices, {5, humming_matrix.UNPACKED_COLUMNS}, lambda fraction: None)
    held = {name: type(matrix) for name, matrix in weights.layers[0].matrices.items()}
    assert held == {"qkv": HummingMatrix, "output": HummingMatrix, "gate_up": Packed, "down": Packed}
    layers = [layer.changed(lambda held: as_matrix(held).unpack()) for layer in weights.layers]
    plain = Projections(Weights(weights.embedding, layers, weights.final_norm, weights.logits), shape)
    ours = Projections(weights, shape)
    x = torch.randn(5, shape.hidden, dtype=torch.bfloat16, device=device)
    attended = torch.randn(5, shape.num_heads * shape.dim, device=device)
    assert distance(ours.qkv(0, x), wide(plain.qkv(0, x))) < KERNEL_CHAIN_BFLOAT16
    assert distance(ours.output(0, attended, x), wide(plain.output(0, attended, x))) < KERNEL_CHAIN_BFLOAT16
    assert distance(ours.mlp(0, x), wide(plain.mlp(0, x))) < KERNEL_CHAIN_BFLOAT16


# --- kernels, by the stand-in ---


def _matrix(name: str) -> HummingMatrix:
    return HummingMatrix(draw_packed(*MATRICES[name], torch.bfloat16, "cpu").packed)


def test_kernels_are_compiled_once_for_all_matrices_of_a_shape_and_run_before_a_graph_does(library, caplog):
    matrices = [_matrix("int4"), torch.zeros(1), _matrix("int4"), _matrix("fp8-blocks")]
    told: list[float] = []
    with caplog.at_level("INFO"):
        prepare(matrices, range(1, 33), told.append)
    assert sorted(library.made) == [101, 102, 201, 202]  # none for more than 64 tokens, and one for 1 and 8
    assert library.launched == [(id, 1) for id in (101, 102, 201, 202)]
    assert told == [0.0, 0.5, 1.0]
    assert "event=ready kernels=4 shapes=2" in caplog.text
    prepare([*matrices, torch.zeros(1)], range(1, 33), told.append)
    prepare([torch.zeros(1)], range(1, 33), lambda fraction: pytest.fail("there is nothing to tell of"))
    assert num_compiled() == len(library.made) == 4


def test_a_product_takes_the_kernel_of_its_range_and_compiles_what_nobody_prepared(library):
    matrix = _matrix("int4")
    prepare([matrix], range(1, 9), lambda fraction: None)
    library.launched.clear()
    for tokens in (1, 2, 8):
        matrix.linear(torch.zeros(tokens, matrix.inner))
    assert library.launched == [(101, 1), (101, 2), (101, 8)]
    before = num_compiled()
    matrix.linear(torch.zeros(9, matrix.inner))
    assert num_compiled() == before + 1
    assert library.launched[-1] == (100 + ENDS.index(64), 9)
    assert matrix.linear(torch.zeros(0, matrix.inner)).shape == (0, matrix.rows)


def test_a_zero_point_that_has_no_room_is_refused(library):
    packed = draw_packed(*MATRICES["int4-zeros"], torch.bfloat16, "cpu").packed
    packed.zeros[3, 2] = 16
    with pytest.raises(ModelError, match=r"no room for a zero point of 16 in int4, at most 15; wanted own"):
        HummingMatrix(packed)


@pytest.mark.parametrize(
    "error", [RuntimeError("failed with exit code 1; logs: /cache"), OSError(30, "Read-only", "/cache")]
)
def test_a_kernel_that_cannot_be_compiled_or_kept_is_told_of_in_one_line(library, error, monkeypatch):
    def fail(*_, **__):
        raise error

    matrix = _matrix("int4")
    monkeypatch.setattr(library.HummingKernel, "prepare_kernels", fail)
    wanted = re.escape(f"model.products: humming cannot make its kernels ({error}); mend that, or own")
    with pytest.raises(ModelError, match=wanted):
        prepare([matrix], {1}, lambda fraction: None)
    monkeypatch.setattr(library, "transform_humming_tensors", fail)
    with pytest.raises(ModelError, match=wanted):
        _matrix("int4")


def test_memory_that_runs_out_is_told_of_by_who_loads(library, monkeypatch):
    def fail(*_, **__):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(library, "transform_humming_tensors", fail)
    with pytest.raises(torch.OutOfMemoryError):
        _matrix("int4")


def test_weights_are_laid_out_in_the_place_of_packed_ones(library, caplog):
    own = replace(_shape("tiny", "int4"), tied_embeddings=False)
    shape = multiplied(own, "humming", "key")
    with caplog.at_level("INFO"):
        weights = random_weights(shape, 1, torch.bfloat16, CPU, lambda fraction: None)
    assert "by=humming own='output matrix: logits are float32'" in caplog.text
    assert isinstance(weights.logits, Packed)
    assert weights.is_packed
    theirs = random_weights(own, 1, torch.bfloat16, CPU, lambda fraction: None)
    for index, layer in enumerate(weights.layers):
        for name, matrix in layer.matrices.items():
            assert isinstance(matrix, HummingMatrix), name
            right = as_matrix(theirs.layers[index].matrices[name]).unpack()
            assert distance(matrix.unpack(), wide(right)) < KERNEL_BFLOAT16
    held = sum(matrix.nbytes for matrix in weights.matrices)
    plain = [weights.embedding, weights.final_norm]
    norms = [tensor for layer in weights.layers for tensor in (layer.attention_norm, layer.mlp_norm)]
    assert held + sum(tensor.nbytes for tensor in (*plain, *norms)) == weight_bytes(shape, 2, is_packed=True)


# --- which matrices, and what is refused ---


def _shape(name: str, kind: str):
    return rounded(named_shape(name), kind, "model.weights")


@pytest.mark.parametrize(
    ("change", "rows", "inner", "reason"),
    [
        ({}, 128, 128, None),
        ({"has_zeros": True}, 128, 128, None),
        ({"group": None}, 128, 384, None),
        ({"run": 256}, 128, 256, "scales of runs"),
        ({"has_order": True}, 128, 128, "act-order"),
        ({}, 192, 128, "192 by 128, no multiples of 128 rows and 128 columns"),
        ({}, 128, 192, "128 by 192"),
        ({"group": 48}, 128, 384, "groups of 48"),
        ({"group": 16}, 128, 384, "groups of 16"),
        ({"row_block": 64}, 128, 128, "integers with scales of several rows"),
        ({"kind": "fp8", "row_block": 128}, 256, 256, None),
        ({"kind": "fp8", "row_block": 64}, 128, 256, None),
        ({"kind": "fp8", "row_block": 32}, 256, 256, "blocks of 32 rows"),
        ({"kind": "fp8", "row_block": 256}, 384, 256, "blocks of 256 rows"),
        ({"kind": "fp8", "row_block": 32, "group": None}, 128, 256, None),
    ],
)
def test_what_the_library_cannot_multiply_is_said_why(change, rows, inner, reason):
    stored = replace(MatrixFormat("int4", 128), **change)
    got = stored.why_not_humming(rows, inner)
    assert (got is None) if reason is None else reason in got


def test_what_has_nothing_for_it_is_refused_by_name():
    with pytest.raises(
        ModelError, match=r"key: asked humming, llama-3.1-8b is in 16 bits; wanted matrices of few bits"
    ):
        multiplied(named_shape("llama-3.1-8b"), "humming", "key")
    with pytest.raises(
        ModelError, match=r"multiplies none of the matrices of llama-3.1-8b \(qkv: scales of runs \(GGUF\)"
    ):
        multiplied(stored_as(named_shape("llama-3.1-8b"), "Q4_K"), "humming", "key")


def _plan(shape, **gpu):
    return plan_memory(
        MemoryRequest(
            shape,
            GpuConfig.model_validate(gpu),
            host=None,
            kept=None,
            states=(),
            sizes=PlannedSizes(8, 2048, 4096, None),
            machine=CARD,
        )
    )


def test_a_plan_counts_what_is_held_and_a_matrix_twice_more_and_says_by_whom_it_is_multiplied():
    own = _shape("llama-3.1-8b", "int4")
    shape = multiplied(own, "humming", "key")
    items, before = ({item.name: item for item in _plan(one).items} for one in (shape, own))
    assert items["weights"].bytes == weight_bytes(shape, 2, is_packed=True) < before["weights"].bytes
    assert items["weights"].note == before["weights"].note + ", multiplied by humming"
    assert items["laying out"].bytes == laying_out_bytes(shape)
    assert "laying out" not in before
    assert "widened matrices" in before
    assert "widened matrices" not in items
    with pytest.raises(PlanError, match=r"model\.products: asked humming, the device is the CPU"):
        _plan(shape, device="cpu")
    with pytest.raises(PlanError, match=r"model\.products: asked humming, which multiplies in bfloat16"):
        _plan(shape, dtype="float32")
    with pytest.raises(PlanError, match=r"model\.products: asked integers, the device is a CUDA device"):
        _plan(multiplied(own, "integers", "key"))


def test_it_is_refused_without_the_library_without_a_gpu_and_in_float32(monkeypatch):
    model = ModelConfig.model_validate({"random_weights": "tiny", "weights": "int4", "products": "humming"})
    assert load_architecture(model).quantisation.humming
    asked = LoadSettings(
        max_running=1, max_context_tokens=64, chunk_tokens=16, max_hidden_tokens=64, num_pages=8
    )  # fmt: skip
    with pytest.raises(ModelError, match=r"model\.products: asked humming, the device is the CPU"):
        load_runner(model, GpuConfig.model_validate({"device": "cpu"}), asked, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ModelError, match=r"multiplies in bfloat16, gpu\.dtype is float32"):
        load_runner(model, GpuConfig.model_validate({"device": "cuda", "dtype": "float32"}), asked, lambda *_: None)
    for found in ("none", "0.1.18"):
        monkeypatch.setattr(humming_formats, "version", found_version(found))
        wanted = rf"found {found} of humming-kernels; wanted 0.1.19: pip install '\.\[humming\]'"
        with pytest.raises(ModelError, match=wanted):
            load_runner(model, GpuConfig.model_validate({"device": "cuda"}), asked, lambda *_: None)

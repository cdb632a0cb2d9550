"""Matrices of few bits on the CPU device: multiplied as they are stored, or unpacked where there is no code for it."""

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu.config import GpuConfig
from gpu.cpu_step.cpu_step import CpuStep
from gpu.layers.decoder import Decoder
from gpu.memory.plan import MemoryRequest, PlannedSizes, plan_memory
from gpu.model.architecture import Architecture, named_shape
from gpu.model.matrix_format import MOST_MULTIPLIED_TOKENS, MatrixFormat, Quantisation
from gpu.operations.linear import packed_linear
from gpu.operations.linear.numba_packed_linear import multiplies, packed_product, widen_packed
from gpu.operations.linear.packed_matrix import Packed, Stored, lay_in_tiles, unpack_reference
from gpu.weights.drawing import random_packed_weights, random_weights
from gpu.weights.weights import Weights, unpacked
from tests.gpu.cpu_decoder import CPU, cpu_decoder, fill_contexts, reference_logits
from tests.gpu.kernel_oracles import KERNEL_TOLERANCE, distance
from tests.gpu.packed_oracle import draw_packed
from tests.tolerances import COMPILED_LOGITS_BFLOAT16, COMPILED_LOGITS_FLOAT32, KERNEL_FLOAT32
from transfer.machine import MachineProfile

TINY = replace(named_shape("tiny"), num_layers=3, tied_embeddings=False)
TOLERANCES = {torch.float32: COMPILED_LOGITS_FLOAT32, torch.bfloat16: COMPILED_LOGITS_BFLOAT16}
# kind, group (0: a row), rows that share scales, has_zeros, has_order, run
KINDS = [
    ("int4", 128, 1, True, False, None), ("int4", 64, 1, True, True, None), ("int8", 128, 1, False, False, None),
    ("fp8", 0, 1, False, False, None), ("fp8", 128, 4, False, False, None), ("int4", 32, 1, False, False, 256),
    ("int8", 16, 1, False, False, 256), ("int4", 16, 1, False, False, None), ("int8", 0, 1, True, True, None),
    ("int4", 0, 1, False, True, None), ("int8", 32, 1, True, False, None), None,
]  # fmt: skip
FEW_BITS = [*(kind for kind in KINDS if kind is not None), ("int4", 32, 1, False, False, 32),
            ("int8", 32, 1, False, False, 32), ("fp4", 32, 1, False, False, None),
            ("fp4", 16, 1, False, False, None)]  # fmt: skip

WIDENED = [
    *((kind, torch.float32) for kind in FEW_BITS),
    *(pytest.param(kind, torch.bfloat16, marks=[] if kind[1] == 128 else pytest.mark.long) for kind in FEW_BITS),
]  # each is compiled for a second; numbers of all kinds are rounded to bf16 alike


@pytest.fixture(autouse=True)
def _threads_as_before():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def draw(kind: tuple, rows: int, inner: int, dtype: torch.dtype) -> tuple[Packed, torch.Tensor]:
    """And its numbers in float64; a row's length is about one."""
    number, group, row_block, has_zeros, has_order, run = kind
    drawn = draw_packed(number, rows, inner, group or inner, row_block, has_zeros, has_order, dtype, "cpu", run)
    scale = 1.0 if run is not None else 2.0 ** -round(np.log2(0.3 * inner**0.5))
    if drawn.packed.scales.dtype == torch.uint8:
        drawn.packed.scales.add_(int(np.log2(scale)) * (drawn.packed.scales > 0))
    elif run is None:
        drawn.packed.scales.mul_(scale)
    return drawn.packed, torch.from_numpy(drawn.wanted * scale)


def mixed(dtype: torch.dtype, rows: int) -> tuple[Decoder, Decoder]:
    """Each matrix of another kind, and over the same pages one of the numbers that they stand for."""
    decoder = cpu_decoder(TINY, dtype, num_pages=16 * rows, max_slots=rows, max_pages=16)
    kinds = iter(KINDS)

    def change(matrix: Stored, kind: tuple | None) -> tuple[Stored, Stored]:
        assert isinstance(matrix, torch.Tensor)
        return (matrix, matrix) if kind is None else draw(kind, *matrix.shape, dtype)

    packed, plain = [], []
    for layer in decoder.weights.layers:
        made = {name: change(matrix, next(kinds)) for name, matrix in layer.matrices.items()}
        packed.append(replace(layer, **{name: pair[0] for name, pair in made.items()}))
        plain.append(replace(layer, **{name: pair[1] for name, pair in made.items()}))
    weights = decoder.weights
    logits = change(weights.logits, KINDS[2] if dtype == torch.float32 else None)  # the oracle rounds pages as it is
    logits = (logits[0], logits[1].to(dtype))
    ours, theirs = (
        Weights(weights.embedding, layers, weights.final_norm, output)
        for layers, output in zip((packed, plain), logits, strict=True)
    )
    return Decoder(TINY, ours, decoder.pool, 256), Decoder(TINY, theirs, decoder.pool, 256)


def batch_of(decoder: Decoder, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    slots, positions = np.arange(rows, dtype=np.int32)[::-1].copy(), 7 * np.arange(rows) % 200
    fill_contexts(decoder, slots, positions)
    return slots, positions, np.random.default_rng(1).integers(0, TINY.vocab_size, rows)


def spread(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted).abs().max() / wanted.std())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_step_multiplies_every_mixture_of_kinds(dtype: torch.dtype) -> None:
    decoder, plain = mixed(dtype, 13)
    batch = batch_of(decoder, 13)
    wanted = reference_logits(plain, *batch)
    torch.set_num_threads(2)
    step = CpuStep(decoder)
    together = step.run(*batch).clone()
    assert spread(together, wanted) < TOLERANCES[dtype]
    for threads, part in ((1, slice(0, 1)), (2, slice(3, 8)), (1, slice(2, 13))):  # the same bits
        torch.set_num_threads(threads)
        assert torch.equal(step.run(*(column[part] for column in batch)), together[part])
    order = decoder.weights.layers[0].output.order
    order.copy_(order.roll(1))
    assert spread(step.run(*batch), wanted) > TOLERANCES[dtype], "power: columns of one matrix one further"


@pytest.mark.parametrize("kind", [("int8", 32, 1, False, False, None), ("int4", 32, 1, False, False, 32)], ids=str)
def test_rows_of_a_tied_matrix_of_few_bits_are_looked_up_as_they_are_multiplied(kind: tuple) -> None:
    shape = replace(TINY, tied_embeddings=True)
    decoder = cpu_decoder(shape, torch.float32, num_pages=16 * 3, max_slots=3, max_pages=16)
    held, numbers = draw(kind, shape.vocab_size, shape.hidden, torch.float32)
    weights, theirs = decoder.weights, numbers.float()  # the oracle rounds pages as its output matrix is
    ours = replace(weights, embedding=held, logits=held)
    packed = Decoder(shape, ours, decoder.pool, 256)
    plain = Decoder(shape, replace(weights, embedding=theirs, logits=theirs), decoder.pool, 256)
    slots, positions, token_ids = batch_of(packed, 3)
    wanted = reference_logits(plain, slots, positions, token_ids)
    step, tolerance = CpuStep(packed), COMPILED_LOGITS_FLOAT32
    assert spread(step.run(slots, positions, token_ids), wanted) < tolerance
    assert spread(step.run(slots, positions, (token_ids + 1) % shape.vocab_size), wanted) > tolerance, (
        "power: next rows"
    )
    rows = torch.from_numpy(token_ids)
    assert torch.equal(packed.embed(rows), packed_linear.unpack(held)[rows])
    assert unpacked(replace(ours, layers=[])).embedding.shape == (shape.vocab_size, shape.hidden)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(FEW_BITS), st.integers(4, 41), st.sampled_from([32, 64, 96, 160, 288, 512]), st.integers(1, 19),
    st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_products_are_those_of_the_numbers_whatever_the_rows_and_threads(
    kind: tuple, rows: int, inner: int, tokens: int, seed: int
) -> None:
    inner = -(-inner // 256) * 256 if kind[5] else inner
    packed, wanted = draw(kind, rows, inner, torch.float32)
    x = torch.randn(tokens, inner, generator=torch.Generator().manual_seed(seed))
    torch.set_num_threads(2)
    got = packed_product(x, packed)
    ordered = wanted if packed.order is None else wanted[:, packed.order]
    assert distance(got, (x.double() @ ordered.t()).numpy()) < KERNEL_FLOAT32
    torch.set_num_threads(1)
    assert torch.equal(packed_product(x[-1:].contiguous(), packed), got[-1:])


@pytest.mark.parametrize(("kind", "dtype"), WIDENED, ids=str)
def test_a_widened_matrix_has_each_number_rounded_once(kind: tuple, dtype: torch.dtype) -> None:
    """But those of runs, which are sums of two that have been rounded already."""
    packed, wanted = draw(kind, 23, 768, dtype)
    got = packed_linear.unpack(packed)
    assert got.dtype == dtype
    if kind[5] is None:
        assert torch.equal(got, unpack_reference(packed, torch.float32).to(dtype))
        assert torch.equal(widen_packed(packed), got if packed.order is None else got[:, packed.order])
    assert distance(got, wanted.numpy()) < KERNEL_TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_few_tokens_widen_nothing_and_more_do_once_and_logits_never(dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a matrix in tiles no number of tokens does, in float32."""
    packed, wanted = draw(KINDS[0], 32, 256, dtype)
    most, widened = MOST_MULTIPLIED_TOKENS[dtype.itemsize], []

    def widen(asked: Packed) -> torch.Tensor:
        widened.append(asked)
        return packed_linear.widen(asked)

    x = torch.randn(most + 1, 256)
    for tokens, count in ((1, 0), (most, 0), (most + 1, 1)):
        widened.clear()
        got = packed_linear.packed_linear(x[:tokens], packed, None, widen)
        assert len(widened) == count
        assert distance(got, (x[:tokens].double() @ wanted.t()).numpy()) < KERNEL_TOLERANCE[dtype]
        widened.clear()
        packed_linear.packed_linear(x[:tokens], lay_in_tiles(packed), None, widen)
        assert len(widened) == (count if dtype == torch.bfloat16 else 0)
    monkeypatch.setattr(packed_linear, "widen", None)
    assert distance(packed_linear.packed_logits(x, packed), (x.double() @ wanted.t()).numpy()) < KERNEL_FLOAT32


def quantised(layers: MatrixFormat, **change: int) -> Architecture:
    return replace(TINY, quantisation=Quantisation("rounded", layers, None), **change)


UNPACKED = {
    "groups": (quantised(MatrixFormat("int4", 8)), "multiples of 16 columns, and these have 8"),
    "rows": (quantised(MatrixFormat("int8", None), intermediate=520), "multiples of 32 columns, and these have 520"),
}


@pytest.mark.parametrize("name", UNPACKED)
def test_what_there_is_no_code_for_is_unpacked_and_the_log_and_the_plan_say_why(name, caplog) -> None:
    shape, reason = UNPACKED[name]
    with caplog.at_level(logging.INFO, "gpu.weights.weights"):
        weights = random_weights(shape, 1, torch.float32, CPU, lambda _: None)
    assert not weights.is_packed
    assert reason in caplog.text
    plan = plan_of(shape, ("avx2", "f16c", "fma"))
    assert not plan.is_packed
    assert reason in next(item.note for item in plan.items if item.name == "weights")
    if shape.layer_pattern == TINY.layer_pattern:
        held = random_packed_weights(shape, 1, torch.float32, CPU, lambda _: None, None)
        assert not all(multiplies(matrix) for matrix in held.matrices if isinstance(matrix, Packed))


def plan_of(shape: Architecture, instruction_sets: tuple[str, ...]):
    machine = MachineProfile(
        name="cpu", gpu=None, cpu="one", physical_cores=2, instruction_sets=instruction_sets, numa_nodes=1,
        memory_bytes=16 * 2**30,
    )  # fmt: skip
    return plan_memory(
        MemoryRequest(
            shape,
            GpuConfig(device="cpu", dtype="float32"),
            host=None,
            kept=None,
            states=(),
            sizes=PlannedSizes(4, 256, 512, None),
            machine=machine,
        )
    )


def test_a_product_reads_no_source_file_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources are hashed for numba's cache, once a process: not with every product, of which a token takes hundreds."""
    packed, _ = draw(FEW_BITS[0], 64, 256, torch.float32)
    x = torch.randn(2, 256)
    first = packed_product(x, packed), widen_packed(packed)
    num_read = 0

    def read(path: Path) -> bytes:
        nonlocal num_read
        num_read += 1
        return path.open("rb").read()

    monkeypatch.setattr(Path, "read_bytes", read)
    again = packed_product(x, packed), widen_packed(packed)
    assert num_read == 0
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))

"""The compiled decode step against plain torch in float64, and the same bits whatever the batch and the threads."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from gpu.cpu_step.cpu_step import CpuStep, reads_rows, serves
from gpu.cpu_step.step_arrays import COMPUTED, MAX_ROWS, PART_TOKENS
from gpu.decode.loop import LayerLoop
from gpu.decode.steps import DecodeSteps
from gpu.decode.workspaces import StepWorkspaces
from gpu.layers.decoder import Decoder
from gpu.methods.device_side import DeviceSide
from gpu.methods.sampled.codes import Codes
from gpu.methods.sampled.encode import Hyperplanes
from gpu.model.architecture import Architecture, LayerSpec, named_shape
from gpu.model.spec import Experts, KvHeads, Latent, LayerInputs, QueryGrowth, Recurrent, Share
from gpu.operations.decode_attention.paged_decode_attention import workspace_for
from gpu.operations.kv.kv_rows import codes_of, scales_of
from gpu.page_layout import KvFormat
from tests.gpu.cpu_decoder import CPU, cpu_decoder, fill_contexts, reference_logits
from tests.tolerances import COMPILED_LOGITS_BFLOAT16, COMPILED_LOGITS_FLOAT32, COMPILED_LOGITS_INT8, EXP_FLOAT32
from transfer.simd.exp import exp

TINY = replace(named_shape("tiny"), num_layers=2)
SHAPES = [
    TINY,
    replace(TINY, hidden=384, intermediate=320, num_heads=5, num_kv_heads=1, dim=128, vocab_size=1030),
    replace(TINY, num_heads=4, num_kv_heads=4, tied_embeddings=True),
]
LONG = PART_TOKENS + 300
RAGGED = [0, 1, 15, 16, 17, 200, LONG, 31, 5, 0, 63, 64, 100, 2, 3, 47]
MAX_PAGES = LONG // 16 + 1
TOLERANCES = {
    (torch.float32, "float32"): COMPILED_LOGITS_FLOAT32, (torch.bfloat16, "bfloat16"): COMPILED_LOGITS_BFLOAT16,
    (torch.float32, "bfloat16"): COMPILED_LOGITS_BFLOAT16,
    (torch.float32, "int8"): COMPILED_LOGITS_INT8, (torch.bfloat16, "int8"): COMPILED_LOGITS_INT8,
}  # fmt: skip
KINDS = tuple(TOLERANCES)
EACH = [*KINDS[:-1], pytest.param(*KINDS[-1], marks=pytest.mark.long)]  # whose step and whose rows others have

Batch = tuple[np.ndarray, np.ndarray, np.ndarray]


@pytest.fixture(autouse=True)
def _threads_as_before():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def make_batch(rows: int, vocab: int) -> Batch:
    """Slots in another order than rows, positions, token ids."""
    slots = np.arange(rows, dtype=np.int32)[::-1].copy()
    return slots, np.array((RAGGED * 2)[:rows]), np.random.default_rng(1).integers(0, vocab, rows)


def filled(
    shape=TINY, dtype: torch.dtype = torch.float32, rows: int = len(RAGGED), kv: KvFormat | None = None
) -> tuple[Decoder, Batch]:
    pages = rows * MAX_PAGES + 1
    decoder = cpu_decoder(shape, dtype, num_pages=pages, max_slots=rows, max_pages=MAX_PAGES, kv=kv)
    batch = make_batch(rows, shape.vocab_size)
    fill_contexts(decoder, batch[0], batch[1])
    return decoder, batch


def spread(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference over the standard deviation of the logits."""
    return float((got.double() - wanted).abs().max() / wanted.std())


# Each kind in one shape, and each shape in one or two kinds; one thread gives the bits of two (below).
CASES = [*((TINY, *kind) for kind in KINDS[:-1]), pytest.param(TINY, *KINDS[-1], marks=pytest.mark.long)]
CASES += [(SHAPES[1], *KINDS[1]), (SHAPES[1], *KINDS[2]), (SHAPES[2], *KINDS[3])]


@pytest.mark.parametrize(("shape", "dtype", "kv"), CASES)
def test_logits_equal_the_plain_step_in_float64(shape: Architecture, dtype: torch.dtype, kv: KvFormat) -> None:
    torch.set_num_threads(2)
    decoder, batch = filled(shape, dtype, kv=kv)
    wanted = reference_logits(decoder, *batch)
    assert spread(CpuStep(decoder).run(*batch), wanted) < TOLERANCES[dtype, kv]


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 8, 9, 12, 13, MAX_ROWS])
def test_every_batch_size_equals_the_plain_step(rows: int) -> None:
    decoder, batch = filled(rows=rows)
    assert spread(CpuStep(decoder).run(*batch), reference_logits(decoder, *batch)) < COMPILED_LOGITS_FLOAT32


@pytest.mark.parametrize(("dtype", "kv"), EACH)
def test_the_comparison_sees_one_lost_token_and_one_shifted_position(dtype: torch.dtype, kv: KvFormat) -> None:
    decoder, (slots, positions, token_ids) = filled(dtype=dtype, kv=kv)
    rows = slice(5, 6)  # a context of 200
    wanted = reference_logits(decoder, slots[rows], positions[rows], token_ids[rows])
    for position in (199, 198):
        got = CpuStep(decoder).run(slots[rows], np.array([position]), token_ids[rows])
        assert spread(got, wanted) > TOLERANCES[dtype, kv]


@pytest.mark.parametrize(("dtype", "kv"), EACH)
def test_a_row_is_the_same_to_the_bit_in_every_batch_and_on_every_number_of_threads(dtype, kv: KvFormat) -> None:
    decoder, (slots, positions, token_ids) = filled(dtype=dtype, kv=kv)
    step = CpuStep(decoder)
    together = step.run(slots, positions, token_ids).clone()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for first, last in ((0, 1), (6, 7), (3, 8), (2, 15), (0, 16)):
            part = slice(first, last)
            assert torch.equal(step.run(slots[part], positions[part], token_ids[part]), together[part])


def test_a_padding_row_writes_nothing_and_changes_no_other() -> None:
    decoder, (slots, positions, token_ids) = filled(rows=4)
    step = CpuStep(decoder)
    clean = step.run(slots, positions, token_ids).clone()
    pages = [pages.clone() for pages in (*decoder.pool.key_pages, *decoder.pool.value_pages)]
    slots[2] = -1
    padded = step.run(slots, positions, token_ids)
    assert torch.equal(padded[[0, 1, 3]], clean[[0, 1, 3]])
    assert padded[2].isfinite().all()
    for before, after in zip(pages, (*decoder.pool.key_pages, *decoder.pool.value_pages), strict=True):
        assert torch.equal(before.view(torch.int32), after.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_rows_own_tokens_are_written(dtype: torch.dtype) -> None:
    decoder, (slots, positions, token_ids) = filled(dtype=dtype)
    finite = [pages.isfinite().sum() for pages in decoder.pool.key_pages]
    CpuStep(decoder).run(slots, positions, token_ids)
    written = decoder.pool.key_pages[0][0].numel() // 16 * len(slots)
    assert [pages.isfinite().sum() - before for pages, before in zip(decoder.pool.key_pages, finite, strict=True)] == [
        written
    ] * len(finite)


def test_a_nan_in_one_context_stays_in_its_row() -> None:
    decoder, (slots, positions, token_ids) = filled()
    step = CpuStep(decoder)
    clean = step.run(slots, positions, token_ids).clone()
    decoder.pool.key_pages[1][decoder.pool.page_table[slots[5], 3], 0, 2, 7] = torch.nan
    broken = step.run(slots, positions, token_ids)
    assert broken[5].isnan().all()
    others = [row for row in range(len(slots)) if row != 5]
    assert torch.equal(broken[others], clean[others])


def test_of_codes_only_the_rows_own_and_their_scales_are_written() -> None:
    decoder, (slots, positions, token_ids) = filled(kv="int8")
    pages = (*decoder.pool.key_pages, *decoder.pool.value_pages)
    codes, scales = [codes_of(one).clone() for one in pages], [scales_of(one).isfinite() for one in pages]
    CpuStep(decoder).run(slots, positions, token_ids)
    own = torch.zeros(pages[0].shape[:3], dtype=torch.bool)
    for slot, position in zip(slots.tolist(), positions.tolist(), strict=True):
        own[decoder.pool.page_table[slot, position // 16], :, position % 16] = True
    for page, before, was_finite in zip(pages, codes, scales, strict=True):
        assert torch.equal((codes_of(page) != before).any(-1), own)
        assert torch.equal(scales_of(page).isfinite() != was_finite, own)


def test_a_row_in_codes_that_is_not_finite_is_nan_and_stays_in_its_row() -> None:
    """The row's own token is written with the scale of `kv_rows`: NaN, and codes of 0."""
    decoder, (slots, positions, token_ids) = filled(kv="int8")
    step, row = CpuStep(decoder), 5
    clean = step.run(slots, positions, token_ids).clone()
    token_ids[row] = 1
    others = [other for other in range(len(slots)) if token_ids[other] != 1]
    decoder.weights.embedding[1, 3] = torch.inf
    broken = step.run(slots, positions, token_ids)
    assert broken[row].isnan().all()
    assert torch.equal(broken[others], clean[others])
    page, offset = int(decoder.pool.page_table[slots[row], positions[row] // 16]), int(positions[row]) % 16
    for pages in (decoder.pool.key_pages[0], decoder.pool.value_pages[0]):
        assert scales_of(pages)[page, :, offset].isnan().all()
        assert not codes_of(pages)[page, :, offset].any()


def test_torch_and_the_step_take_turns_on_the_same_threads() -> None:
    torch.set_num_threads(2)
    decoder, batch = filled()
    step, matrix = CpuStep(decoder), torch.randn(600, 600, dtype=torch.float64)
    wanted, product = step.run(*batch).clone(), matrix @ matrix
    for _ in range(20):
        assert torch.equal(matrix @ matrix, product)
        assert torch.equal(step.run(*batch), wanted)


def test_rows_are_read_in_whole_lines_of_the_types_that_the_step_has() -> None:
    assert reads_rows(torch.int8, 64)
    assert reads_rows(torch.float32, 80)
    assert not reads_rows(torch.int8, 96)  # 64 bytes, and half as many
    assert not reads_rows(torch.bfloat16, 80)
    assert not reads_rows(torch.uint8, 64)  # FP8


def test_only_uncounted_steps_of_a_served_shape_in_which_no_method_has_a_part_go_through_the_compiled_step() -> None:
    decoder, _ = filled(rows=2)
    workspace = workspace_for(2, TINY.num_heads, TINY.num_kv_heads, TINY.dim, MAX_PAGES * 16, CPU)
    codes, other = Codes(Hyperplanes(torch.empty(0), 0)), DeviceSide()
    for methods, checks_coverage, is_compiled in (
        [(codes,), False, True], [(codes,), True, False], [(codes, other), False, False],
    ):  # fmt: skip
        last_tokens, pair = torch.zeros(3, dtype=torch.int64), (workspace, workspace)
        loop = LayerLoop(decoder, (), last_tokens, StepWorkspaces(pair, pair), methods, checks_coverage)
        assert (DecodeSteps(loop, None)._compiled is not None) == is_compiled
    assert not serves(TINY, torch.float32, torch.device("cuda"))
    assert not serves(TINY, torch.float16, CPU)
    assert not serves(replace(TINY, dim=72), torch.float32, CPU)  # no whole block, however wide vectors are
    assert not serves(replace(TINY, intermediate=500), torch.float32, CPU)


# Of each field of a layer, and of each field of an architecture outside COMPUTED, a value that is refused.
LAYERS_BEYOND = {
    "qkv_bias": True, "output_bias": True, "mlp_bias": True, "qk_norm": True, "post_norms": True,
    "wide_qk_norm": True, "pre_norms": False,
    "activation": "gelu_tanh", "window_tokens": 64, "rope": TINY.rope, "experts": Experts(8, 2, 64, True),
    "sinks": True, "heads": KvHeads(1, 64), "intermediate": 256, "value_norm": True, "keys_are_values": True,
    "kv_of": 0, "is_scaled": True, "output_gate": True, "recurrent": Recurrent(1, 1, 64, 64, 4),
    "has_gate_apart": True, "plain_qk_norm": True, "part": "mlp",
}  # fmt: skip
MODELS_BEYOND = {
    "layer_pattern": (LayerSpec(), LayerSpec(qkv_bias=True)), "norm_weight_offset": 1.0, "query_gain": 2.0,
    "embedding_scale": 2.0, "logit_cap": 30.0, "logit_gain": 0.5, "layer_inputs": LayerInputs(8, 64),
    "query_growth": QueryGrowth(0.1, 16), "latent": Latent(32, 16, 16, 32), "has_normed_embedding": True,
    "final_norm_offset": 1.0, "post_norm_eps": 0.01, "draft_layers": 1, "share": Share(TINY, 0, 2),
}  # fmt: skip


def test_every_field_of_a_model_is_computed_by_the_compiled_step_or_refused_by_it() -> None:
    what_to_do = "compute a new field in gpu/cpu_step and name it in COMPUTED, or give a refused value of it here"
    assert {field.name for field in fields(Architecture)} == COMPUTED | MODELS_BEYOND.keys(), what_to_do
    assert {field.name for field in fields(LayerSpec)} == LAYERS_BEYOND.keys(), what_to_do
    assert serves(TINY, torch.float32, CPU)
    for name, value in LAYERS_BEYOND.items():
        assert not serves(replace(TINY, layer_pattern=(LayerSpec(**{name: value}),)), torch.float32, CPU), name
    for name, value in MODELS_BEYOND.items():
        assert not serves(replace(TINY, **{name: value}), torch.float32, CPU), name


def test_exp_is_right_to_some_units_in_the_last_place() -> None:
    arguments = np.linspace(-86, 87, 4001, dtype=np.float32)
    got = np.array([exp(argument) for argument in arguments], np.float64)
    np.testing.assert_allclose(got, np.exp(arguments.astype(np.float64)), rtol=EXP_FLOAT32, atol=0)
    assert exp(np.float32(0)) == 1
    assert np.isnan(exp(np.float32(np.nan)))
    assert exp(np.float32(3 * (1 + 4 * EXP_FLOAT32))) / np.exp(3.0) > 1 + EXP_FLOAT32

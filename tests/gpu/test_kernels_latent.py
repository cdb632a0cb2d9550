"""Latent attention's kernels against float64 oracles: rows that are written, and attention that is asked of them."""

import numpy as np
import pytest
import torch

from gpu.model.spec import Latent
from gpu.operations.decode_attention.latent_decode_attention import LatentReads, latent_decode_attention
from gpu.operations.decode_attention.paged_decode_attention import workspace_for
from gpu.operations.kv.kv_rows import CODE_DTYPES
from gpu.operations.kv.latent_rows import gather_latents, put_latents, read_latents
from gpu.operations.kv.latent_write import LATENT_EPS, latent_write
from gpu.operations.kv.row_places import RowPlaces
from tests.gpu.kernel_oracles import DEVICES, DTYPES, KERNEL_TOLERANCE, attend, distance, random, rms_norm, wide
from transfer.partial import Partial, merge

PAGE = 16
SHAPES = [pytest.param(20, 64, 16, id="heads20"), pytest.param(5, 32, 16, id="heads5"),
          pytest.param(40, 512, 64, id="heads40-wide")]  # fmt: skip


def make_pages(generator, context_lens, row, dtype, device):
    """Pages in falling order, NaN where no token of a context lies; the rows of each context beside them."""
    counts = [-(-length // PAGE) for length in context_lens]
    pages = torch.full((sum(counts) + 1, 1, PAGE, row), float("nan"), dtype=dtype, device=device)
    table = torch.zeros(len(context_lens), max(1, *counts), dtype=torch.int32, device=device)
    free, contexts = sum(counts), []
    for slot, length in enumerate(context_lens):
        rows = random(generator, (length, row), dtype, device)
        for page, part in enumerate(rows.split(PAGE)):
            pages[free, 0, : len(part)], table[slot, page] = part, free
            free -= 1
        contexts.append(rows)
    return pages, table, contexts


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "rank", "rotated"), SHAPES)
def test_attention_to_latents_is_a_softmax_over_rows_whose_values_are_their_latents(
    heads, rank, rotated, dtype, device
):
    """Contexts that end in a tile, at one, and within the first; a slot that is asked twice, and padding."""
    generator, row = np.random.default_rng(heads), rank + rotated
    lens = [70, 32, 1, 150]
    pages, table, contexts = make_pages(generator, lens, row, dtype, device)
    slots = torch.tensor([0, 1, 2, 3, -1, 3], dtype=torch.int32, device=device)
    seen = torch.tensor([70, 32, 1, 150, 9, 99], dtype=torch.int32, device=device)
    query = random(generator, (6, heads, row), dtype, device)
    workspace = workspace_for(6, heads, 1, rank, 20_000, device)
    scale = row**-0.5
    got = latent_decode_attention(
        LatentReads(query, pages, table, slots, seen, scale, rank), workspace, is_counted=True
    )
    for request, (slot, length) in enumerate(zip(slots.tolist(), seen.tolist(), strict=True)):
        if slot < 0:
            assert not got.out[request].any()
            assert bool((got.lse[request] == float("-inf")).all())
            assert not got.covered[request].any()
            continue
        rows = wide(contexts[slot][:length])[:, None]
        out, lse = attend(wide(query[request]), rows, rows, scale)
        assert distance(got.out[request], out[:, :rank]) < KERNEL_TOLERANCE[dtype]
        assert np.abs(wide(got.lse[request]) - lse).max() < KERNEL_TOLERANCE[dtype] * max(1.0, np.abs(lse).max())
        assert bool((got.covered[request] == length).all())
        wrong, _ = attend(wide(query[request])[:, :rank], rows[..., :rank], rows[..., :rank], scale)
        if length > 1:
            assert distance(got.out[request], wrong) > 5 * KERNEL_TOLERANCE[dtype], "what is rotated counts"


@pytest.mark.parametrize("device", DEVICES)
def test_partials_over_latents_merge_as_everywhere(device):
    generator, heads, rank = np.random.default_rng(3), 4, 32
    pages, table, (rows,) = make_pages(generator, [64], 48, torch.float32, device)
    slots = torch.zeros(1, dtype=torch.int32, device=device)
    query = random(generator, (1, heads, 48), torch.float32, device)
    workspace = workspace_for(1, heads, 1, rank, 128, device)

    def ask(own_table: torch.Tensor, length: int) -> Partial:
        lens = torch.tensor([length], dtype=torch.int32, device=device)
        return latent_decode_attention(LatentReads(query, pages, own_table, slots, lens, 0.2, rank), workspace)

    front, back = ask(table, 32), ask(table[:, 2:].contiguous(), 32)
    wanted, lse = attend(wide(query[0]), wide(rows)[:, None], wide(rows)[:, None], 0.2)
    merged = merge(Partial(front.out.clone(), front.lse.clone()), back)
    assert distance(merged.out[0], wanted[:, :rank]) < KERNEL_TOLERANCE[torch.float32]
    assert np.abs(wide(merged.lse[0]) - lse).max() < 1e-4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv", ["plain", *CODE_DTYPES])
@pytest.mark.parametrize("has_neighbour_pairs", [True, False])
def test_rows_are_normed_rotated_and_written_and_queries_are_rotated(has_neighbour_pairs, kv, dtype, device):
    generator, heads = np.random.default_rng(5), 3
    latent = Latent(64, 16, 24, 40, None, 1.0, has_neighbour_pairs)
    tokens = 5
    made = random(generator, (tokens, 7 + latent.row), dtype, device)
    row, norm = made[:, 7:], random(generator, (latent.rank,), dtype, device)
    query = random(generator, (tokens, heads, latent.query_dim), dtype, device)
    slots = torch.tensor([0, 1, -1, 0, 1], dtype=torch.int32, device=device)
    positions = torch.tensor([3, 40, 10**9, 4, 41], device=device)
    cells = torch.tensor([3, 20, 10**9, 4, 21], device=device)
    table = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32, device=device)
    pages = torch.full((4, 1, PAGE, latent.row), float("nan"), dtype=dtype, device=device)
    pages = pages if kv == "plain" else in_codes(pages, kv, latent.rank)
    angles = np.outer(np.arange(64), 10_000.0 ** -(np.arange(8) / 8))
    cos, sin = (torch.tensor(one, dtype=torch.float32, device=device) for one in (np.cos(angles), np.sin(angles)))

    def turned(x: np.ndarray, position: int) -> np.ndarray:
        pairs = (x[..., ::2], x[..., 1::2]) if has_neighbour_pairs else (x[..., :8], x[..., 8:])
        whole = (pairs[0] + 1j * pairs[1]) * np.exp(1j * angles[position])
        return np.concatenate([whole.real, whole.imag], -1)

    asked = wide(query)
    latent_write(query, row, norm, RowPlaces(cos, sin, positions, cells, slots), table, pages, latent)
    tolerance = 2 * KERNEL_TOLERANCE[dtype]
    rounded = tolerance + {"plain": 0.0, "int8": 0.01, "fp8": 0.05}[kv]
    rows = read_latents(pages, torch.arange(4, device=device), latent.rank, torch.float64).view(4, PAGE, -1)
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        assert np.array_equal(wide(query)[token, :, :24], asked[token, :, :24])
        assert distance(query[token, :, 24:], turned(asked[token, :, 24:], int(positions[token]))) < tolerance
        cell = int(cells[token])
        written = rows[int(table[slot, cell // PAGE]), cell % PAGE]
        latents = rms_norm(wide(row)[token, :64], wide(norm), LATENT_EPS)
        assert distance(written, np.concatenate([latents, turned(wide(row)[token, 64:], int(positions[token]))])) < (
            rounded
        )
    assert int(rows.isnan().logical_not().sum()) == 4 * latent.row, "padding writes nothing"


def in_codes(pages: torch.Tensor, kv: str, rank: int) -> torch.Tensor:
    """The same rows in codes; NaN where they were."""
    row = pages.shape[3]
    coded = torch.full((len(pages), 1, PAGE, row + 8), 0, dtype=torch.uint8, device=pages.device)
    coded = coded.fill_(0xFF).view(CODE_DTYPES[kv])
    ids = torch.arange(len(pages), device=pages.device).repeat_interleave(PAGE)
    offsets = torch.arange(PAGE, device=pages.device).repeat(len(pages))
    put_latents(pages.flatten(0, 2), ids, offsets, coded, rank)
    return coded


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv", CODE_DTYPES)
@pytest.mark.parametrize(("heads", "rank", "rotated"), SHAPES)
def test_codes_of_latents_are_read_with_a_scale_of_the_latent_and_one_of_what_is_rotated(
    heads, rank, rotated, kv, dtype, device
):
    """What is rotated is 50 times as large: with one scale a row its latents would be lost."""
    generator, row = np.random.default_rng(heads), rank + rotated
    pages, table, contexts = make_pages(generator, [70, 33], row, dtype, device)
    pages[..., rank:] *= 50
    coded = in_codes(pages, kv, rank)
    gathered = torch.full((5, PAGE, row), float("nan"), dtype=dtype, device=device)
    gather_latents(coded, table[0], gathered, rank)
    numbers = [
        read_latents(coded, table[slot].long(), rank, torch.float64)[:length] for slot, length in ((0, 70), (1, 33))
    ]
    assert distance(gathered.flatten(0, 1)[:70], wide(numbers[0])) < KERNEL_TOLERANCE[dtype]
    for part in (slice(rank), slice(rank, None)):
        held = wide(contexts[0])[:, part] * (50 if part.start else 1)
        assert distance(numbers[0][:, part], held) < (0.01 if kv == "int8" else 0.05) + KERNEL_TOLERANCE[dtype]
    query = random(generator, (2, heads, row), dtype, device)
    query[..., rank:] *= 0.02
    slots, seen = (torch.tensor(own, dtype=torch.int32, device=device) for own in ([0, 1], [70, 33]))
    workspace, scale = workspace_for(2, heads, 1, rank, 20_000, device), row**-0.5
    got = latent_decode_attention(
        LatentReads(query, coded, table, slots, seen, scale, rank), workspace, is_counted=True
    )
    for request, rows in enumerate(numbers):
        out, lse = attend(wide(query[request]), wide(rows)[:, None], wide(rows)[:, None], scale)
        assert distance(got.out[request], out[:, :rank]) < 2 * KERNEL_TOLERANCE[dtype]
        assert np.abs(wide(got.lse[request]) - lse).max() < KERNEL_TOLERANCE[dtype] * max(1.0, np.abs(lse).max())


def test_another_shape_is_refused_by_name():
    workspace = workspace_for(1, 2, 1, 32, 64, "cpu")
    ints = torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"latent_decode_attention: pages is \(2, 1, 16, 40\)"):
        latent_decode_attention(
            LatentReads(torch.zeros(1, 2, 48), torch.zeros(2, 1, 16, 40), ints[None], ints, ints, 1.0, 32), workspace
        )
    latent, pages = Latent(32, 16, 8, 8), torch.zeros(2, 1, 16, 48)
    with pytest.raises(ValueError, match=r"latent_write: row is \(1, 40\)"):
        latent_write(
            torch.zeros(1, 2, 24), torch.zeros(1, 40), torch.ones(32),
            RowPlaces(torch.ones(4, 8), torch.ones(4, 8), ints.long(), ints.long(), ints), ints[None], pages, latent,
        )  # fmt: skip

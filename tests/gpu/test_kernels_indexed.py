"""The index of keys in few bits: what is written, scored, chosen, estimated and read, against float64 numpy."""

from itertools import product

import numpy as np
import pytest
import torch

from gpu.methods.indexed import BINS, BLOCK_TOKENS
from gpu.methods.indexed.attending import FETCHED, HEADS, MASS, OFFLOADED, READ
from gpu.methods.indexed.attending import TOKENS as SCORED
from gpu.methods.indexed.building import index_pages, index_tokens
from gpu.methods.indexed.codes import decode_reference, encode_keys_reference, encode_values_reference, make_rotation
from gpu.methods.indexed.scoring import BINS_PER_OCTAVE, LOWEST_OCTAVE
from gpu.operations.arguments import INTERPRETED
from tests.gpu.indexed_stand import KV_HEADS, NUM_LAYERS, PAGE_SLOT, Stand, make_stand
from tests.gpu.kernel_oracles import DEVICES, distance, wide
from tests.int4_reference import unpack
from tests.tolerances import INDEXED_FLIPS, INDEXED_PARTIAL, INDEXED_PARTIAL_BFLOAT16, INDEXED_SCORES, INDEXED_WEIGHTS
from transfer.tier_shape import Rows

SHAPES = [(64, 3), (128, 4), (96, 1), (128, 16)]
# Of two pieces. Three programs' tokens are for a GPU, and for the choice; the interpreter has two elsewhere.
LENGTHS = [1080, 76] if INTERPRETED else [2100, 76]
TOKENS = sum(LENGTHS)


def draw_query(stand: Stand, device: str, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries of two rows, and the lse of what they read on the device."""
    draw = np.random.default_rng(seed)
    heads = KV_HEADS * stand.shape.group
    query = torch.tensor(draw.normal(size=(2, heads, stand.shape.dim)), dtype=stand.index.keys.dtype, device=device)
    return query, torch.tensor(draw.normal(size=(2, heads)) + 6, dtype=torch.float32, device=device)


def estimated_keys(stand: Stand, kv_head: int, count: int, layer: int = 1) -> np.ndarray:
    """Return keys as the index rounds them, float64 `[tokens, dim]`, in the space of queries, from the stored codes."""
    index, place = stand.index, KV_HEADS + kv_head
    codes, scales = (stand.rows(name, layer, place, count) for name in ("codes", "scales"))
    rounded = decode_reference(codes, scales, stand.layout.key_bits)
    return wide(rounded) @ wide(stand.layout.rotation).T + wide(index.centres[layer, place])


def estimated_values(stand: Stand, kv_head: int, count: int, layer: int = 1) -> np.ndarray:
    """Return values as the index rounds them, float64 `[tokens, dim]`, from the stored codes."""
    place = KV_HEADS + kv_head
    codes, scales = (stand.rows(name, layer, place, count) for name in ("value_codes", "value_scales"))
    centres = wide(stand.rows("value_centres", layer, place, count))[np.arange(count) // BLOCK_TOKENS]
    rounded = centres + wide(decode_reference(codes, scales, stand.layout.value_bits))
    return rounded @ wide(stand.layout.rotation).T


def softmax_logits(query: torch.Tensor, keys: np.ndarray) -> np.ndarray:
    return wide(query) @ keys.T / np.sqrt(keys.shape[1])


def partial_of(logits: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    lse = np.logaddexp.reduce(logits, -1)
    return np.exp(logits - lse[:, None]) @ values, lse


def expected(stand: Stand, query: torch.Tensor, count: int, chosen: list[list[int]], layer: int = 1,
             stale: int | None = None, rest_times: float = 1.0) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Return out and lse of the second row over `count` tokens, of which `chosen` are read exactly.

    stale: a token whose rounded value is that of the next one.
    """
    group = stand.shape.group
    outs, lses = [], []
    for kv_head in range(KV_HEADS):
        own = query[1, kv_head * group : (kv_head + 1) * group]
        keys, values = stand.runs[layer].keys[kv_head], stand.runs[layer].values[kv_head]
        exact = softmax_logits(own, keys[:count])
        logits = softmax_logits(own, estimated_keys(stand, kv_head, count, layer))
        rest = np.setdiff1d(np.arange(count), chosen[kv_head])
        rounded = estimated_values(stand, kv_head, count, layer)
        if stale is not None:
            rounded[stale] = rounded[stale + 1]
        weights = [exact[:, chosen[kv_head]], logits[:, rest] + np.log(rest_times)]
        rows = np.concatenate([values[chosen[kv_head]], rounded[rest]])
        out, lse = partial_of(np.concatenate(weights, 1), rows)
        outs.append(out)
        lses.append(lse)
    return np.concatenate(outs), np.concatenate(lses)


@pytest.mark.parametrize("rows", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_a_budget_of_everything_is_dense_attention(device: str, shape: tuple[int, int], rows: Rows) -> None:
    stand = make_stand(*shape, [144, 64, 32], device, rows=rows)
    check_everything(stand, device)
    assert stand.counts[FETCHED] == 240 * KV_HEADS


@pytest.mark.parametrize("stored", [None, torch.int8, torch.uint8], ids=["plain", "int8", "fp8"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_a_budget_of_everything_in_pages_is_dense_attention(
    device: str, shape: tuple[int, int], stored: torch.dtype | None
) -> None:
    stand = make_stand(*shape, [144, 64, 32], device, stored=stored or torch.float32)
    check_everything(stand, device)
    assert stand.counts[FETCHED] == 0


def check_everything(stand: Stand, device: str) -> None:
    query, resident = draw_query(stand, device)
    partial = stand.step(query, resident, 240, 240)
    for kv_head in range(KV_HEADS):
        own = slice(kv_head * stand.shape.group, (kv_head + 1) * stand.shape.group)
        run = stand.runs[1]
        logits = softmax_logits(query[1, own], run.keys[kv_head, :240])
        out, lse = partial_of(logits, run.values[kv_head, :240])
        assert distance(partial.out[1, own], out) < INDEXED_PARTIAL
        assert distance(partial.lse[1, own], lse) < INDEXED_PARTIAL
    assert (partial.out[0] == 0).all()
    assert (partial.lse[0] == -torch.inf).all()
    heads = KV_HEADS * stand.shape.group
    counts = stand.counts.tolist()
    assert [counts[OFFLOADED], counts[READ], counts[HEADS], counts[MASS]] == [240 * KV_HEADS, 240 * KV_HEADS, heads, 0]


@pytest.mark.parametrize("key_bits", [2, 3, 4, 8])
@pytest.mark.parametrize("value_bits", [2, 4])
@pytest.mark.parametrize("device", DEVICES)
def test_what_is_not_chosen_is_estimated_by_its_keys_and_values_in_few_bits(
    device: str, key_bits: int, value_bits: int
) -> None:
    stand = make_stand(64, 3, [2100, 76], device, key_bits=key_bits, value_bits=value_bits)
    query, resident = draw_query(stand, device)
    partial = stand.step(query, resident, 2160, 100)
    chosen = stand.chosen()
    assert all(80 <= len(own) <= 100 for own in chosen)
    out, lse = expected(stand, query, 2160, chosen)
    assert distance(partial.out[1], out) < INDEXED_PARTIAL + INDEXED_SCORES + INDEXED_WEIGHTS
    assert np.abs(wide(partial.lse[1]) - lse).max() < INDEXED_SCORES


@pytest.mark.parametrize("stored", [None, torch.float32], ids=["host", "pages"])
@pytest.mark.parametrize("device", DEVICES)
def test_one_wrong_token_a_stale_value_and_a_rest_that_counts_twice_are_seen(
    device: str, stored: torch.dtype | None
) -> None:
    stand = make_stand(64, 3, LENGTHS, device, stored=stored)
    query, resident = draw_query(stand, device)
    partial = stand.step(query, resident, TOKENS, 100)
    chosen = stand.chosen()
    limit = INDEXED_PARTIAL + INDEXED_SCORES
    assert distance(partial.out[1], expected(stand, query, TOKENS, chosen)[0]) < limit
    assert all(80 <= len(own) <= 100 for own in chosen)
    for kv_head in range(KV_HEADS):
        other = [list(own) for own in chosen]
        other[kv_head][0] = next(token for token in range(TOKENS) if token not in other[kv_head])
        assert distance(partial.out[1], expected(stand, query, TOKENS, other)[0]) > limit
    likeliest = np.argsort(-wide(stand.work.logits[KV_HEADS, : TOKENS - 1, 0]))
    stale = int(next(token for token in likeliest if token not in chosen[0]))
    assert distance(partial.out[1], expected(stand, query, TOKENS, chosen, stale=stale)[0]) > limit
    twice = expected(stand, query, TOKENS, chosen, rest_times=2.0)
    assert distance(partial.out[1], twice[0]) > limit
    assert np.abs(wide(partial.lse[1]) - twice[1]).min() > INDEXED_SCORES


@pytest.mark.parametrize("budget", [16, 100, 256])
@pytest.mark.parametrize("device", DEVICES)
def test_chosen_are_the_tokens_with_the_most_of_a_groups_softmax(device: str, budget: int) -> None:
    """Up to a bin of the histogram, of 2 %: equal bins are all chosen or none is."""
    stand = make_stand(64, 3, [2100, 76], device, builds=False)
    query, resident = draw_query(stand, device)
    stand.step(query, resident, 2176, budget)
    for kv_head, got in enumerate(stand.chosen()):
        own = slice(kv_head * 3, kv_head * 3 + 3)
        logits = softmax_logits(query[1, own], estimated_keys(stand, kv_head, 2176))
        total = np.logaddexp(np.logaddexp.reduce(logits, -1), wide(resident[1, own]))
        scores = np.exp(logits - total[:, None]).sum(0)
        bins = np.clip(np.floor((np.log2(scores) - LOWEST_OCTAVE) * BINS_PER_OCTAVE), 0, BINS - 1)
        least = np.sort(bins)[::-1][budget]  # the first bin that does not fit
        wanted = set(np.flatnonzero(bins > least).tolist())
        near = set(np.flatnonzero(np.abs(bins - least) <= 1).tolist())  # of which rounding of scores moves some
        assert set(got) ^ wanted <= near
        assert len(near) < 100
        assert 0.8 * budget - 4 < len(got) <= budget


@pytest.mark.parametrize("device", DEVICES)
def test_equal_scores_are_chosen_all_or_none_and_nothing_is_lost(device: str) -> None:
    stand = make_stand(64, 3, [256], device, builds=False)
    query, resident = draw_query(stand, device)
    partial = stand.step(torch.zeros_like(query), resident, 256, 100)
    assert stand.chosen() == [[], []]
    values = np.stack([estimated_values(stand, kv_head, 256).mean(0) for kv_head in range(KV_HEADS)]).repeat(3, 0)
    assert distance(partial.out[1], values) < INDEXED_WEIGHTS
    assert np.abs(wide(partial.lse[1]) - np.log(256)).max() < INDEXED_SCORES


@pytest.mark.parametrize("rows", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("device", DEVICES)
def test_rows_stay_in_their_slots_while_they_are_chosen_and_only_new_ones_are_fetched(device: str, rows: Rows) -> None:
    lengths = [700, 452] if INTERPRETED else [1500, 548]
    tokens = sum(lengths)
    stand = make_stand(128, 4, lengths, device, rows=rows, builds=False)
    held: list[set[int]] = [set(), set()]
    for seed in range(4):
        query, resident = draw_query(stand, device, seed // 2)  # each query twice
        before = int(stand.counts[FETCHED])
        partial = stand.step(query, resident, tokens, 96)
        chosen = stand.chosen()
        new = sum(len(set(own) - known) for own, known in zip(chosen, held, strict=True))
        assert int(stand.counts[FETCHED]) - before == new
        assert (new == 0) == (seed % 2 == 1)
        held = [set(own) for own in chosen]
        check_slots(stand)
        assert distance(partial.out[1], expected(stand, query, tokens, chosen)[0]) < INDEXED_PARTIAL + INDEXED_SCORES
    stand.step(query, resident, tokens // 2, 96)  # half of it came back to the device
    assert all(max(own) < tokens // 2 for own in stand.chosen())
    check_slots(stand)
    assert int(stand.counts[READ]) < int(stand.counts[OFFLOADED]) // 10


def check_slots(stand: Stand, layer: int = 1) -> None:
    """A slot has the rows of the token that it names, no token stands twice, and bits say which they are."""
    index = stand.index.layer(layer)
    for kv_head in range(KV_HEADS):
        place, run = KV_HEADS + kv_head, stand.runs[layer]
        ids = index.ids[place].cpu().numpy()
        slots, tokens = np.flatnonzero(ids >= 0), ids[ids >= 0]
        assert len(set(tokens.tolist())) == len(tokens)
        assert distance(index.keys[place][slots], run.keys[kv_head][tokens]) < INDEXED_PARTIAL
        assert distance(index.values[place][slots], run.values[kv_head][tokens]) < INDEXED_PARTIAL
        words = index.held[place].cpu().numpy().view(np.uint32)
        bits = np.flatnonzero((words[:, None] >> np.arange(32, dtype=np.uint32)) & 1)
        assert bits.tolist() == sorted(tokens.tolist())


@pytest.mark.parametrize("rows", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("key_bits", [2, 3, 4, 8])
@pytest.mark.parametrize("device", DEVICES)
def test_an_index_that_grows_is_that_of_the_whole_run(device: str, key_bits: int, rows: Rows) -> None:
    lengths = [272, 64, 208]
    whole = make_stand(128, 4, lengths, device, key_bits=key_bits, rows=rows)
    grown = make_stand(128, 4, lengths, device, key_bits=key_bits, rows=rows, indexed=16)
    for begin, end in ((0, 304), (288, 336), (320, 544)):
        index_tokens(grown.index, 1, begin, end, grown.layout)
    for name in ("codes", "scales", "value_codes", "value_scales", "value_centres"):
        for layer, place in product(range(NUM_LAYERS), range(KV_HEADS, 2 * KV_HEADS)):
            got, wanted = (stand.rows(name, layer, place, 544) for stand in (grown, whole))
            assert torch.equal(got, wanted)
    for layer in range(2):
        for kv_head in range(KV_HEADS):
            keys = whole.runs[layer].keys[kv_head]
            rotated = (keys - wide(whole.index.centres[layer, KV_HEADS + kv_head])) @ wide(whole.layout.rotation)
            codes, scales = encode_keys_reference(torch.tensor(rotated, dtype=torch.float32), key_bits)
            got_codes = whole.rows("codes", layer, KV_HEADS + kv_head, 544).cpu()
            assert float((got_codes != codes).float().mean()) < INDEXED_FLIPS * 2**key_bits
            assert distance(whole.rows("scales", layer, KV_HEADS + kv_head, 544), wide(scales)) < INDEXED_PARTIAL
            own = wide(decode_reference(got_codes, scales, key_bits))
            worst = np.abs(own - rotated) / wide(scales)[:, None]
            assert worst.max() < 0.51 + 0.01 * 2**key_bits / 16
            values = torch.tensor(whole.runs[layer].values[kv_head] @ wide(whole.layout.rotation), dtype=torch.float32)
            codes, scales = encode_values_reference(values, 2)
            got_codes = whole.rows("value_codes", layer, KV_HEADS + kv_head, 544).cpu()
            assert float((got_codes != codes).float().mean()) < INDEXED_FLIPS * 2**2
            got_scales = whole.rows("value_scales", layer, KV_HEADS + kv_head, 544)
            assert distance(got_scales, wide(scales)) < INDEXED_SCORES


@pytest.mark.parametrize("rows", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("device", DEVICES)
def test_equal_values_are_estimated_nearly_exactly_and_unequal_ones_have_no_centre(device: str, rows: Rows) -> None:
    """Values that are rounded alike err alike, which no sum averages out."""
    stand = make_stand(64, 3, [2048], device, rows=rows)
    for layer, place in product(range(NUM_LAYERS), range(KV_HEADS, 2 * KV_HEADS)):
        assert not stand.rows("value_centres", layer, place, 2048).any()
        assert (stand.rows("value_scales", layer, place, 2048) > 0).all()
    for run in stand.runs:  # all tokens have the value of the first
        stored = run.alive[1]
        stored.copy_(stored[:, :1].clone().expand_as(stored))
    index_tokens(stand.index, 1, 0, 2048, stand.layout)
    for layer, place in product(range(NUM_LAYERS), range(KV_HEADS, 2 * KV_HEADS)):
        assert (stand.rows("value_scales", layer, place, 2048) < 0).all()
    query, resident = draw_query(stand, device)
    partial = stand.step(query, resident, 2048, 20)
    own = stand.runs[1].alive[1][:, 0]
    own = torch.from_numpy(unpack(own.numpy(), 64)) if rows == "int4" else own.float()
    own = own * stand.runs[1].alive[4] if rows == "int8" else own
    assert distance(partial.out[1], wide(own).repeat(3, 0)) < INDEXED_WEIGHTS


@pytest.mark.parametrize("stored", [torch.float32, torch.int8], ids=["plain", "int8"])
@pytest.mark.parametrize("device", DEVICES)
def test_an_index_of_pages_that_grows_is_that_of_their_rows(device: str, stored: torch.dtype) -> None:
    grown = make_stand(128, 4, [336, 208], device, stored=stored, indexed=64)
    for begin, end in ((64, 320), (320, 544)):
        index_pages(grown.index, 1, PAGE_SLOT, begin, end, grown.pages, grown.layout)
    for layer, run in enumerate(grown.runs):
        for kv_head in range(KV_HEADS):
            centre = grown.index.centres[layer, KV_HEADS + kv_head]
            assert distance(centre, run.keys[kv_head].mean(0)) < INDEXED_PARTIAL
            rotated = (run.keys[kv_head] - wide(centre)) @ wide(grown.layout.rotation)
            codes, scales = encode_keys_reference(torch.tensor(rotated, dtype=torch.float32), 4)
            got = grown.rows("codes", layer, KV_HEADS + kv_head, 544).cpu()
            assert float((got != codes).float().mean()) < INDEXED_FLIPS * 2**4
            assert distance(grown.rows("scales", layer, KV_HEADS + kv_head, 544), wide(scales)) < INDEXED_PARTIAL
            values = torch.tensor(run.values[kv_head] @ wide(grown.layout.rotation), dtype=torch.float32)
            codes, scales = encode_values_reference(values, 2)
            got = grown.rows("value_codes", layer, KV_HEADS + kv_head, 544).cpu()
            assert float((got != codes).float().mean()) < INDEXED_FLIPS * 2**2


@pytest.mark.parametrize("bits", [2, 4])
def test_a_rounded_value_keeps_its_length_along_itself_so_that_sums_are_not_too_short(bits: int) -> None:
    draw = np.random.default_rng(1)
    values = torch.tensor(draw.normal(size=(4000, 64)) + 0.2 * draw.normal(size=64), dtype=torch.float32)
    rounded = decode_reference(*encode_values_reference(values, bits), bits)
    assert torch.allclose((rounded * values).sum(-1), values.square().sum(-1), rtol=1e-3)
    mean = values.mean(0)
    assert abs(float(rounded.mean(0) @ mean / mean.square().sum()) - 1) < 0.03
    assert 0.5 * {2: 0.37, 4: 0.11}[bits] < distance(rounded, wide(values)) < {2: 0.37, 4: 0.11}[bits]
    zero = encode_values_reference(torch.zeros(1, 64), bits)
    assert float(decode_reference(*zero, bits).abs().max()) == 0


@pytest.mark.parametrize("device", DEVICES)
def test_a_head_that_wants_nothing_has_the_empty_partial(device: str) -> None:
    stand = make_stand(64, 3, [512], device, builds=False)
    query, resident = draw_query(stand, device)
    wanted = torch.ones(2, 6, dtype=torch.uint8, device=device)
    wanted[1, 2] = 0
    partial = stand.step(query, resident, 512, 64, wanted)
    assert float(partial.lse[1, 2]) == -torch.inf
    assert (partial.out[1, 2] == 0).all()
    others = [0, 1, 3, 4, 5]
    assert distance(partial.out[1, others], expected(stand, query, 512, stand.chosen())[0][others]) < (
        INDEXED_PARTIAL + INDEXED_SCORES
    )


@pytest.mark.parametrize("device", DEVICES)
def test_heads_that_want_nothing_have_no_part_in_a_choice_and_a_kv_head_without_others_is_not_read(device: str) -> None:
    stand = make_stand(64, 3, [1100, 76], device, builds=False)
    query, resident = draw_query(stand, device)
    stand.step(query, resident, 1176, 64)
    before, counts = stand.chosen(), stand.counts.clone()
    wanted = torch.ones(2, 6, dtype=torch.uint8, device=device)
    wanted[1, [1, 2, 3, 4, 5]] = 0
    stand.work.logits[KV_HEADS + 1] = torch.nan
    partial = stand.step(query, resident, 1176, 64, wanted)
    chosen = stand.chosen()
    assert chosen[0] != before[0], "the first head chooses alone"
    assert chosen[1] == before[1]
    assert stand.work.logits[KV_HEADS + 1].isnan().all()
    own = (stand.counts - counts).tolist()
    assert [own[OFFLOADED], own[READ], own[HEADS], own[SCORED]] == [1176, len(chosen[0]), 1, 1176]
    logits = softmax_logits(query[1, :1], estimated_keys(stand, 0, 1176))[0]
    least = np.sort(logits)[::-1][len(chosen[0])]
    assert logits[chosen[0]].min() > least - 0.05, "up to two bins"
    out, lse = expected(stand, query, 1176, chosen)
    assert distance(partial.out[1, :1], out[:1]) < INDEXED_PARTIAL + INDEXED_SCORES
    assert abs(float(partial.lse[1, 0]) - lse[0]) < INDEXED_SCORES
    assert (partial.lse[1, 1:] == -torch.inf).all()
    assert (partial.out[1, 1:] == 0).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("stored", [None, torch.bfloat16, torch.int8, torch.uint8], ids=str)
def test_queries_and_rows_in_bfloat16_are_read_as_precisely_as_pages(stored: torch.dtype | None) -> None:
    stand = make_stand(128, 4, [1500, 548], "cuda", dtype=torch.bfloat16, stored=stored)
    query, resident = draw_query(stand, "cuda")
    partial = stand.step(query, resident, 2048, 256)
    out, _ = expected(stand, query, 2048, stand.chosen())
    assert distance(partial.out[1], out) < INDEXED_PARTIAL_BFLOAT16


def test_a_rotation_keeps_products_and_is_the_same_in_every_process() -> None:
    rotation = make_rotation(96, torch.device("cpu"))
    assert torch.allclose(rotation @ rotation.T, torch.eye(96), atol=1e-6)
    assert torch.equal(rotation, make_rotation(96, torch.device("cpu")))

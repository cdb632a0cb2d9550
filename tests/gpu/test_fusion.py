"""Prompts that take chunks computed alone: every policy against a float64 oracle, and what must equal dense prefill."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

from gpu.attention.prefill_query import PrefillQuery
from gpu.fusion.fusion_plan import CHOOSES
from gpu.fusion.token_choice import question_scores
from gpu.model.spec import LayerSpec
from tests.gpu import fusion_stand, host_prefill
from tests.gpu.fusion_stand import FusionStand, Oracle, draw
from tests.gpu.host_prefill import SHAPE
from tests.tolerances import FUSED_LOGIT_ATOL, FUSED_ROWS_INT8_ATOL, METHOD_FLOAT32
from transfer.chunks.chunk_format import ChunkKey
from transfer.host_config import PolicyName

SPANS = [(7, 47), (47, 80), (83, 148)]
TOKENS = draw(160, 1)


def make(tmp_path: Path, **how: object) -> FusionStand:
    stand = FusionStand(tmp_path, **how)
    stand.capture([TOKENS[begin:end] for begin, end in SPANS], 50)
    return stand


@pytest.fixture
def stand(tmp_path: Path) -> FusionStand:
    return make(tmp_path)


@pytest.mark.parametrize("unit_tokens", [23, 500])
@pytest.mark.parametrize("select_layer", [0, 1, 3])
def test_a_policy_that_chooses_gives_the_oracles_logits(
    stand: FusionStand, select_layer: int, unit_tokens: int
) -> None:
    wanted, chosen = Oracle(stand).fuse(TOKENS, SPANS, "a3", 0.15, select_layer)
    assert len(chosen) == 24
    got = stand.serve(stand.prompt(TOKENS, SPANS, "a3", 0.15, select_layer), unit_tokens)
    np.testing.assert_allclose(got, wanted, atol=FUSED_LOGIT_ATOL, rtol=0)


@pytest.mark.parametrize("unit_tokens", [23, 500])
def test_a_policy_that_chooses_none_gives_the_oracles_logits(stand: FusionStand, unit_tokens: int) -> None:
    wanted, _ = Oracle(stand).fuse(TOKENS, SPANS, "pie", 0.15)
    got = stand.serve(stand.prompt(TOKENS, SPANS, "pie", 0.15), unit_tokens)
    np.testing.assert_allclose(got, wanted, atol=FUSED_LOGIT_ATOL, rtol=0)


TWICE = np.concatenate([TOKENS[:7], TOKENS[7:47], TOKENS[7:47], TOKENS[87:]])
EDGES = {
    "nothing in front, nothing behind": (TOKENS, [(0, 80), (80, 160)]),
    "the last token is a chunk": (TOKENS, [(7, 47), (159, 160)]),
    "a chunk is one token": (TOKENS, [(7, 8), (47, 80)]),
    "one chunk twice": (TWICE, [(7, 47), (47, 87), (100, 148)]),
    "nothing but a chunk of one token": (TOKENS[:1], [(0, 1)]),
}


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("ratio", [0.0, 0.15, 1.0])
def test_chunks_anywhere_give_the_oracles_logits_by_every_policy(edge: str, ratio: float, tmp_path: Path) -> None:
    ids, spans = EDGES[edge]
    stand = FusionStand(tmp_path)
    stand.capture([ids[begin:end] for begin, end in spans], 50)
    for policy in ("a3", "random", "pie"):
        wanted, _ = Oracle(stand).fuse(ids, spans, policy, ratio, 2)
        got = stand.serve(stand.prompt(ids, spans, policy, ratio, 2), 23)
        np.testing.assert_allclose(got, wanted, atol=FUSED_LOGIT_ATOL, rtol=0, err_msg=policy)


@pytest.mark.parametrize("rows", [1, 3, 7, 99])
def test_scores_are_the_questions_attention_however_it_is_cut(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    count, context, begin = 7, 30, 20
    monkeypatch.setattr("gpu.fusion.token_choice.LOGIT_ENTRIES", rows * 4 * context)
    numbers = np.random.default_rng(3)
    query, keys = numbers.normal(size=(count, 4, 16)), numbers.normal(size=(2, context, 16))
    keys[:, begin + count :] = np.nan  # not written yet
    wanted = np.zeros(context)
    for row in range(count):
        for head in range(4):
            logits = query[row, head] @ keys[head // 2, : begin + row + 1].T * 0.4
            weights = np.exp(logits - logits.max())
            wanted[: begin + row + 1] += weights / weights.sum()
    got = question_scores(torch.from_numpy(query).float(), torch.from_numpy(keys).float(), begin, 0.4)
    np.testing.assert_allclose(got.numpy(), wanted, atol=METHOD_FLOAT32)


def test_seams_are_chosen_first_and_charged_to_the_ratio(stand: FusionStand) -> None:
    wanted, chosen = Oracle(stand).fuse(TOKENS, SPANS, "a3", 0.1, 1, seam_tokens=3)
    assert len(chosen) == 16
    assert {begin + token for begin, _ in SPANS for token in range(3)} <= set(chosen.tolist())
    got = stand.serve(stand.prompt(TOKENS, SPANS, "a3", 0.1, 1, seam_tokens=3), 500)
    np.testing.assert_allclose(got, wanted, atol=FUSED_LOGIT_ATOL, rtol=0)


@pytest.mark.parametrize("unit_tokens", [23, 500])
@pytest.mark.parametrize("seam_tokens", [1, 4, 36])  # one chunk has 33 tokens
def test_seams_alone_are_computed_again_where_the_ratio_is_0(
    stand: FusionStand, seam_tokens: int, unit_tokens: int
) -> None:
    wanted, chosen = Oracle(stand).fuse(TOKENS, SPANS, "a3", 0.0, 1, seam_tokens=seam_tokens)
    firsts = [token for begin, end in SPANS for token in range(begin, min(begin + seam_tokens, end))]
    assert chosen.tolist() == firsts
    prompt = stand.prompt(TOKENS, SPANS, "a3", 0.0, 1, seam_tokens=seam_tokens)
    assert prompt.fused.num_chosen == len(firsts)
    np.testing.assert_allclose(stand.serve(prompt, unit_tokens), wanted, atol=FUSED_LOGIT_ATOL, rtol=0)
    other, _ = Oracle(stand).fuse(TOKENS, SPANS, "a3", 0.0, 1, seam_tokens=seam_tokens + 1)
    assert np.abs(wanted - other).max() > 10 * FUSED_LOGIT_ATOL, "a token more would be seen"


@pytest.mark.parametrize("ratio", [0.0, 0.15])
@pytest.mark.parametrize("policy", ["a3", "random"])
def test_one_seam_token_mends_what_a_chunks_own_sink_does(tmp_path: Path, policy: str, ratio: float) -> None:
    """Of a model whose first token draws attention: each chunk brings such a token, in the middle of the prompt."""
    stand, ids = FusionStand(tmp_path, has_sinks=True), TOKENS // 2 * 2 + np.arange(160, dtype=np.int32) % 2
    stand.capture([ids[begin:end] for begin, end in SPANS], 50)
    whole = stand.serve(stand.prompt(ids, [], "vanilla", 0.0), 500)
    errors = [
        np.abs(stand.serve(stand.prompt(ids, SPANS, policy, ratio, 1, seam_tokens=seam), 500) - whole).max()
        for seam in (0, 1)
    ]
    assert errors[0] > 5 * errors[1]


def test_every_policy_that_may_be_said_is_known() -> None:
    assert set(CHOOSES) == set(get_args(PolicyName))


def test_the_policies_are_told_apart_by_the_tolerance(stand: FusionStand) -> None:
    """The power of what is above: another policy, another layer, one token more or less."""
    oracle = Oracle(stand)
    one = [oracle.fuse(TOKENS, SPANS, policy, 0.15)[0] for policy in ("random", "pie")]
    one += [oracle.fuse(TOKENS, SPANS, "a3", ratio)[0] for ratio in (0.15, 0.16)]
    one += [oracle.fuse(TOKENS, SPANS, "a3", 0.15, layer)[0] for layer in (0, 3)]
    for number, logits in enumerate(one):
        for other in one[:number]:
            assert np.abs(logits - other).max() > 10 * FUSED_LOGIT_ATOL


@pytest.mark.parametrize("policy", ["a3", "random"])
def test_all_tokens_computed_again_is_dense_prefill(stand: FusionStand, policy: str) -> None:
    wanted = stand.serve(stand.prompt(TOKENS, [], "vanilla", 0.0), 500)
    for unit_tokens in (23, 500):
        got = stand.serve(stand.prompt(TOKENS, SPANS, policy, 1.0), unit_tokens)
        np.testing.assert_allclose(got, wanted, atol=FUSED_LOGIT_ATOL, rtol=0)


def test_one_chunk_behind_nothing_is_dense_prefill(tmp_path: Path) -> None:
    stand = FusionStand(tmp_path)
    ids = draw(90, 2)
    stand.capture([ids], 40)
    wanted = stand.serve(stand.prompt(ids, [], "vanilla", 0.0), 500)
    prompt = stand.prompt(ids, [(0, 90)], "pie", 0.15)
    assert prompt.fused.num_computed == 1
    np.testing.assert_allclose(stand.serve(prompt, 500), wanted, atol=FUSED_LOGIT_ATOL, rtol=0)


def test_the_control_draws_the_same_tokens_for_the_same_prompt(stand: FusionStand) -> None:
    first, second = (stand.serve(stand.prompt(TOKENS, SPANS, "random", 0.3), 500) for _ in range(2))
    other = stand.serve(stand.prompt(TOKENS, SPANS, "a3", 0.3), 500)
    assert np.array_equal(first, second)
    assert np.abs(first - other).max() > FUSED_LOGIT_ATOL


def test_a_prompt_begins_behind_pages_that_are_there(stand: FusionStand) -> None:
    ids = np.concatenate([draw(16, 5), TOKENS[7:]])
    spans = [(begin + 9, end + 9) for begin, end in SPANS]
    wanted = stand.serve(stand.prompt(ids, spans, "a3", 0.15), 500)
    got = stand.serve(stand.prompt(ids, spans, "a3", 0.15, begin=16), 23)
    np.testing.assert_allclose(got, wanted, atol=FUSED_LOGIT_ATOL, rtol=0)


def test_what_was_drawn_before_asks_nothing(stand: FusionStand) -> None:
    prompt = stand.prompt(TOKENS, SPANS, "a3", 0.15, num_prompt_tokens=150)
    assert (prompt.fused.question_begin, prompt.fused.question_end) == (148, 150)
    assert prompt.fused.num_chosen == round(0.15 * 150)
    assert np.isfinite(stand.serve(prompt, 500)).all()


@pytest.mark.parametrize(("rows", "atol"), [("int8", FUSED_ROWS_INT8_ATOL), ("bfloat16", FUSED_ROWS_INT8_ATOL)])
def test_rounded_rows_move_logits_within_their_error(tmp_path: Path, rows: str, atol: float) -> None:
    rounded = make(tmp_path, rows=rows)
    wanted, _ = Oracle(rounded).fuse(TOKENS, SPANS, "a3", 0.15)
    got = rounded.serve(rounded.prompt(TOKENS, SPANS, "a3", 0.15), 500)
    assert FUSED_LOGIT_ATOL < np.abs(got - wanted).max() < atol


@pytest.mark.parametrize("memory_gib", [0.0, 1.0])
def test_a_chunk_that_is_lost_is_computed_while_its_prompt_waits(tmp_path: Path, memory_gib: float) -> None:
    ids, other = TOKENS.copy(), make(tmp_path, memory_gib=memory_gib)
    wanted = other.serve(other.prompt(ids, SPANS, "a3", 0.15), 500)
    other.library.shutdown()
    for path in tmp_path.rglob("*.kv"):
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1  # of the last layer's values
        path.write_bytes(raw)
    broken = FusionStand(tmp_path, memory_gib=memory_gib)
    got = broken.serve(broken.prompt(ids, SPANS, "a3", 0.15), 500)
    np.testing.assert_allclose(got, wanted, atol=FUSED_LOGIT_ATOL, rtol=0)
    assert broken.library.store.counts()["lost"] == 3
    absent = FusionStand(tmp_path / "empty")
    got = absent.serve(absent.prompt(ids, SPANS, "a3", 0.15), 500)
    np.testing.assert_allclose(got, wanted, atol=FUSED_LOGIT_ATOL, rtol=0)


@pytest.mark.parametrize("what", ["copy", "store"])
def test_a_chunk_that_cannot_be_kept_is_told_of_and_nobody_waits_for_it(
    what: str, stand: FusionStand, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a GPU, where a thread waits for copies."""

    class Event:
        def synchronize(self) -> None:
            if what == "copy":
                raise RuntimeError("an illegal memory access")

    def put(*_: object) -> None:
        raise MemoryError("no more of it")

    documents, key = stand.documents, stand.key(draw(20, 2))
    room = stand.library.room_bytes
    stand.library.take_done()
    documents._waiting = ThreadPoolExecutor(1)
    monkeypatch.setattr(documents, "_sent", Event)
    monkeypatch.setattr(stand.library.store, "put", put)
    assert not stand.library.hold(key)
    documents.keep(key, documents.layers_for(20))
    documents._waiting.shutdown()
    assert stand.library.is_refused(key)
    assert not stand.library.is_there(key)
    assert stand.library.take_done() == [(key, None)], "the scheduler is told"
    assert ("an illegal memory access" if what == "copy" else "no more of it") in caplog.text
    assert stand.library.room_bytes == room
    stand.library.release(key)


def test_layers_of_a_lost_chunk_stay_until_copies_have_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who launches drops the job before the device has read them."""
    stand = FusionStand(tmp_path)  # that has none of the chunks
    later: list[object] = []
    monkeypatch.setattr(stand.documents, "release", later.extend)
    made: list[weakref.ref[np.ndarray]] = []
    keep_now = stand.documents.keep_now

    def watch(key: ChunkKey, layers: torch.Tensor) -> list[np.ndarray]:
        pages = keep_now(key, layers)
        made.extend(map(weakref.ref, pages))
        return pages

    monkeypatch.setattr(stand.documents, "keep_now", watch)
    stand.serve(stand.prompt(TOKENS, SPANS, "pie", 0.0), 500)
    stand.library.store.delete(stand.key(TOKENS)).result()
    stand.library.take_done()  # that they are written, and what was
    gc.collect()
    assert made
    assert all(layer() is not None for layer in made)
    for release in later:
        release()
    later.clear()
    gc.collect()
    assert all(layer() is None for layer in made)


def test_what_is_kept_of_a_chunk_depends_on_nothing_beside_it(tmp_path: Path) -> None:
    chunks = [TOKENS[begin:end] for begin, end in SPANS]
    alone, together = FusionStand(tmp_path / "alone"), FusionStand(tmp_path / "together")
    together.capture(chunks, 37)
    for chunk in chunks:
        alone.capture([chunk], 500)
        layers = []
        for stand in (alone, together):
            source = stand.library.open(stand.key(chunk))
            rows = [source.layer(layer, np.empty(0, np.uint8)).result() for layer in range(6)]
            layers.append(np.stack(rows).view(np.float32))
            source.release()
        np.testing.assert_allclose(layers[0], layers[1], atol=FUSED_LOGIT_ATOL, rtol=0)
        oracle = Oracle(alone).alone(chunk)
        wanted = np.stack([np.stack(pair) for pair in oracle]).reshape(layers[0].shape)
        np.testing.assert_allclose(layers[0], wanted, atol=FUSED_LOGIT_ATOL, rtol=0)


class SeesPrompts:
    """As a method whose sequences hold rings: what it is shown, by layer."""

    def __init__(self) -> None:
        self.shown: dict[int, list[PrefillQuery]] = {}

    sees_prompts = True

    def has_ring(self, slot: int) -> bool:
        return slot == 0

    def see_prompt(self, slot: int, query: PrefillQuery, attend: object) -> None:
        copy = replace(query, query=query.query.clone(), keys=query.keys.clone(), values=query.values.clone())
        self.shown.setdefault(query.layer, []).append(copy)


@pytest.mark.parametrize("policy", ["a3", "random"])
@pytest.mark.parametrize("unit_tokens", [29, 500])
def test_methods_with_rings_see_the_end_of_a_fused_prompt_in_order(
    stand: FusionStand, policy: str, unit_tokens: int
) -> None:
    """All behind the last chunk, in every layer; where all is computed again, as of a prompt without chunks."""
    dense, fused = SeesPrompts(), SeesPrompts()
    for seer, spans in ((dense, []), (fused, SPANS)):
        stand.prefill.attention.reusing = (seer,)
        stand.serve(stand.prompt(TOKENS, spans, policy if spans else "vanilla", 1.0), unit_tokens)
    tail = SPANS[-1][1]
    for layer in range(6):
        (last, *_), parts = dense.shown[layer][::-1], fused.shown[layer]
        assert [part.begin for part in parts[1:]] == [part.begin + len(part.query) for part in parts[:-1]]
        assert parts[-1].begin + len(parts[-1].query) == len(TOKENS)
        assert parts[0].begin <= tail
        for part in parts:
            assert part.keys.shape[1] == part.begin + len(part.query)
            assert part.positions.tolist() == list(range(part.begin, part.begin + len(part.query)))
        np.testing.assert_allclose(
            parts[-1].query[-3:].numpy(), last.query[-3:].numpy(), atol=FUSED_LOGIT_ATOL, rtol=0
        )  # fmt: skip
        np.testing.assert_allclose(parts[-1].keys.numpy(), last.keys.numpy(), atol=FUSED_LOGIT_ATOL, rtol=0)


def test_learned_sinks_take_their_mass_in_chunks_and_in_prompts_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a gpt-oss has them: a text's first chunk is what the text itself computes, and so are tokens chosen anew."""
    monkeypatch.setattr(fusion_stand, "SHAPE", replace(SHAPE, layer_pattern=(LayerSpec(sinks=True),)))
    monkeypatch.setattr(host_prefill, "SHAPE", fusion_stand.SHAPE)
    stand = FusionStand(tmp_path, shape=fusion_stand.SHAPE)
    for layer in stand.weights.layers:
        assert layer.sinks is not None
        layer.sinks.copy_(torch.linspace(-1, 3, len(layer.sinks)))
    first = (0, SPANS[0][1] - SPANS[0][0])
    stand.capture([TOKENS[: first[1]]], 50)
    whole = stand.serve(stand.prompt(TOKENS, [], "vanilla", 0.0), 500)
    got = stand.serve(stand.prompt(TOKENS, [first], "a3", 0.0), 23)
    np.testing.assert_allclose(got, whole, atol=FUSED_LOGIT_ATOL, rtol=0)
    stand.capture([TOKENS[begin:end] for begin, end in SPANS], 50)
    got = stand.serve(stand.prompt(TOKENS, SPANS, "a3", 1.0), 500)
    np.testing.assert_allclose(got, whole, atol=FUSED_LOGIT_ATOL, rtol=0)
    for layer in stand.weights.layers:
        layer.sinks.sub_(30.0)
    without = stand.serve(stand.prompt(TOKENS, [first], "a3", 0.0), 500)
    assert np.abs(without - whole).max() > 10 * FUSED_LOGIT_ATOL, "power: sinks left out are seen"

"""What a prefill method is asked: its own prompt's queries with their positions, all keys, the state that it made."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from gpu.attention.prefill_query import Attended, PrefillQuery
from gpu.methods.prefill_side import PrefillSide
from gpu.prefill.dense import Dense
from gpu.step import DENSE, PageWrite, PartId, PrefillJob, PrefillPrompt, PrefillUnit, Unit
from tests.gpu.host_prefill import DOWN, PAGE, SHAPE, Stand, host_prompt
from tests.gpu.reference_model import GREEDY, units_without
from tests.gpu.test_prefill_host import units_of
from tests.tolerances import CHUNKING_LOGPROB_ATOL, HOST_LOGIT_SAME_CHUNKS_ATOL

SPY = PartId("prefill", "spy")


@dataclass
class Spy(PrefillSide):
    """Dense, told by positions alone; it remembers what it was asked."""

    made: list[tuple[int, int, int]] = field(default_factory=list)
    asked: list[tuple[int, int, int, int]] = field(default_factory=list)  # layer, begin, tokens, of the prompt

    def make_state(self, layer: int, begin: int, num_prompt_tokens: int) -> object:
        self.made.append((layer, begin, num_prompt_tokens))
        return [layer, begin]

    def attend(self, query: PrefillQuery) -> Attended:
        assert query.begin is not None
        tokens = len(query.query)
        assert query.query.shape == query.pre_rope_query.shape == (tokens, SHAPE.num_heads, SHAPE.dim)
        assert query.positions.tolist() == list(range(query.begin, query.begin + tokens))
        assert isinstance(query.state, list)
        assert query.state[0] == query.layer
        assert query.state[1] == query.begin, "what the last unit left"
        query.state[1] += tokens
        self.asked.append((query.layer, query.begin, tokens, query.num_prompt_tokens))
        return Dense().attend(replace(query, begin=None))


def by_spy(units: list[Unit]) -> list[Unit]:
    return [replace(unit, method=SPY) if isinstance(unit, PrefillUnit) else unit for unit in units]


def make_stand(has_tier: bool) -> tuple[Stand, Spy]:
    stand, spy = Stand(has_tier=has_tier), Spy()
    stand.prefill.attention.sides = {DENSE: Dense(), SPY: spy}
    return stand, spy


def draw_tokens(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, SHAPE.vocab_size, count, dtype=np.int32)


@pytest.mark.parametrize("chunk_tokens", [40, 150])
def test_each_prompt_of_a_job_is_asked_for_itself_and_told_what_dense_tells(chunk_tokens: int) -> None:
    tokens = [draw_tokens(70, 1), draw_tokens(3, 2), draw_tokens(61, 3)]
    alone, told = [], []
    stand, _ = make_stand(has_tier=False)
    for slot, ids in enumerate(tokens):
        stand.give_pages(slot, len(ids), None)
        job = stand.job(slot, slot, ids, sampling=GREEDY)
        stand.prefill.add(job)
        stand.run(units_of(job, 1000))
        alone.append(stand.sampler.logits)
    for method in (DENSE, SPY):
        stand, spy = make_stand(has_tier=False)
        for slot, ids in enumerate(tokens):
            stand.give_pages(slot, len(ids), None)
        job = PrefillJob(1, [PrefillPrompt(slot, ids, 0, len(ids), GREEDY, "x") for slot, ids in enumerate(tokens)])
        stand.prefill.add(job)
        units = units_of(job, chunk_tokens)
        stand.run(units if method == DENSE else by_spy(units))
        told.append(stand.sampler.logits)
    for logits in told:
        torch.testing.assert_close(logits, torch.cat(alone), atol=CHUNKING_LOGPROB_ATOL, rtol=0)
    layers = range(SHAPE.num_layers)
    assert spy.made == [(layer, 0, len(ids)) for layer in layers for ids in tokens]
    for layer in layers:
        for ids in tokens:
            pieces = [(begin, count) for at, begin, count, of in spy.asked if at == layer and of == len(ids)]
            assert sum(count for _, count in pieces) == len(ids)
    assert stand.prefill._jobs == {}


@pytest.mark.parametrize("num_units", [1, 3, 6])
def test_a_prompt_that_is_cut_out_leaves_the_others_their_states(num_units: int) -> None:
    """Units of 50 tokens end within the first prompt, the second, the third, and the first one again."""
    tokens = [draw_tokens(70, 1), draw_tokens(50, 2), draw_tokens(61, 3)]
    told = []
    for leaving in (None, 1):
        stand, spy = make_stand(has_tier=False)
        for slot, ids in enumerate(tokens):
            stand.give_pages(slot, len(ids), None)
        job = PrefillJob(1, [PrefillPrompt(slot, ids, 0, len(ids), GREEDY, "x") for slot, ids in enumerate(tokens)])
        stand.prefill.add(job)
        units = by_spy(units_of(job, 50))
        if leaving is not None:
            stand.run(units[:num_units])
            stand.prefill.cut(leaving)
            units = units_without(job, units[num_units:], leaving)
        stand.run(units)
        told.append(stand.sampler.logits)
    torch.testing.assert_close(told[1], told[0][[0, 2]], atol=CHUNKING_LOGPROB_ATOL, rtol=0)
    assert len(spy.made) == len(set(spy.made)), "a state is made once a layer"
    assert stand.prefill._jobs == {}


def test_a_prefix_in_pages_is_attended_to_by_the_same_method() -> None:
    ids, more = draw_tokens(80, 1), draw_tokens(50, 2)
    told = []
    for method in (DENSE, SPY):
        stand, spy = make_stand(has_tier=False)
        pages = stand.give_pages(0, 80, None)
        first = stand.job(1, 0, ids, sampling=GREEDY)
        stand.prefill.add(first)
        stand.run(units_of(first, 150))
        own = [*pages, *stand.give_pages(1, 50, None)]
        stand.pool.write_pages([PageWrite(1, 0, own)])
        job = stand.job(2, 1, np.concatenate([ids, more]), begin=80)
        stand.prefill.add(job)
        stand.run(units_of(job, 30) if method == DENSE else by_spy(units_of(job, 30)))
        told.append(stand.sampler.logits)
    torch.testing.assert_close(told[1], told[0], atol=CHUNKING_LOGPROB_ATOL, rtol=0)
    assert spy.asked[:2] == [(0, 80, 30, 130), (0, 110, 20, 130)]


def test_a_prompt_that_is_offloaded_is_attended_to_by_its_method() -> None:
    ids = draw_tokens(21 * PAGE + 5, 1)
    told = []
    for method in (DENSE, SPY):
        stand, spy = make_stand(has_tier=True)
        host = host_prompt(len(ids), 7)
        stand.give_pages(0, len(ids), host)
        job = stand.job(1, 0, ids, host)
        stand.prefill.add(job)
        stand.run(units_of(job, 64) if method == DENSE else by_spy(units_of(job, 64)))
        told.append(stand.sampler.logits)
    torch.testing.assert_close(told[1], told[0], atol=HOST_LOGIT_SAME_CHUNKS_ATOL, rtol=0)
    assert {layer for layer, *_ in spy.asked} == set(range(SHAPE.num_layers)) > set(DOWN)


def test_what_covers_the_whole_past_is_merged_with_nothing() -> None:
    with pytest.raises(AssertionError, match="has no lse covers the whole past"):
        Attended(torch.zeros(1, 1, 8), None).partial()

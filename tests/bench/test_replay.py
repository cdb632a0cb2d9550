"""Acceptance carried to random weights: rates of a real model, records that are drawn again, and how draws part."""

import re
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from bench.benchmark_rows import GateError
from bench.replay import (
    INDEXED_LENGTH,
    NGRAM_LENGTHS,
    REAL,
    RIGHT,
    Acceptance,
    Partings,
    Recorded,
    Replayed,
    parse_acceptance,
    rates_of,
)
from gpu.sampling.sampler import Sampler
from gpu.sampling_params import SamplingParams

PAGE = Path(__file__).parents[2] / "docs" / "methods" / "drafts.md"
VOCAB = 64
PROMPT = np.arange(5, dtype=np.int32)
GREEDY = SamplingParams(temperature=0.0)


def test_rates_draw_as_many_tokens_as_the_page_says_that_a_real_model_drew() -> None:
    page = PAGE.read_text()
    for kind, lengths in NGRAM_LENGTHS.items():
        (row,) = re.findall(rf"\| 10 {kind} \| [\d,]+ \| ([\d./ ]+) \|", page)
        assert tuple(float(part) for part in row.split(" / ")) == lengths
    assert f"{INDEXED_LENGTH:.2f} (5)" in page
    draw, text = Random(0), list(range(7))
    for name, lengths in {**NGRAM_LENGTHS, "indexed": (None, None, INDEXED_LENGTH)}.items():
        for width, wanted in zip((2, 4, 8), lengths, strict=True):
            drawn = []
            for _ in range(20_000):
                spoilt = REAL[name].spoil(text[: width - 1], 0, VOCAB, draw)
                drawn.append(1 + next((at for at, one in enumerate(spoilt) if one != text[at]), width - 1))
            assert wanted is None or np.mean(drawn) == pytest.approx(wanted, abs=0.06)


def test_rates_are_parsed_by_number_and_by_kind_and_others_are_refused() -> None:
    assert parse_acceptance("0.5,edits") == (Acceptance("0.5 a token", (0.5,)), REAL["edits"])
    assert rates_of({2: 1.5}) == (0.5,)
    for text in ("1.5", "-0.1", "poems", ""):
        with pytest.raises(ValueError, match="wanted"):
            parse_acceptance(text)


class Noted:
    """A source that counts what it is asked."""

    def __init__(self) -> None:
        self.num_observed = self.num_asked = 0

    def observe(self, token_ids: np.ndarray) -> None:
        self.num_observed += len(token_ids)

    def propose(self, most_tokens: int) -> None:
        self.num_asked += 1

    def forget(self) -> None:
        self.num_observed = -1


def test_a_source_runs_and_the_records_tokens_take_the_place_of_its_own() -> None:
    source, record = Noted(), list(range(10, 20))
    replayed = Replayed(source, 5, record, RIGHT, VOCAB, Random(0))  # type: ignore[arg-type]
    replayed.observe(PROMPT)
    assert replayed.propose(3).token_ids == [10, 11, 12]
    replayed.observe(np.array([10, 11], np.int32))
    assert replayed.propose(3).token_ids == [12, 13, 14]
    assert (source.num_observed, source.num_asked) == (7, 2)
    replayed.forget()
    assert source.num_observed == -1


class Runner:
    """Has a sampler, with one slot that a recorded text is drawn in."""

    def __init__(self) -> None:
        self._sampler = Sampler(2, VOCAB, torch.device("cpu"))


def logits_of(best: list[int], others: list[int], steps: float) -> torch.Tensor:
    """Return rows where `others` come that many steps of bf16 behind `best`, whose logits are 5: a step is 2^-5."""
    logits = torch.zeros(len(best), VOCAB)
    logits[range(len(best)), others] = 5.0 - steps / 32
    logits[range(len(best)), best] = 5.0
    return logits


def recorded(text: list[int]) -> tuple[Recorded, Sampler]:
    runner = Runner()
    made = Recorded(runner)  # type: ignore[arg-type]
    made.records[PROMPT.tobytes()] = text
    runner._sampler.assign(0, GREEDY, PROMPT, PROMPT[:0])
    runner._sampler.assign(1, GREEDY, PROMPT[:2], PROMPT[:0])
    return made, runner._sampler


@pytest.mark.parametrize(("steps", "level", "beyond"), [(0.0, 1, 0), (1.5, 1, 0), (2.5, 0, 1), (40.0, 0, 1)])
def test_the_record_is_drawn_and_what_would_have_been_is_counted(steps: float, level: int, beyond: int) -> None:
    """Of a tie the lower token comes first, which here is the other one."""
    made, sampler = recorded([7, 9, 11])
    first = sampler.sample(logits_of([7, 3], [8, 4], 1.0), [0, 1], [0, 0])
    second = sampler.sample(logits_of([2], [9], steps), [0], [1])
    assert first.tokens.tolist() == [7, 3], "the other slot has no record"
    assert second.tokens.tolist() == [9]
    told = made.take_partings()
    assert (told.draws, told.level, told.beyond) == (2, level, beyond)
    assert told.most_steps == pytest.approx(steps, abs=1e-3)
    assert made.take_partings() == Partings()
    if steps > 16:
        with pytest.raises(GateError, match="is the record's"):
            told.check(False, "text")
    else:
        told.check(False, "text")
    with pytest.raises(GateError, match="the text is the record's"):
        told.check(True, "text")


def test_of_a_draft_the_rows_up_to_its_first_wrong_token_count() -> None:
    made, sampler = recorded([7, 9, 11, 13])
    logits = logits_of([7, 5, 5, 5], [8, 9, 11, 13], 2.0)
    drawn = sampler.verify(logits, [0], [0], [(7, 12, 11)])  # its second token is wrong
    assert drawn.tokens.tolist() == [9]
    told = made.take_partings()
    assert (told.draws, told.level, told.beyond) == (2, 1, 0)


def test_what_the_device_drafts_is_the_record_spoilt_by_position() -> None:
    made, sampler = recorded([7, 9, 11, 13, 15])
    made.replace_guesses(Acceptance("first", (1.0, 0.0)), Random(0))
    free = logits_of([1], [2], 1.0)
    sampler.sample(logits_of([7], [8], 1.0), [0], [0])
    assert [sampler.guess(free, [0], [number]).item() for number in (1, 2)] == [9, 12]
    sampler.verify(logits_of([9, 11], [8, 8], 1.0), [0], [1], [(9,)])
    assert sampler.guess(free, [0], [3]).item() == 13, "a draft begins anew behind each step"
    made.replace_guesses(None, Random(0))
    assert sampler.guess(free, [0], [3]).item() == 1, "and nothing of the record is left in it"

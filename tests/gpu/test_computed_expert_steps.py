"""Whole steps in which the CPU computes experts, alone and beside attention over offloaded contexts: what they say, in
which order they ask, and what becomes of those that come to nothing. A thread stands in for the device.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from cpu.experts import HostExperts
from gpu.config import GpuConfig, ModelConfig
from gpu.decode.steps import DecodeSteps
from gpu.runner_settings import LoadSettings
from gpu.step import DecodeGroup, StepPlan
from gpu.weights.expert_shares import MOST_COMPUTED_ROWS
from tests.gpu import twin_runners
from tests.gpu.family_checkpoints import draw_prompt, generate
from tests.gpu.small_runner import load_small
from tests.gpu.test_families import off
from tests.gpu.test_families_host import decode, twins_of
from tests.gpu.test_host_read_graphs import Recorded, fake_graphs
from tests.gpu.test_split_experts import fill
from tests.gpu.twin_runners import Twins
from tests.tolerances import FAMILY_LOGITS, FAMILY_LOGITS_ON_CARDS
from transfer.exchange import RELEASED, ExchangeError
from transfer.expert_exchange import ROWS, ExpertRequests, LayerExperts

ON_CARD = 1
LIMIT_S = 0.2


@contextmanager
def twins_that_compute(monkeypatch: pytest.MonkeyPatch, limit_s: float = LIMIT_S,
                       computed_rows: int = MOST_COMPUTED_ROWS, **more: Any) -> Iterator[Twins]:  # fmt: skip
    """The runner that offloads has nearly all experts in host memory, and the CPU computes them."""
    load_runner = twin_runners.load_runner

    def open_experts(layers: list[LayerExperts | None], max_rows: int, per_token: int) -> HostExperts:
        return HostExperts(layers, max_rows, per_token, 1, limit_s)

    def load(model: ModelConfig, gpu: GpuConfig, asked: LoadSettings, **rest: Any):
        if asked.tier is not None:
            asked = replace(asked, experts_on_card=ON_CARD, open_experts=open_experts, computed_rows=computed_rows)
        return load_runner(model, gpu, asked, **rest)

    monkeypatch.setattr(twin_runners, "load_runner", load)
    with twins_of("qwen3_moe", monkeypatch, **more) as twins:
        yield twins
        twins.offloading.shutdown()


def captured(twins: Twins, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]) -> DecodeSteps:
    fake_graphs(monkeypatch)
    steps = twins.offloading.decode_steps
    steps._experts[0].is_at_once = False
    with torch.inference_mode():
        steps.capture(sizes, lambda part: None)
    return steps


def check(twins: Twins, slots: list[int], bound: float = FAMILY_LOGITS) -> None:
    assert not twins.step(slots).failures
    for slot in slots:
        assert off(*twins.logits(slot)) < bound


def test_steps_that_ask_for_attention_ask_for_experts_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    with twins_that_compute(monkeypatch) as twins:
        assert decode(twins, 8) < FAMILY_LOGITS
        assert twins.sequences[0].released > 200
        counts = twins.offloading.expert_counts()
        assert counts.computed > 0
        assert counts.fetched == 0


def test_captured_steps_of_both_kinds_wait_for_both_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one row and of two, of which one is padding sometimes; a context is offloaded in between."""
    with twins_that_compute(monkeypatch) as twins:
        twins.prefill([draw_prompt(100), draw_prompt(60)])
        steps = captured(twins, monkeypatch, (2,))
        kinds = {(kind.num_parts, size): one.expert_requests for (kind, size), one in steps._captured.items()}
        layers = [number for number, one in enumerate(twins.offloading.weights.layers) if one.experts is not None]
        for (parts, size), asks in kinds.items():
            rows = [size] if parts < 2 else [1, 1]
            assert sorted(map(tuple, asks.table.tolist())) == sorted((layer, n) for layer in layers for n in rows)
        for slots in ([0, 1], [1], [0, 1], [0]):
            Recorded.running = None
            check(twins, slots)
            assert Recorded.running is not None
        assert not twins.sequences[0].released
        for _ in range(70):
            check(twins, [0, 1])
        assert twins.sequences[0].released
        assert [exchange.slot.is_released for exchange in steps._experts] == [False]
        counts = twins.offloading.expert_counts()
        assert counts.fetched == 0


@pytest.mark.parametrize("asks", [False, True])
def test_a_step_whose_experts_come_late_fails_and_the_next_one_does_not(
    asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No device is left waiting, rows of the step fail by name, and what is launched afterwards is right."""
    with twins_that_compute(monkeypatch) as twins:
        twins.prefill([draw_prompt(300 if asks else 100)])
        steps = captured(twins, monkeypatch, (1,))
        check(twins, [0])
        assert bool(twins.sequences[0].released) == asks
        exchange, answer = steps._experts[0], HostExperts.answer
        with monkeypatch.context() as patch:
            # the host expects one more than there is: its last request does not come
            def more(self: HostExperts, parts: Any) -> Any:
                ((asked, slot),) = parts
                table = np.concatenate([asked.table, asked.table[-1:]])
                return answer(self, [(ExpertRequests(table), slot)])

            patch.setattr(HostExperts, "answer", more)
            result = twins.step([0])
        assert "has stamp" in result.failures[0]
        assert int(exchange.slot.answered) == RELEASED
        twins.offloading._failures.clear()  # as a slot that is released and taken again
        check(twins, [0])
        assert not exchange.slot.is_released

        def fail(self: HostExperts, parts: Any) -> Any:
            raise ExchangeError("the host gave up before the first ask")

        with monkeypatch.context() as patch:
            patch.setattr(HostExperts, "answer", fail)
            result = twins.step([0])
        assert result.failures == {0: "the host gave up before the first ask"}
        assert exchange.slot.is_released
        # its keys and values of this token mean nothing: the oracle's stand in for a sequence that begins anew


def test_what_is_no_exchange_error_is_raised_where_the_step_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    with twins_that_compute(monkeypatch) as twins:
        twins.prefill([draw_prompt(100)])
        steps = captured(twins, monkeypatch, (1,))
        monkeypatch.setattr(HostExperts, "answer", lambda *_: 1 / 0)
        group = DecodeGroup([0], [100], [1])
        step = twins.offloading.launch(StepPlan(decode=[group]))
        with pytest.raises(ZeroDivisionError):
            step.collect()
        assert steps._experts[0].slot.is_released


def test_a_step_of_more_rows_than_the_slot_has_is_captured_without_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    with twins_that_compute(monkeypatch, computed_rows=1) as twins:
        twins.prefill([draw_prompt(100), draw_prompt(60)])
        steps = captured(twins, monkeypatch, (1, 2))
        asks = {(kind.num_parts, size): one.expert_requests for (kind, size), one in steps._captured.items()}
        assert {key for key, one in asks.items() if one is None} == {(0, 2), (1, 2)}
        assert all(one is None or set(one.table[:, ROWS]) == {1} for one in asks.values())
        before = twins.offloading.expert_counts()
        check(twins, [0, 1])
        fetched = twins.offloading.expert_counts()
        check(twins, [0])
        computed = twins.offloading.expert_counts()
        assert before is not None and fetched is not None and computed is not None  # noqa: PT018
        assert fetched.fetched > before.fetched
        assert fetched.computed == before.computed
        assert computed.computed > fetched.computed
        assert computed.fetched == fetched.fetched


@pytest.mark.gpu
def test_a_card_waits_for_experts_and_for_attention_in_its_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real graphs, in both lanes: before a context is offloaded, and behind that. Answers that fail leave nobody
    waiting, and the next step is right.
    """
    card = {"device": "cuda", "graph_batch_sizes": (1, 2)}
    with twins_that_compute(monkeypatch, limit_s=20, **card) as twins:
        steps, answer = twins.offloading.decode_steps, HostExperts.answer
        asks = {(kind.num_parts, size): one.expert_requests for (kind, size), one in steps._captured.items()}
        assert {parts for parts, _ in asks} == {0, 1, 2}
        assert all(one is not None for one in asks.values())
        twins.prefill([draw_prompt(100), draw_prompt(60)])
        before = twins.offloading.expert_counts()  # warming up, and prompts, fetch
        for slots in ([0, 1], [1], [0, 1], [0]):
            check(twins, slots, FAMILY_LOGITS_ON_CARDS)
        assert not twins.sequences[0].released
        for _ in range(70):
            check(twins, [0, 1], FAMILY_LOGITS_ON_CARDS)
        assert twins.sequences[0].released
        counts = twins.offloading.expert_counts()
        assert counts is not None and before is not None  # noqa: PT018
        assert (counts.fetched, counts.copied) == (before.fetched, before.copied)
        assert counts.computed > before.computed
        assert all(one.worker.counts.host_requests > 0 for one in steps._experts)

        def fail(self: HostExperts, parts: Any) -> Any:
            raise ExchangeError("the host gave up")

        with monkeypatch.context() as patch:
            patch.setattr(HostExperts, "answer", fail)
            group = twins.group([0, 1])
            step = twins.offloading.launch(StepPlan(decode=[group]))
            assert step.collect().failures == {0: "the host gave up", 1: "the host gave up"}
        assert HostExperts.answer is answer
        twins.offloading._failures.clear()  # as slots that are released and taken again: the token is computed anew
        check(twins, [0, 1], FAMILY_LOGITS_ON_CARDS)


@pytest.mark.gpu
@pytest.mark.parametrize("few_bits", [None, "int4", "int8", "fp8"])
def test_a_captured_step_computes_what_a_whole_model_computes(few_bits: str | None) -> None:
    """In float32, where no router's choice hangs on the order of a sum: texts and logits, prompts in between."""
    texts, seen = [], []
    for on_card in (None, 2):
        runner = load_small(
            ModelConfig(random_weights="tiny-qwen3-moe", weights=few_bits),
            GpuConfig(device="cuda", dtype="float32", graph_batch_sizes=(1, 4)),
            max_running=4,
            max_context_tokens=1024,
            chunk_tokens=128,
            num_pages=256,
            experts_on_card=on_card,
            open_experts=None if on_card is None else partial(HostExperts, threads=4),
            computed_rows=4,
        )
        if on_card is None:
            whole = runner.weights
        else:
            fill(runner.weights, whole)
        made = [generate(runner, draw_prompt(length, 1024), 24) for length in (3, 300, 9)]
        texts.append([tokens for tokens, _ in made])
        seen.append([logits for _, logits in made])
        counts = runner.expert_counts()
        assert counts is None or counts.computed > 0
        runner.shutdown()
    assert texts[0] == texts[1]
    assert all(off(ours, theirs) < FAMILY_LOGITS_ON_CARDS for ours, theirs in zip(seen[1], seen[0], strict=True))

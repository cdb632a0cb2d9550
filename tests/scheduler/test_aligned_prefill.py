"""A prefill method that works in aligned blocks: where units end, what others find of its KV, what is learnt of it."""

import math
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu.methods.method import Method, NoSettings, ProfilePart
from gpu.model.architecture import NAMED_SHAPES
from gpu.profiles import Profile, resolve_profiles
from gpu.sampling_params import SamplingParams
from gpu.step import DENSE, PartId, PrefillJob, PrefillPrompt, PrefillUnit, StepPlan
from scheduler.engine.engine import Engine
from scheduler.engine_config import PrefillConfig, SchedulerConfig
from scheduler.prefill.cost_model import CostModel
from scheduler.prefill.job_in_progress import JobInProgress
from scheduler.prefill.prefill_queue import PrefillQueue
from scheduler.sequences.capacity import Capacity
from scheduler.steps.scheduler import Scheduler
from tests.scheduler import host_engines
from tests.scheduler.engines import check_output, drain, make_request, prompt_of, text
from tests.scheduler.page_runner import PageRunner

SHAPE = NAMED_SHAPES["tiny"]
PAGE, ALIGN = 16, 32
BLOCKY = PartId("prefill", "blocky")


class Blocky(Method):
    name, summary, slot, prefill_side = "blocky", "", "prefill", "nowhere"

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def align_tokens(self, settings: NoSettings) -> int:
        return self._num_tokens


def make_profile(name: str, align_tokens: int) -> Profile:
    """Dense in the slot `host`, and beside it a method whose KV is made in blocks."""
    return Profile(name, "blocky", (ProfilePart(Blocky(align_tokens), NoSettings()),))


class Served:
    """A scheduler, and a runner that checks its plans."""

    def __init__(self, align_tokens: int = ALIGN) -> None:
        profiles = {**resolve_profiles({}, None), "blocky": make_profile("blocky", align_tokens)}
        config = SchedulerConfig(prefill=PrefillConfig(chunk_tokens=64))
        self.scheduler = Scheduler(config, SHAPE, Capacity(400, PAGE, 4000, 8000, None), b"model", profiles)
        self._runner = PageRunner(SHAPE.num_layers, PAGE)

    def submit(self, prompt: list[int], profile: str, max_tokens: int = 1) -> None:
        name = f"{time.monotonic_ns()}"
        request = make_request(name, prompt, max_tokens, profile=profile)
        self.scheduler.roster.queue(self.scheduler.intake.prepare([request], lambda: None))

    def run(self) -> list[StepPlan]:
        """Plans until nothing is left to do."""
        plans = []
        while not (plan := self.scheduler.schedule(lambda ask: True)).is_empty:
            plans.append(plan)
            self.scheduler.postprocess(self._runner.launch(plan).collect())
        return plans

    def begins(self, prompt: list[int], profile: str, max_tokens: int = 1) -> int:
        """Where the prefill of a prompt begins that runs alone."""
        self.submit(prompt, profile, max_tokens)
        (prefill,) = [one for plan in self.run() for job in plan.new_jobs for one in job.prompts]
        return prefill.begin


def units_of(plans: list[StepPlan]) -> list[PrefillUnit]:
    return [unit for plan in plans for unit in plan.units if isinstance(unit, PrefillUnit)]


# --- where units end --------------------------------------------------------------------------------------------------


@given(
    prompts=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 200)), min_size=1, max_size=4),
    chunk_tokens=st.integers(16, 150),
    align_tokens=st.sampled_from([1, 16, 48, 128]),
    seconds=st.sampled_from([None, 1e-9, 3e-4]),
)
def test_units_cover_a_job_and_end_at_multiples_or_with_a_prompt(
    prompts: list[tuple[int, int]], chunk_tokens: int, align_tokens: int, seconds: float | None
) -> None:
    listed = [
        PrefillPrompt(
            slot, np.zeros(begin * align_tokens + tokens, np.int32), begin * align_tokens, 0, SamplingParams(), "blocky"
        )
        for slot, (begin, tokens) in enumerate(prompts)
    ]
    ends, first = {0}, 0
    for prompt in listed:
        ends |= {first + token - prompt.begin for token in range(prompt.begin, len(prompt.token_ids), align_tokens)}
        first += prompt.num_computed_tokens
        ends.add(first)
    queue = PrefillQueue(PrefillConfig(chunk_tokens=chunk_tokens), SHAPE.num_layers, CostModel(SHAPE))
    queue.jobs.append(JobInProgress(PrefillJob(0, listed), [], BLOCKY, align_tokens, SHAPE.num_layers))
    at = (0, 0)
    while queue.jobs:
        for unit in queue.next_units(seconds)[0]:
            assert isinstance(unit, PrefillUnit)
            assert (unit.layer, unit.begin) == at
            assert unit.method == BLOCKY
            assert unit.end in ends
            assert unit.end - unit.begin <= max(chunk_tokens, align_tokens)
            at = (unit.layer, unit.end) if unit.end < first else (unit.layer + 1, 0)
    assert at == (SHAPE.num_layers, 0)


def test_prompts_of_two_methods_share_neither_a_job_nor_a_step() -> None:
    served = Served()
    for number, profile in enumerate(["exact", "exact", "blocky", "blocky", "exact"]):
        served.submit(prompt_of(10, number), profile)
    plans = served.run()
    jobs = [job for plan in plans for job in plan.new_jobs]
    assert [[prompt.profile for prompt in job.prompts] for job in jobs] == [["exact"] * 2, ["blocky"] * 2, ["exact"]]
    for plan in plans:
        assert len({unit.method for unit in plan.units if isinstance(unit, PrefillUnit)}) <= 1
    assert {unit.method for unit in units_of(plans)} == {DENSE, BLOCKY}


# --- what others find -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [ALIGN - 1, ALIGN, ALIGN + 1, 5 * ALIGN, 5 * ALIGN + PAGE, 5 * ALIGN + PAGE + 3])
@pytest.mark.parametrize("more", [0, 1, PAGE, 3 * ALIGN])
def test_a_prompt_begins_at_a_border_in_front_of_the_last_block_of_the_one_before(num_tokens: int, more: int) -> None:
    served = Served()
    assert served.begins(prompt_of(num_tokens), "blocky", max_tokens=40) == 0
    longer = prompt_of(num_tokens) + prompt_of(more, 1)
    assert served.begins(longer, "blocky") == (num_tokens - 1) // ALIGN * ALIGN
    assert served.begins(longer, "exact") == 0, "dense KV is another kind"


def test_a_prompt_that_shares_less_begins_at_the_border_before() -> None:
    served = Served()
    served.begins(prompt_of(10 * ALIGN), "blocky")
    assert served.begins(prompt_of(3 * ALIGN + PAGE) + prompt_of(100, 1), "blocky") == 3 * ALIGN


def test_without_blocks_all_full_pages_are_found_the_last_one_too() -> None:
    served = Served(align_tokens=1)
    served.begins(prompt_of(5 * PAGE), "blocky")
    assert served.begins([*prompt_of(5 * PAGE), 1], "blocky") == 5 * PAGE


def test_nobody_waits_for_the_last_block_of_a_prompt_under_way() -> None:
    """It will not be found: whoever has the same tokens computes it, and what comes behind."""
    served = Served()
    served.submit(prompt_of(6 * ALIGN), "blocky")
    served.scheduler.schedule(lambda ask: True)
    (sequence,) = served.scheduler.roster._unfinished.values()
    assert set(served.scheduler.prefixes._computing) == set(sequence.hashes[: 5 * ALIGN // PAGE])


def make_engine_down(align_tokens: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, PageRunner]:
    """Of a profile of both: its contexts are offloaded."""
    offloaded = host_engines.PROFILES["offloaded"]
    parts = (*offloaded.parts, *make_profile("", align_tokens).parts)
    blocky = replace(offloaded, name="blocky", parts=parts, kv_key="blocky, down")
    monkeypatch.setattr(host_engines, "PROFILES", {**host_engines.PROFILES, "blocky": blocky})
    return host_engines.make_engine()


@pytest.mark.parametrize(("align_tokens", "begin"), [(1, 464), (16, 288), (48, 288), (64, 256)])
def test_what_was_drawn_behind_a_prompts_last_block_is_computed_again(
    align_tokens: int, begin: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, runner = make_engine_down(align_tokens, monkeypatch)
    first = host_engines.ask("a", prompt_of(304), max_tokens=240, profile="blocky")
    engine.submit([first])
    answer = text(drain(engine)["a"])
    engine.submit([host_engines.ask("b", [*prompt_of(304), *answer, 1, 2], profile="blocky")])
    drain(engine)
    assert [prompt.begin for plan in runner.plans for job in plan.new_jobs for prompt in job.prompts] == [0, begin]


@pytest.mark.parametrize("align_tokens", [1, 16, 32, 48, 64])
@pytest.mark.parametrize("num_shared", [20, 200, 288, 305])
def test_a_context_that_was_offloaded_is_gone_on_with_at_a_border(
    align_tokens: int, num_shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, runner = make_engine_down(align_tokens, monkeypatch)
    first = prompt_of(304)
    for number, prompt in enumerate([first, first[:num_shared] + prompt_of(250, 1), [*first, *prompt_of(40, 2)]]):
        request = host_engines.ask(str(number), prompt, profile="blocky")
        engine.submit([request])
        check_output(request, drain(engine)[str(number)])
    begins = [prompt.begin for plan in runner.plans for job in plan.new_jobs for prompt in job.prompts]
    border = math.lcm(align_tokens, PAGE)
    down = 304 - host_engines.WINDOW  # of the first; the second has down all that it shares with it
    ends = [min(num_shared, down) // border * border, max(min(num_shared, 304), down) // border * border]
    assert begins == [0, *(end if end > host_engines.SINK else 0 for end in ends)]


# --- what is learnt ---------------------------------------------------------------------------------------------------


def test_a_method_that_has_not_run_costs_what_dense_does_and_then_what_it_did() -> None:
    model = CostModel(SHAPE)
    for tokens in (64, 256, 1024):
        model.observe_units([PrefillUnit(0, 0, 0, tokens)], [tokens], 1e-5 * tokens)
    dense = model.unit_seconds(512, 512, DENSE)
    assert dense == pytest.approx(512e-5, rel=0.05)
    assert model.unit_seconds(512, 512, BLOCKY) == dense
    assert model.familiar_tokens(BLOCKY) == 0
    for tokens in (64, 256):
        unit = replace(PrefillUnit(0, 0, 0, tokens), method=BLOCKY)
        model.observe_units([unit], [tokens], 4e-5 * tokens)
        assert model.seconds_of(unit, tokens) == model.unit_seconds(tokens, tokens, BLOCKY)
    assert model.unit_seconds(512, 512, BLOCKY) == pytest.approx(4 * dense, rel=0.05)
    assert model.unit_seconds(512, 512, DENSE) == dense
    assert (model.familiar_tokens(BLOCKY), model.familiar_tokens(DENSE)) == (512, 2048)

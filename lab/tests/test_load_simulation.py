"""A load through the real scheduler, on a device that only takes its time."""

import pytest

from gpu.model.named_shapes import named_shape
from lab.speed.load_simulation import DeviceTimes, Outcome, simulate
from lab.speed.mixed_steps import mixed_seconds, simulate_mixed
from lab.speed.token_turns import TokenLoad, summarise_turns
from scheduler.engine_config import SchedulerConfig

TIMES = DeviceTimes(request_s=0.0)
LAYERS = named_shape("llama-3.1-8b").num_layers
AT_ONCE = TokenLoad(64, 1000, 64)
ARRIVALS = TokenLoad(120, 1000, 64, rate=14.0, seed=1)


def run(load: TokenLoad = AT_ONCE, times: DeviceTimes = TIMES, **settings: object) -> Outcome:
    tree = {"prefix_cache": load.turns > 1, "prefill": {"chunk_tokens": 8192}} | settings
    return simulate(SchedulerConfig.model_validate(tree), named_shape("llama-3.1-8b"), load, times)


def longest_gap(outcome: Outcome) -> float:
    return summarise_turns(outcome.turns)["gap_s_most"]


def test_auto_loses_less_to_steps_of_few_rows_and_keeps_the_gap_target() -> None:
    latency, auto, throughput = (run(favour=favour) for favour in ("latency", "auto", "throughput"))
    assert latency.few_rows_s > 2 * auto.few_rows_s > 2 * throughput.few_rows_s
    assert latency.seconds - auto.seconds > 0.3
    assert longest_gap(auto) <= 0.1005
    assert [len(turn.times_s) for turn in auto.turns] == [64] * 64


def test_all_time_is_of_units_and_steps() -> None:
    outcome = run(favour="auto", token_gap_target_ms=50)
    assert outcome.seconds == pytest.approx(outcome.prefill_s + outcome.decode_s)
    assert longest_gap(outcome) <= 0.0505


def test_prompts_that_arrive_begin_sooner_with_auto_and_streams_keep_the_gap_target() -> None:
    # Their tokens take as long as before, since the work is the same.
    latency, auto = (run(ARRIVALS, favour=favour) for favour in ("latency", "auto"))
    sooner, later = summarise_turns(auto.turns), summarise_turns(latency.turns)
    assert sooner["first_s_p50"] < 0.85 * later["first_s_p50"]
    assert sooner["first_s_p99"] < 0.8 * later["first_s_p99"]
    assert sooner["token_s_p50"] <= 1.01 * later["token_s_p50"]
    assert sooner["gap_s_most"] <= 0.1005
    assert sorted(turn.due_s for turn in auto.turns) == ARRIVALS.arrivals()
    assert min(turn.first_s for turn in auto.turns) >= 1000 / TIMES.prompt_tokens_per_s


def test_a_device_stands_still_until_somebody_comes() -> None:
    load = TokenLoad(3, 100, 4, rate=1.0)
    outcome = run(load)
    assert outcome.seconds > load.arrivals()[-1] > outcome.prefill_s + outcome.decode_s


def test_a_chat_computes_what_is_new_and_goes_on_when_it_is_answered() -> None:
    outcome = run(TokenLoad(4, 512, 32, turns=3))
    alone = run(TokenLoad(4, 512, 32))
    assert outcome.prefill_s < 3.3 * alone.prefill_s, "a page of each turn at the most is computed again"
    assert len(outcome.turns) == 12
    ends = [turn.times_s[-1] for turn in outcome.turns]
    assert [turn.due_s for turn in outcome.turns[:4]] == [0.0] * 4
    assert all(turn.due_s in ends for turn in outcome.turns[4:])


def test_a_mixed_step_reads_the_weights_once() -> None:
    both, prompt, rows = (mixed_seconds(*one, TIMES, LAYERS) for one in ((1000, 32), (1000, 0), (0, 32)))
    projections_s = 32 / TIMES.prompt_tokens_per_s
    assert rows == TIMES.decode_seconds(32)
    assert both == pytest.approx(prompt + rows - TIMES.weights_s + projections_s)


def test_mixed_steps_answer_all_and_save_at_most_one_reading_of_weights_a_step_with_prompts() -> None:
    mixed = simulate_mixed(LAYERS, ARRIVALS, TIMES, 8192, 64)
    apart = run(ARRIVALS, favour="auto")
    assert [len(turn.times_s) for turn in mixed.turns] == [64] * 120
    assert summarise_turns(mixed.turns)["token_s_p50"] < summarise_turns(apart.turns)["token_s_p50"]
    assert mixed.prefill_s + mixed.decode_s > apart.prefill_s + apart.decode_s - 120 * TIMES.weights_s

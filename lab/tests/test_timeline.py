"""A load's timeline says where the time went: by records made by hand, and of a tiny model that is served."""

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lab.cli import app
from lab.speed.kernel_trace import describe_window, gaps_of
from lab.speed.load_commands import measured_times
from lab.speed.step_clock import Spans
from lab.speed.timeline import (
    Timeline,
    Window,
    decode_steps,
    device_times,
    gaps_between,
    host_times,
    prefill_units,
    stages,
    uncovered,
)
from lab.speed.token_turns import TokenLoad, Turn, draw_tokens, steady_step_s, summarise_turns
from lab.speed.trace_events import DeviceEvent

NO_CPU = [(0.0, {"engine": 0.0}), (9.0, {"engine": 9.0})]


def step(begin: float, units: int = 0, rows: int = 0, graph: int | None = None, launch: float = 0.0) -> dict[str, Any]:
    """Return a step from `begin` on: 10 ms of units, if any, and 5 ms of decode, 1 ms apart, and 1 ms of draws."""
    now = begin
    units_at = decode_at = None
    if units:
        units_at = [now, now + 0.010]
        now += 0.011
    if rows:
        decode_at = [now, now + 0.005]
        now += 0.005
    return {
        "lane": "device", "units": units, "jobs": min(units, 1), "layers": units, "token_layers": 100 * units,
        "most_tokens": 100 if units else 0, "rows": rows, "graph": graph, "launch": launch or begin - 0.001,
        "launched": launch or begin - 0.001, "host": {"units": 0.009 if units else 0.0, "decode": 0.0, "draws": 0.0},
        "prompts": 1, "running": rows, "collected": now, "whole_at": [begin, now + 0.001], "units_at": units_at,
        "decode_at": decode_at,
    }  # fmt: skip


STEPS = [
    step(1.0, units=4),
    step(1.1, units=2, rows=3, graph=4),
    step(1.2, rows=8, graph=8, launch=1.15),
    step(1.3, rows=70, graph=0),
]


def test_spans_leave_out_the_spans_inside_them() -> None:
    spans = Spans()
    inner = spans.timed("inner", lambda: time.sleep(0.02))
    spans.timed("outer", lambda: (time.sleep(0.01), inner()))()
    taken = spans.take()
    assert taken["inner"] == pytest.approx(0.02, abs=0.009)
    assert taken["outer"] == pytest.approx(0.01, abs=0.009)
    assert spans.take() == {}


def test_all_of_the_window_is_some_kind_of_the_devices_time() -> None:
    told = device_times(STEPS, Window(0.9, 1.5, NO_CPU))
    whole = told.pop("window")
    assert whole == pytest.approx(0.6)
    assert sum(told.values()) == pytest.approx(whole)
    assert told["units"] == pytest.approx(0.020)
    assert told["decode"] == pytest.approx(0.015)
    assert told["before the first"] == pytest.approx(0.1)


def test_gaps_are_told_by_what_follows_what_and_late_launches_are_counted() -> None:
    gaps = {gap["kind"]: gap for gap in gaps_between(STEPS)}
    assert set(gaps) == {"units, then units and rows", "units and rows, then rows", "rows, then rows"}
    late = gaps["units and rows, then rows"]
    assert (late["count"], late["launched late"]) == (1, 1)
    assert late["total_ms"] == pytest.approx(1e3 * (1.2 - 1.117))
    in_time = gaps_between([step(1.0, rows=1), step(1.006, rows=1, launch=1.003)])[0]
    assert (in_time["launched late"], in_time["launch ended late"]) == (0, 0)


def test_steps_are_told_by_rows_and_those_without_a_graph_are_seen() -> None:
    rows = {(row["rows up to"], row["beside units"]): row for row in decode_steps(STEPS)}
    assert set(rows) == {(4, True), (8, False), (128, False)}
    assert rows[8, False]["median_ms"] == pytest.approx(5.0)
    told = uncovered(STEPS, {"graphs": [4, 8]})
    assert (told["steps"], told["of"], told["rows"]) == (1, 3, [70])
    assert told["mean padding rows"] == pytest.approx(0.5)


def test_units_are_told_with_what_switches_and_launches_cost() -> None:
    told = prefill_units(STEPS, num_layers=2)
    assert (told["units"], told["steps"], told["with rows"]) == (6, 2, 1)
    assert told["prompt tokens/s"] == pytest.approx(300 / 0.02)
    assert told["us from units to decode"] == pytest.approx(1000)
    assert told["steps bound by launching"] == 2, "9 of 10 ms"
    assert told["switches"] == 1


def test_the_hosts_seconds_add_up_to_its_turns() -> None:
    turns = [{"begin": 1.0, "end": 1.5, "tokens": 3, "seconds": {"schedule": 0.1, "send": 0.2}}]
    told = {row["name"]: row["seconds"] for row in host_times(turns, 10)}
    assert sum(told.values()) == pytest.approx(0.5)
    assert told["outside of spans"] == pytest.approx(0.2)


def test_stages_add_up_to_the_first_token() -> None:
    turn = Turn(1.0, 1.0, [1.7, 1.8], [5, 6])
    names = ("arrived", "read", "prepared", "queued", "begun", "first_sent")
    request = {name: 1.1 + 0.1 * place for place, name in enumerate(names)}
    told = stages([request], [turn])
    assert sum(row["ms"] for row in told) == pytest.approx(700)
    assert stages([request, request], [turn])[0]["ms"] is None, "they are not of the same load"


def test_gaps_of_kernels_are_those_that_no_kernel_covers() -> None:
    events = [DeviceEvent("a", 0.0, 10.0), DeviceEvent("b", 5.0, 10.0), DeviceEvent("c", 35.0, 5.0)]
    gaps = {bound: (count, ms) for bound, count, ms in gaps_of(events)}
    assert gaps[50.0] == (1, pytest.approx(0.02))
    assert sum(count for count, _ in gaps.values()) == 1
    assert describe_window(events, 100.0)["groups"]["idle"] == pytest.approx(0.08)
    assert describe_window([], 100.0)["groups"] == {}


def test_prompts_follow_from_seed_request_and_turn() -> None:
    load = TokenLoad(2, 8, 4)
    assert draw_tokens(load, 0, 0) == draw_tokens(load, 0, 0)
    other = TokenLoad(2, 8, 4, seed=1)
    drawn = [draw_tokens(load, *place) for place in ((0, 0), (1, 0), (0, 1))] + [draw_tokens(other, 0, 0)]
    assert len({tuple(tokens) for tokens in drawn}) == 4
    arrivals = TokenLoad(2000, 8, 4, rate=10.0).arrivals()
    assert arrivals is not None
    assert arrivals[-1] / 2000 == pytest.approx(0.1, rel=0.1)


def test_a_step_is_timed_while_all_streams_run() -> None:
    early = Turn(0.0, 0.0, [0.0, 0.01, 0.02, 1.0, 1.2, 1.4], [1] * 6)
    late = Turn(0.0, 0.0, [1.0, 1.2, 1.4, 1.41], [1] * 4)
    assert steady_step_s([early, late]) == pytest.approx(0.2)
    assert math.isnan(steady_step_s([Turn(0.0, 0.0, [1.0], [1])]))


def test_a_loads_summary_counts_from_when_requests_were_due() -> None:
    told = summarise_turns([Turn(1.0, 1.5, [2.0, 2.5, 3.0], [1, 2, 3]), Turn(1.0, 1.0, [2.0], [4])])
    assert told["seconds"] == pytest.approx(2.0)
    assert told["tokens_per_s"] == pytest.approx(2.0)
    assert told["first_s_p50"] == pytest.approx(1.0)
    assert told["token_s_p50"] == pytest.approx(0.5)


def test_the_simulator_takes_the_times_that_a_timeline_has() -> None:
    timeline = Timeline(
        {"layers": 2, "steps": STEPS, "turns": [], "requests": [], "graphs": [], "kernels": None},
        Window(0.9, 1.5, NO_CPU), [Turn(1.0, 1.0, [1.1, 1.2], [1, 2])],
    )  # fmt: skip
    told = timeline.told()
    times = measured_times(told)
    assert times is not None
    assert times.prompt_tokens_per_s == pytest.approx(15_000)
    assert times.decode_seconds(64) == pytest.approx(0.005)
    assert measured_times(told | {"decode": []}) is None


def test_a_served_load_is_told_whole(tmp_path: Path) -> None:
    config, file = tmp_path / "tiny.yaml", tmp_path / "told.json"
    reference = Path(__file__).parents[2] / "deploy" / "models" / "reference"
    config.write_text(
        f"model: {{random_weights: tiny, tokenizer: '{reference}'}}\n"
        "gpu: {device: cpu, dtype: float32, kv_cache_gib: 0.05}\nscheduler: {max_running: 8}\n"
    )
    asked = ["load-timeline", str(config), "--streams", "4", "--requests", "6", "--tokens", "40", "--answer", "12"]
    done = CliRunner().invoke(app, [*asked, "--json", str(file)])
    assert done.exit_code == 0, done.output
    for words in ("gaps between steps", "decode steps", "the engine's thread", "stages to a first token", "simulated"):
        assert words in done.output
    told = json.loads(file.read_text())
    assert told["load"]["tokens_per_s"] * told["load"]["seconds"] == pytest.approx(72)
    assert sum(row["tokens"] for row in told["bins"]) == 72
    device = told["device"]
    assert math.isclose(sum(device.values()) - device["window"], device["window"], rel_tol=1e-6)
    assert all(row["ms"] is not None and row["ms"] >= 0 for row in told["stages"])
    assert {"schedule", "launch decode", "send", "read result"} <= {row["name"] for row in told["host"]}
    assert told["units"]["prompt tokens/s"] > 0
    assert told["cpu_s"]["engine"] > 0

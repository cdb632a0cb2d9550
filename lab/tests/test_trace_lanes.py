"""Lanes of a trace: what a kernel does decides where it stands, nothing overlaps in a row, hidden is beside compute."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from lab.speed.trace_events import DeviceEvent
from lab.speed.trace_lanes import (
    COMPUTE,
    COPY,
    EXCHANGE,
    FETCH,
    HOST,
    LANES,
    PREDICTION,
    HostSpan,
    chrome_trace,
    hidden_share,
    lane_of,
    lanes_of,
    write_lanes,
)

EVENTS = [
    DeviceEvent("_gemv_kernel", 0, 100),
    DeviceEvent("_pack_kernel", 100, 10),
    DeviceEvent("_predict_kernel", 105, 40),
    DeviceEvent("_fetch_kernel", 150, 100),  # 60 of it beside what computes, 20 beside two at once
    DeviceEvent("_split_kernel", 110, 80),
    DeviceEvent("void at::native::vectorized_elementwise_kernel<4>", 170, 40),
    DeviceEvent("_await_answer_kernel", 210, 50),
]
SPANS = [HostSpan("step 1", 1_000_090_000, 1_000_250_000)]
START_NS = 1_000_000_000


@pytest.mark.parametrize(
    ("name", "lane"),
    [("_look_kernel", FETCH), ("_choose_blocks_kernel", PREDICTION), ("_force_kernel", PREDICTION),
     ("_await_answer_kernel", EXCHANGE), ("Memcpy HtoD (Pinned -> Device)", COPY), ("gemm", COMPUTE)],
)  # fmt: skip
def test_a_kernel_stands_in_the_lane_of_what_it_does(name: str, lane: str) -> None:
    assert lane_of(name) == lane


def test_what_is_fetched_beside_computing_is_hidden() -> None:
    lanes = lanes_of(EVENTS, SPANS, START_NS)
    assert tuple(lanes) == LANES
    assert sum(map(len, lanes.values())) == len(EVENTS) + len(SPANS)
    assert hidden_share(lanes) == pytest.approx(0.6)
    assert lanes[HOST] == [DeviceEvent("step 1", 90.0, 160.0)], "on the trace's clock"
    assert hidden_share(lanes_of(EVENTS[:3], [], START_NS)) is None


def test_events_of_a_row_never_overlap_and_every_row_has_its_lanes_name(tmp_path: Path) -> None:
    path = tmp_path / "steps.lanes.json"
    lanes = lanes_of(EVENTS, SPANS, START_NS)
    write_lanes(path, lanes)
    told = json.loads(path.read_text())
    assert told == chrome_trace(lanes)
    drawn = [event for event in told["traceEvents"] if event["ph"] == "X"]
    names = {event["tid"]: event["args"]["name"] for event in told["traceEvents"] if event["name"] == "thread_name"}
    assert len(drawn) == len(EVENTS) + len(SPANS)
    assert all(names[event["tid"]] == event["cat"] for event in drawn)
    assert len({event["tid"] for event in drawn if event["cat"] == COMPUTE}) == 2, "two ran side by side"
    for tid in names:
        own = sorted((event["ts"], event["ts"] + event["dur"]) for event in drawn if event["tid"] == tid)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(own))

"""Compute the tables of a load's timeline: the device's time by kind of work, its gaps and the host's work in them,
steps by batch, units of prefill, the host's work a step, and the stages of a request.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from lab.speed.token_turns import Turn, summarise_turns

Record = dict[str, Any]

BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 128)
STAGES = (
    ("sent", "arrived", "HTTP and parsing, to the API's handler"),
    ("arrived", "read", "tokenising, checks and the socket, to the engine's reader"),
    ("read", "prepared", "unpacking and hashing"),
    ("prepared", "queued", "until the loop looks"),
    ("queued", "begun", "until its prefill is launched"),
    ("begun", "first_sent", "prefill, to the first token told"),
    ("first_sent", "first", "socket, text, HTTP, to the client"),
)
_LATE_US = 50.0  # after the end of the step before; a launch this late let the device idle


@dataclass(frozen=True, slots=True)
class Window:
    """The load's begin and end, and samples of the processes' CPU seconds so far."""

    begin: float
    end: float
    cpu: list[tuple[float, dict[str, float]]]

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def cpu_seconds(self) -> dict[str, float]:
        return {name: self.cpu[-1][1][name] - self.cpu[0][1][name] for name in self.cpu[0][1]}


@dataclass(frozen=True, slots=True)
class Timeline:
    """The records of a served load. engine: the records of `step_clock.StepClock`."""

    engine: Record
    window: Window
    turns: list[Turn]

    def told(self, num_bins: int = 12) -> Record:
        """Return the contents of all tables, for JSON."""
        steps, turns = self._within("steps", "launch"), self._within("turns", "begin")
        return {
            "load": summarise_turns(self.turns),
            "device": device_times(steps, self.window),
            "gaps": gaps_between(steps),
            "decode": decode_steps(steps),
            "uncovered": uncovered(steps, self.engine),
            "units": prefill_units(steps, self.engine["layers"]),
            "host": host_times(turns, len(steps)),
            "cpu_s": self.window.cpu_seconds(),
            "num_steps": len(steps),
            "stages": stages(self._within("requests", "arrived"), self.turns),
            "bins": bins(steps, turns, self.window, num_bins),
            "kernels": self.engine["kernels"],
            "graphs": self.engine["graphs"],
        }

    def _within(self, name: str, time: str) -> list[Record]:
        begin, end = self.window.begin, self.window.end
        return [record for record in self.engine[name] if begin <= record.get(time, -1.0) <= end]


def device_times(steps: Sequence[Record], window: Window) -> dict[str, float]:
    """Return seconds of the window: in units, in decode, in the rest of steps (draws, copies, page tables), between
    steps, and before the first step and after the last one.
    """
    spans = sorted(step["whole_at"] for step in steps)
    units, decode = (_seconds(steps, name) for name in ("units_at", "decode_at"))
    busy = _covered(spans)
    first, last = (spans[0][0], max(end for _, end in spans)) if spans else (window.end, window.end)
    return {
        "window": window.seconds,
        "units": units,
        "decode": decode,
        "rest of steps": max(0.0, sum(end - begin for begin, end in spans) - units - decode),
        "between steps": max(0.0, last - first - busy),
        "before the first": max(0.0, first - window.begin),
        "behind the last": max(0.0, window.end - last),
    }


def gaps_between(steps: Sequence[Record]) -> list[Record]:
    """Return the device's gaps between steps by the kinds of the two steps: their number and length, and for how many
    the host had not begun, or not ended, the launch when the device went idle.
    """
    kinds: dict[str, list[tuple[float, bool, bool]]] = defaultdict(list)
    ordered = sorted(steps, key=lambda step: step["whole_at"][0])
    for before, step in pairwise(ordered):
        ended, begun = before["whole_at"][1], step["whole_at"][0]
        late_s = ended + 1e-6 * _LATE_US
        kinds[f"{_kind(before)}, then {_kind(step)}"].append(
            (max(0.0, begun - ended), step["launch"] > late_s, step["launched"] > late_s)
        )
    return [
        {
            "kind": kind,
            "count": len(found),
            "total_ms": 1e3 * sum(gap for gap, _, _ in found),
            "median_us": 1e6 * float(np.median([gap for gap, _, _ in found])),
            "most_ms": 1e3 * max(gap for gap, _, _ in found),
            "launched late": sum(late for _, late, _ in found),
            "launch ended late": sum(late for _, _, late in found),
        }
        for kind, found in sorted(kinds.items(), key=lambda one: -sum(gap for gap, _, _ in one[1]))
    ]


def decode_steps(steps: Sequence[Record]) -> list[Record]:
    """Return decode steps by their rows, alone and together with units, with the device's milliseconds."""
    found: dict[tuple[int, bool], list[Record]] = defaultdict(list)
    for step in steps:
        if step["rows"]:
            size = next((size for size in BATCHES if step["rows"] <= size), step["rows"])
            found[size, bool(step["units"])].append(step)
    told = []
    for (size, with_units), own in sorted(found.items()):
        times = [1e3 * (step["decode_at"][1] - step["decode_at"][0]) for step in own]
        told.append(
            {
                "rows up to": size,
                "beside units": with_units,
                "count": len(own),
                "mean rows": float(np.mean([step["rows"] for step in own])),
                "median_ms": float(np.median(times)),
                "p90_ms": float(np.percentile(times, 90)),
                "total_ms": sum(times),
                "launch_ms": 1e3 * float(np.median([step["host"]["decode"] for step in own])),
                "graphs": sorted({step["graph"] for step in own}),
            }
        )
    return told


def uncovered(steps: Sequence[Record], engine: Record) -> Record:
    """Return decode steps without a captured graph, and the padding rows of larger graphs."""
    decoding = [step for step in steps if step["rows"]]
    eager = [step for step in decoding if step["graph"] == 0]
    padding = [step["graph"] - step["rows"] for step in decoding if step["graph"] > 0]
    return {
        "captures": bool(engine["graphs"]),
        "steps": len(eager),
        "of": len(decoding),
        "rows": sorted({step["rows"] for step in eager}),
        "seconds": _seconds(eager, "decode_at"),
        "mean padding rows": float(np.mean(padding)) if padding else 0.0,
    }


def prefill_units(steps: Sequence[Record], num_layers: int) -> Record:
    """Return the units and their costs: steps with units, device and host seconds, tokens/s, and the device's time of a
    switch: from a step's begin to its units, and from their end to its decode.
    """
    own = [step for step in steps if step["units"]]
    seconds = _seconds(own, "units_at")
    token_layers = sum(step["token_layers"] for step in own)
    both = [step for step in own if step["rows"]]
    launch_s = sum(step["host"]["units"] for step in own)
    bound = [step for step in own if step["host"]["units"] > 0.8 * (step["units_at"][1] - step["units_at"][0])]
    return {
        "steps": len(own),
        "with rows": len(both),
        "units": sum(step["units"] for step in own),
        "jobs a step": _mean([step["jobs"] for step in own]),
        "layers a step": _mean([step["layers"] for step in own]),
        "tokens of the largest unit": _mean([step["most_tokens"] for step in own]),
        "device_s": seconds,
        "prompt tokens/s": token_layers / num_layers / seconds if seconds else 0.0,
        "device ms a unit": 1e3 * seconds / max(1, sum(step["units"] for step in own)),
        "host launch ms a unit": 1e3 * launch_s / max(1, sum(step["units"] for step in own)),
        "host launch_s": launch_s,
        "steps bound by launching": len(bound),
        "seconds of these": _seconds(bound, "units_at"),
        "us to units": 1e6 * _mean([step["units_at"][0] - step["whole_at"][0] for step in own]),
        "us from units to decode": 1e6 * _mean([step["decode_at"][0] - step["units_at"][1] for step in both]),
        "switches": sum(bool(one["units"]) != bool(other["units"]) for one, other in pairwise(steps)),
    }


def host_times(turns: Sequence[Record], num_steps: int) -> list[Record]:
    """Return the seconds of the engine's thread by name, and milliseconds a step."""
    seconds: dict[str, float] = defaultdict(float)
    for turn in turns:
        for name, taken in turn["seconds"].items():
            seconds[name] += taken
    whole = sum(turn["end"] - turn["begin"] for turn in turns)
    seconds["outside of spans"] = whole - sum(seconds.values())
    ordered = sorted(seconds.items(), key=lambda one: -one[1])
    steps = max(1, num_steps)
    return [
        {"name": name, "seconds": taken, "share": taken / whole if whole else 0.0, "ms a step": 1e3 * taken / steps}
        for name, taken in ordered
    ]


def stages(requests: Sequence[Record], turns: Sequence[Turn]) -> list[Record]:
    """Return the mean milliseconds of the stages up to a first token.

    They are differences of mean times, since the client's requests are not matched with the engine's.
    """
    means = {"sent": _mean([turn.sent_s for turn in turns]), "first": _mean([turn.times_s[0] for turn in turns])}
    for name in ("arrived", "read", "prepared", "queued", "begun", "first_sent"):
        means[name] = _mean([request[name] for request in requests if name in request])
    whole = len(requests) == len(turns)
    return [{"stage": what, "ms": 1e3 * (means[end] - means[begin]) if whole else None} for begin, end, what in STAGES]


def bins(steps: Sequence[Record], turns: Sequence[Record], window: Window, count: int) -> list[Record]:
    """Return slices of the window: shares of the device's time, tokens that came out, and use of cores by process."""
    edges = np.linspace(window.begin, window.end, count + 1).tolist()
    told = []
    for begin, end in pairwise(edges):
        width = end - begin
        own = [step for step in steps if begin <= step["whole_at"][1] < end]
        cpu = {name: (_at(window.cpu, end, name) - _at(window.cpu, begin, name)) / width for name in window.cpu[0][1]}
        told.append(
            {
                "at_s": begin - window.begin,
                "units": _overlap(steps, "units_at", begin, end) / width,
                "decode": _overlap(steps, "decode_at", begin, end) / width,
                "in steps": _overlap(steps, "whole_at", begin, end) / width,
                "waiting": _clipped(turns, "wait for the device", begin, end) / width,
                "steps": len(own),
                "rows": _mean([step["rows"] for step in own if step["rows"]]),
                "prompts": _mean([step["prompts"] for step in own]),
                "tokens": sum(turn["tokens"] for turn in turns if begin <= turn["begin"] < end),
                "cpu": cpu,
            }
        )
    return told


def _kind(step: Record) -> str:
    return "units and rows" if step["units"] and step["rows"] else "units" if step["units"] else "rows"


def _seconds(steps: Sequence[Record], name: str) -> float:
    return float(sum(step[name][1] - step[name][0] for step in steps if step[name] is not None))


def _covered(spans: Sequence[Sequence[float]]) -> float:
    covered, end = 0.0, float("-inf")
    for begin, until in spans:
        covered += max(0.0, until - max(begin, end))
        end = max(end, until)
    return covered


def _overlap(steps: Sequence[Record], name: str, begin: float, end: float) -> float:
    spans = [step[name] for step in steps if step[name] is not None]
    return float(sum(max(0.0, min(until, end) - max(since, begin)) for since, until in spans))


def _clipped(turns: Sequence[Record], name: str, begin: float, end: float) -> float:
    """Return the seconds of a name in the turns that end in a slice."""
    return float(sum(turn["seconds"].get(name, 0.0) for turn in turns if begin <= turn["end"] < end))


def _at(samples: Sequence[tuple[float, dict[str, float]]], time: float, name: str) -> float:
    """Return the CPU seconds so far at a time, interpolated between samples."""
    return float(np.interp(time, [at for at, _ in samples], [seconds[name] for _, seconds in samples]))


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0

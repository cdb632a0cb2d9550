"""Parts of a traced step are lengths of unions, worked out by hand, and counters are differences."""

import io
import time
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch.profiler import DeviceType

from lab.speed import step_trace
from lab.speed.prefill_trace import group_events, most_gaps, most_kernels, tabulate_gaps, tabulate_groups
from lab.speed.step_trace import STEPS, device_parts, tabulate_parts, trace_steps
from lab.speed.trace_events import DeviceEvent

ONE_AFTER_ANOTHER = [
    DeviceEvent("_gemv_kernel", 0, 1000),
    DeviceEvent("Memcpy HtoD (Pinned -> Device)", 1500, 500),
    DeviceEvent("_offload_kernel", 2000, 250),
    DeviceEvent("_await_answer_kernel", 3000, 2000),
    DeviceEvent("void at::native::vectorized_elementwise_kernel<4>", 5000, 500),
]


def test_parts_one_after_another_and_the_gaps_add_up_to_the_span():
    parts = device_parts(ONE_AFTER_ANOTHER, 8000, 2)
    assert parts == {"device_busy_ms": 0.75, "wait_for_cpu_ms": 1.0, "copies_ms": 0.375, "idle_ms": 1.875}
    assert sum(parts.values()) == 4.0


def test_events_that_overlap_are_counted_once_in_their_part_and_once_in_all():
    events = [
        DeviceEvent("gemm", 100, 400),
        DeviceEvent("gemm", 300, 400),  # 200 of it beside the first
        DeviceEvent("gemm", 350, 50),  # within both
        DeviceEvent("Memcpy DtoH (Device -> Pinned)", 600, 300),  # 100 beside the second
        DeviceEvent("await_answer", 800, 1000),  # 100 beside the copy
    ]
    parts = device_parts(events, 2000, 1)
    assert parts == {"device_busy_ms": 0.6, "wait_for_cpu_ms": 1.0, "copies_ms": 0.3, "idle_ms": pytest.approx(0.3)}


def test_the_order_of_events_does_not_matter_and_none_is_all_idle():
    assert device_parts(ONE_AFTER_ANOTHER[::-1], 8000, 2) == device_parts(ONE_AFTER_ANOTHER, 8000, 2)
    assert device_parts([], 3000, 3) == {
        "device_busy_ms": 0.0, "wait_for_cpu_ms": 0.0, "copies_ms": 0.0, "idle_ms": 1.0,
    }  # fmt: skip


def test_without_cuda_a_step_has_its_counters_and_no_part_of_a_device():
    calls = 0

    def step():
        nonlocal calls
        calls += 1
        time.sleep(0.001)

    parts = trace_steps(step, lambda: {"attend": 0.5 * calls}, torch.device("cpu"), None)
    assert parts.keys() == {"step_ms", "attend_ms"}
    assert parts["attend_ms"] == 500.0
    assert parts["step_ms"] >= 1.0
    assert calls > STEPS  # some before


def test_on_cuda_the_parts_are_of_what_ran_on_the_device_while_steps_were_traced(monkeypatch):
    calls = []

    class Tracer:
        def __init__(self, activities):
            assert activities == [torch.profiler.ProfilerActivity.CUDA]

        def __getattr__(self, name):
            return lambda: calls.append(name)

        def events(self):
            def event(name, device_type, is_annotation):
                spans = SimpleNamespace(start=0.0, end=8000.0)
                return SimpleNamespace(
                    name=name, device_type=device_type, time_range=spans, is_user_annotation=is_annotation
                )

            launched = event("cudaGraphLaunch", DeviceType.CPU, False)
            return [launched, event("gemm", DeviceType.CUDA, False), event("Memcpy HtoD", DeviceType.CUDA, True)]

    monkeypatch.setattr(step_trace, "profile", Tracer)
    monkeypatch.setattr(step_trace, "_synchronize", lambda device: calls.append("synchronize"))
    parts = trace_steps(lambda: calls.append("step"), lambda: {"attend": 0.0}, torch.device("cuda"), None)
    assert (parts["device_busy_ms"], parts["copies_ms"], parts["wait_for_cpu_ms"]) == (8.0 / STEPS, 0.0, 0.0)
    first, last = calls.index("start_trace"), calls.index("stop_trace")
    assert calls[first + 1 : last] == ["step"] * STEPS + ["synchronize"]
    assert calls[0] == "prepare_trace"
    assert calls[first - 1] == "synchronize"


@pytest.mark.gpu
def test_a_captured_graph_and_a_copy_are_parts_of_a_traced_step():
    device = torch.device("cuda")
    matrix, pinned = torch.ones(2048, 2048, device=device), torch.ones(1 << 20, pin_memory=True)
    there = torch.empty(1 << 20, device=device)
    torch.mm(matrix, matrix)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.mm(matrix, matrix)

    def step():
        graph.replay()
        there.copy_(pinned, non_blocking=True)

    parts = trace_steps(step, dict, device, None)
    assert parts["device_busy_ms"] > 0
    assert parts["copies_ms"] > 0
    assert parts["wait_for_cpu_ms"] == 0
    together = parts["device_busy_ms"] + parts["copies_ms"] + parts["idle_ms"]
    assert together == pytest.approx(parts["step_ms"])  # one stream: nothing overlaps
    graph.replay()
    torch.cuda.synchronize()


def test_each_part_is_a_line_with_its_share():
    printed = io.StringIO()
    Console(file=printed).print(tabulate_parts({"step_ms": 4.0, "wait_for_cpu_ms": 1.0}))
    assert "wait for cpu" in printed.getvalue()
    assert "25%" in printed.getvalue()


EVENTS = [
    DeviceEvent("void flash_fwd_kernel<...>", 0, 1000),
    DeviceEvent("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", 1000, 1000),
    DeviceEvent("nvjet_tst_256x128_64x4", 2000, 500),
    DeviceEvent("Memcpy DtoH (Device -> Pinned)", 2000, 2000),
    DeviceEvent("_merge_kernel", 2500, 100),
    DeviceEvent("nvjet_tst_256x128_64x4", 2400, 100),
    DeviceEvent("void at::native::reduce_kernel<512, 1>", 3500, 200),
    DeviceEvent("void at::native::index_elementwise_kernel<128, 4>", 4000, 250),
    DeviceEvent("somebody_elses_kernel", 5000, 50),
]


def test_kernels_fall_into_groups_that_are_lengths_of_time() -> None:
    assert group_events(EVENTS, 6000) == {
        "whole": 6.0,
        "link": 2.0,
        "merge": 0.1,
        "deposit": 0.2,
        "attention": 2.0,
        "products": 0.5,
        "gathers and copies": 0.25,
        "other": 0.05,
        "idle": pytest.approx(1.7),
    }


def test_gaps_are_where_nothing_ran_and_what_the_host_took_before_and_behind() -> None:
    gaps = most_gaps(EVENTS, 6000)
    assert gaps == [
        ("the host", "the host", pytest.approx(0.95), 1),
        ("void at::native::index_elementwise_kernel<128, 4>", "somebody_elses_kernel", 0.75, 1),
    ]
    assert sum(ms for _, _, ms, _ in gaps) == pytest.approx(group_events(EVENTS, 6000)["idle"])
    twice = [DeviceEvent("a", 0, 10), DeviceEvent("b", 20, 10), DeviceEvent("a", 30, 1), DeviceEvent("b", 51, 10)]
    assert most_gaps(twice[::-1], 61) == [("a", "b", 0.03, 2), ("the host", "the host", 0.0, 1)]
    printed = io.StringIO()
    Console(file=printed, width=120).print(tabulate_gaps(gaps))
    assert "0.75" in printed.getvalue()


def test_kernels_that_take_most_come_first_with_their_launches() -> None:
    kernels = most_kernels(EVENTS)
    assert kernels[0] == ("Memcpy DtoH (Device -> Pinned)", 2.0, 1)
    assert ("nvjet_tst_256x128_64x4", 0.6, 2) in kernels
    printed = io.StringIO()
    Console(file=printed, width=120).print(tabulate_groups(group_events(EVENTS, 6000), kernels))
    assert "33%" in printed.getvalue()

"""Decode greedily through a Runner with plans of its own: the engine's loop without requests.

On CUDA it launches a step before it collects the one before, as the engine does; on the CPU it runs one at a time. All
sequences have the same length.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gpu.config import GpuConfig
from gpu.in_flight import InFlight
from gpu.kv.windows import NO_WINDOWS, WindowShape
from gpu.model.adapter_file import AdapterFile
from gpu.model.architecture import Architecture
from gpu.page_layout import KvFormat
from gpu.runner import Runner
from gpu.runner_settings import RunnerSettings
from gpu.sampling_params import SamplingParams
from gpu.step import DecodeGroup, PageWrite, PrefillJob, PrefillPrompt, PrefillUnit, StepPlan, WindowWrite
from gpu.weights.weights import Weights

PAGE_TOKENS = 16
PROFILE = "exact"
_GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Decoded:
    """The tokens and times of a decode loop. tokens: int64 `[batch, 1 + steps]`, the prefill's and every step's.
    step_ms: times between two collected steps.
    """

    tokens: np.ndarray
    step_ms: list[float]


def served_graph_sizes(batches: Iterable[int]) -> tuple[int, ...]:
    """Return the sizes of the CUDA graphs in which a server with default settings runs steps of these batches.

    A step of 3 rows runs in the graph of 4, padded. A batch beyond the largest graph has no graph, as in a server.
    """
    served: tuple[int, ...] = GpuConfig.model_fields["graph_batch_sizes"].default
    fitting = (min((size for size in served if size >= batch), default=None) for batch in batches)
    return tuple(sorted({size for size in fitting if size is not None}))


def build_runner(
    architecture: Architecture, weights: Weights, max_batch: int, context: int, dtype: torch.dtype,
    device: torch.device, adapters: Sequence[AdapterFile] = (), kv: KvFormat | None = None,
) -> Runner:  # fmt: skip
    """Return a Runner with pages for `max_batch` sequences of `context` tokens, and as many windows if layers have
    some.

    kv: the format of rows; None: in dtype. On CUDA it is warmed up, but nothing is captured yet. Its prefill kernels
    are chosen for short chunks, so prompts are to be timed with an engine instead.
    """
    windows = [spec.window_tokens for spec in architecture.layer_pattern if spec.window_tokens is not None]
    runner = Runner(
        architecture,
        weights,
        RunnerSettings(
            num_pages=max_batch * _num_pages(context),
            page_tokens=PAGE_TOKENS,
            max_running=max((max_batch, *served_graph_sizes([max_batch]))),
            max_context_tokens=context,
            max_hidden_tokens=max_batch * context,
            tier=None,
            parts=(),
            dtype=dtype,
            device=device,
            windows=WindowShape(architecture.window_layers, max_batch, _num_pages(max(windows)))
            if windows
            else NO_WINDOWS,
            adapters=adapters,
            kv=kv,
        ),
    )
    runner.rehearsal.warm_up(min(context, 128), lambda fraction: None)
    return runner


def decode(runner: Runner, prompts: np.ndarray, steps: int) -> Decoded:
    """Prefill `prompts`, int32 `[batch, tokens]`, then decode `steps` tokens for each. Frees the slots at the end."""
    batch, length = prompts.shape
    first = _launch_prefill(runner, prompts, length + steps).collect()
    tokens = [[token.token_id for token in first.tokens]]
    marks: list[float] = []
    in_flight: InFlight | None = None
    slots = list(range(batch))
    for step in range(steps):
        group = DecodeGroup(slots, [length + step] * batch, [1 + step] * batch)
        launched = runner.launch(StepPlan(decode=[group]))
        if runner.device.type != "cuda":
            in_flight, launched = launched, None
        if in_flight is not None:
            tokens.append(_collect(in_flight, marks))
        in_flight = launched
    if in_flight is not None:
        tokens.append(_collect(in_flight, marks))
    runner.launch(StepPlan(released_slots=slots)).collect()
    return Decoded(np.array(tokens, np.int64).T, [1e3 * float(gap) for gap in np.diff(marks)])


def prefill_ms(runner: Runner, prompt: np.ndarray, chunk_tokens: int) -> float:
    """Return the milliseconds to the first token of a prompt, int32 `[tokens]`, in prefill chunks of `chunk_tokens`.

    Frees its slot at the end.
    """
    length, has_windows = len(prompt), runner.pool.windows.shape.count > 0
    plan = StepPlan(
        page_writes=[PageWrite(0, 0, list(range(-(-length // runner.limits.page_tokens))))],
        window_writes=[WindowWrite(0, None, 0)] if has_windows else [],
        new_jobs=[PrefillJob(0, [PrefillPrompt(0, prompt, 0, length, _GREEDY, PROFILE)])],
        units=[
            PrefillUnit(0, layer, begin, min(begin + chunk_tokens, length))
            for layer in range(runner.architecture.num_layers)
            for begin in range(0, length, chunk_tokens)
        ],
    )
    began = time.perf_counter()
    runner.launch(plan).collect()
    took = 1e3 * (time.perf_counter() - began)
    runner.launch(StepPlan(released_slots=[0])).collect()
    return took


def _collect(step: InFlight, marks: list[float]) -> list[int]:
    token_ids = [token.token_id for token in step.collect().tokens]
    marks.append(time.perf_counter())
    return token_ids


def _launch_prefill(runner: Runner, prompts: np.ndarray, context: int) -> InFlight:
    batch, length = prompts.shape
    pages, has_windows = _num_pages(context), runner.pool.windows.shape.count > 0
    return runner.launch(
        StepPlan(
            page_writes=[PageWrite(slot, 0, list(range(slot * pages, (slot + 1) * pages))) for slot in range(batch)],
            window_writes=[WindowWrite(slot, None, slot) for slot in range(batch) if has_windows],
            new_jobs=[
                PrefillJob(
                    0, [PrefillPrompt(slot, prompts[slot], 0, length, _GREEDY, PROFILE) for slot in range(batch)]
                )
            ],
            units=[PrefillUnit(0, layer, 0, batch * length) for layer in range(runner.architecture.num_layers)],
        )
    )


def _num_pages(context: int) -> int:
    return -(-context // PAGE_TOKENS)

"""Measure what MAC-Attention reuses and how it errs in each layer, and choose a threshold for each layer.

One pass of the model: every setting answers the same queries, those of full attention, so errors of layers do not add
up. The rows have the numbers of the paper's figures 4 and 5 (arXiv 2604.00235, sections 5.6 and 5.7).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from evals.decode import decode_forced, prefill_batch
from evals.forward import ReferenceDecoder
from evals.methods.attention_method import Step, StepResult
from evals.methods.full import Full
from evals.score_rows import Row
from evals.tuning.mac_method import Mac
from gpu.methods.mac.match import Count


@dataclass(slots=True)
class _Sums:
    steps: int = 0
    accepted: float = 0.0
    skipped: float = 0.0
    error: float = 0.0


def measure_layers(
    decoder: ReferenceDecoder, token_ids: Sequence[int], steps: int, methods: Sequence[Mac], advance: Callable[[], None]
) -> list[Row]:
    """Return a row for each setting and layer, over the last `steps` tokens of a text.

    `acceptance` and `skipped_fraction` are by query head, `gap` is the distance of matches in positions, and `error` is
    that of a head's output relative to its norm. `advance` is called after each step.
    """
    prompt, forced = list(token_ids[:-steps]), list(token_ids[-steps:])
    batch = prefill_batch(decoder, [prompt], steps, [Full(), *methods])
    num_layers = decoder.architecture.num_layers
    sums = [[_Sums() for _ in range(num_layers)] for _ in methods]

    def watch(step: Step, exact: StepResult, active: torch.Tensor) -> None:
        for number, (method, layers) in enumerate(zip(methods, sums, strict=True)):
            got, own = method.step(step, batch.states[number + 1][step.layer]), layers[step.layer]
            assert got.accepted is not None
            assert got.skipped is not None
            off = (got.out - exact.out).norm(dim=-1) / exact.out.norm(dim=-1)
            own.steps += 1
            own.accepted += float(got.accepted.mean())
            own.skipped += float(got.skipped.mean())
            own.error += float(off.mean())
        if step.layer == num_layers - 1:
            advance()

    decode_forced(batch, 0, [forced], watch, None)
    rows = []
    for number, (method, layers) in enumerate(zip(methods, sums, strict=True)):
        for layer, own in enumerate(layers):
            counts = batch.states[number + 1][layer].counts
            hits = max(1, int(counts[Count.HITS]))
            rows.append(
                {"capacity": method.capacity, "band": method.band, "tau": method.tau, "layer": layer,
                 "acceptance": own.accepted / own.steps, "skipped_fraction": own.skipped / own.steps,
                 "gap": int(counts[Count.GAPS]) / hits, "error": own.error / own.steps}
            )  # fmt: skip
    return rows


def choose_taus(rows: Sequence[Row], most_error: float) -> dict[int, float | str]:
    """Return for each layer the lowest threshold from which on no row's error exceeds `most_error`, or `off`.

    All rows have the same window and band.
    """
    chosen: dict[int, float | str] = {}
    for layer in sorted({row["layer"] for row in rows}):
        chosen[layer] = "off"
        for row in sorted((row for row in rows if row["layer"] == layer), key=lambda row: -row["tau"]):
            if row["error"] > most_error:
                break
            chosen[layer] = row["tau"]
    return chosen

"""List the decode steps that are captured as CUDA graphs. No torch: the memory plan counts them, too."""

from collections.abc import Iterable
from typing import NamedTuple

from gpu.batching.halving import FEWEST_ROWS


class StepKind(NamedTuple):
    """A kind of captured step.

    num_parts: parts in which it requests attention of the CPU, 0 to 2.
    reuses: whether methods with rings take part.
    lends: whether rows read host memory only by such methods, and request nothing of the CPU.
    adapts: whether some row may have an adapter.
    turns: whether rows of one slot may use its ring in turn.
    """

    num_parts: int
    reuses: bool
    lends: bool = False
    adapts: bool = False
    turns: bool = False


def steps_to_capture(
    batch_sizes: Iterable[int], max_running: int, with_host_reads: bool, with_reuse: bool, with_lending: bool = False,
    with_halves: bool = True, with_adapters: bool = False, with_turns: bool = False,
) -> list[tuple[StepKind, int]]:  # fmt: skip
    """Return each step to capture as its kind and its number of rows, most rows first.

    with_host_reads: whether any layer is offloaded. Then a single row with a host read has a graph whatever the sizes.
    with_reuse: whether a served profile has rings. Then each kind is captured with and without them, since rows of all
        profiles share steps.
    with_lending: whether a method reads host memory in place of the CPU.
    with_halves: whether batches with host reads may be cut.
    with_adapters: whether adapters are loaded. Then steps without host reads are captured with and without them, all
        other steps only with them.
    with_turns: whether rows of a slot may use its ring in turn. Then each kind with rings is captured with and without.
    """
    sizes = {min(size, max_running) for size in batch_sizes}
    steps = [(0, size) for size in sizes]
    if with_host_reads and sizes:
        reading_sizes = {1, *sizes}
        steps += [(1, size) for size in reading_sizes]
        if with_halves:
            steps += [(2, size) for size in reading_sizes if size >= FEWEST_ROWS]
    reuses = (False, True) if with_reuse else (False,)
    kinds = [
        (StepKind(num_parts, reusing, adapts=adapts), size)
        for num_parts, size in steps
        for reusing in reuses
        for adapts in {with_adapters, with_adapters and num_parts > 0}
    ]
    if with_lending:
        lent = StepKind(0, True, lends=True, adapts=with_adapters)
        kinds += [(lent, size) for num_parts, size in steps if num_parts == 1]
    if with_turns:
        kinds += [(kind._replace(turns=True), size) for kind, size in kinds if kind.reuses and size > 1]
    return sorted(kinds, key=lambda step: (-step[1], step[0]))

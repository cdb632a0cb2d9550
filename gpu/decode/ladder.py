"""Which decode steps are captured as CUDA graphs. No torch: the memory plan counts them, too."""

from collections.abc import Iterable

from gpu.decode.halving import FEWEST_ROWS


def steps_to_capture(batch_sizes: Iterable[int], max_running: int, with_asks: bool) -> list[tuple[int, int]]:
    """Each step as the number of parts in which it asks the host, 0 to 2, and its rows; most rows first.

    with_asks: whether anything goes down to the host; then a single row that asks has a graph whatever the sizes.
    """
    sizes = {min(size, max_running) for size in batch_sizes}
    steps = [(0, size) for size in sizes]
    if with_asks and sizes:
        asking = {1, *sizes}
        steps += [(1, size) for size in asking] + [(2, size) for size in asking if size >= FEWEST_ROWS]
    return sorted(steps, key=lambda step: (-step[1], step[0]))

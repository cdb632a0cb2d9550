"""Whether a step that asks the host goes as one batch or as two half batches in turns: what has been faster.

Two halves let the device compute one's layer while the host attends for the other, and read all weights twice. It
refuses to know rows and layers. Invariant: which is tried follows from the number of steps of a size and the times that
were told, and from nothing else.
"""

from dataclasses import dataclass, field

FEWEST_ROWS = 2  # a single row leaves nothing to compute meanwhile
_SMOOTHING = 0.3
_TRIES = 3  # of each way before one is preferred
_RETRY_STEPS = 128  # after so many steps of a size the slower way is tried again: contexts have grown meanwhile


@dataclass(slots=True)
class _Size:
    steps: int = 0
    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])
    tries: list[int] = field(default_factory=lambda: [0, 0])


class Halving:
    """Learns for each size of a batch; `always`: one or two parts, whatever the times."""

    def __init__(self, always: int | None = None) -> None:
        self.always = always
        self._sizes: dict[int, _Size] = {}

    def choose(self, rows: int) -> int:
        """How many parts the next step of so many rows has, 1 or 2."""
        if rows < FEWEST_ROWS:
            return 1
        if self.always is not None:
            return self.always
        size = self._sizes.setdefault(rows, _Size())
        size.steps += 1
        if min(size.tries) < _TRIES:
            return 2 if size.tries[1] <= size.tries[0] else 1
        faster = 1 if size.seconds[0] <= size.seconds[1] else 2
        return 3 - faster if size.steps % _RETRY_STEPS == 0 else faster

    def observe(self, rows: int, parts: int, seconds: float) -> None:
        """What a step took, from its launch to its last answer."""
        size = self._sizes.get(rows)
        if size is None:
            return
        known, index = size.seconds[parts - 1], parts - 1
        size.seconds[index] = seconds if size.tries[index] == 0 else known + _SMOOTHING * (seconds - known)
        size.tries[index] += 1


def cut(rows: int, parts: int) -> list[slice]:
    """A batch's rows in one or two parts; the first has the odd one."""
    if parts == 1:
        return [slice(0, rows)]
    middle = -(-rows // 2)
    return [slice(0, middle), slice(middle, rows)]


def most_rows_of_parts(max_rows: int) -> list[int]:
    """Most rows of each part in batches of up to `max_rows`, whichever way they are cut."""
    return [max_rows, max_rows // 2] if max_rows >= FEWEST_ROWS else [max_rows]

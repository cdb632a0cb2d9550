"""What steps over predicted blocks took, as tables: each way beside its floor, and what the aims are about in a line.

A floor is max(compute, link): the step that only reads, and its bytes at the link's rate.
"""

from collections.abc import Mapping, Sequence

from rich.table import Table

from lab.kernels.predicted_decode import REPLAYED, Cell, Measured
from lab.kernels.predicted_ways import NO_FETCH

AIMS = (
    "aims: read at most 1.10; refetch 1.4 or more at budget 4096 or batch 4 and up; layer 1 or more; hidden 90 % or "
    "more where the link's floor is below compute"
)


def _floor_ms(one: Measured, read_ms: float, link_rate: float) -> float:
    return max(read_ms, one.link_bytes / link_rate * 1e3)


def _read_ms(found: Sequence[Measured]) -> float | None:
    return next((one.median_ms for one in found if one.way == "read"), None)


def _predict_ms(found: Sequence[Measured], is_replayed: bool) -> float | None:
    """Of a choice that was forced, or replayed."""
    own = (one.median_ms for one in found if one.way == "predict" and (one.turnover == REPLAYED) == is_replayed)
    return next(own, None)


def _share(turnover: float | str) -> str:
    return turnover if isinstance(turnover, str) else f"{turnover:.0%}"


def tabulate(found: Sequence[Measured], link_rate: float, title: str) -> Table:
    """Return a line a way and turnover. found: `read` is among them; link_rate: bytes a second."""
    table = Table("way", "turnover", "changed", "step, ms", "floor, ms", "times", "MB over the link", "of the budget",
                  "alone, ms", "hidden", title=title)  # fmt: skip
    read_ms = _read_ms(found)
    assert read_ms is not None
    for one in found:
        floor = _floor_ms(one, read_ms, link_rate)
        fetches = one.way not in NO_FETCH
        table.add_row(
            one.way, "" if one.way == "read" else _share(one.turnover), f"{one.changed:.1%}" if fetches else "",
            f"{one.median_ms:.2f}", f"{floor:.2f}", f"{one.median_ms / floor:.2f}", f"{one.link_bytes / 1e6:.1f}",
            f"{one.link_bytes / one.plain_bytes:.0%}", "" if one.alone_ms is None else f"{one.alone_ms:.2f}",
            "" if one.hidden is None else f"{one.hidden:.0%}",
        )  # fmt: skip
    return table


def tabulate_aims(cells: Mapping[Cell, Sequence[Measured]], link_rate: float) -> Table:
    """Return a line for each cell and turnover of `across`, what serves: its milliseconds, beside max(compute, link)
    and which of them that is, prediction apart, how many times reading alone it takes, how many times as long the other
    ways take, the share of fetching that is hidden, and its megabytes over the link as a share of the whole budget's.
    What was not measured is empty.
    """
    table = Table("context:budget x batch", "turnover", "across", "floor", "of", "predict", "/read", "refetch/",
                  "layer/", "demand/", "hidden", "MB", "of it", box=None, pad_edge=False)  # fmt: skip
    for column in table.columns:
        column.no_wrap = True
    for cell, found in cells.items():
        steps = {(one.way, one.turnover): one.median_ms for one in found}
        read_ms = _read_ms(found)
        for one in found:
            predict_ms = _predict_ms(found, one.turnover == REPLAYED)
            if one.way != "across" or read_ms is None or predict_ms is None:
                continue
            floor = _floor_ms(one, read_ms, link_rate)
            others = [steps.get((way, one.turnover)) for way in ("refetch", "layer", "demand")]
            table.add_row(
                str(cell), _share(one.turnover), f"{one.median_ms:.2f}", f"{floor:.2f}",
                "compute" if floor == read_ms else "link", f"{predict_ms - read_ms:.2f}",
                f"{one.median_ms / read_ms:.2f}", *("" if ms is None else f"{ms / one.median_ms:.2f}" for ms in others),
                "" if one.hidden is None else f"{one.hidden:.0%}", f"{one.link_bytes / 1e6:.1f}",
                f"{one.link_bytes / one.plain_bytes:.1%}",
            )  # fmt: skip
    return table

"""Print a load's timeline, and the simulator's result for the same load."""

from typing import Any

from rich.console import Console
from rich.table import Table

Record = dict[str, Any]
_HOST_ROWS = 16


def print_timeline(told: Record, console: Console) -> None:
    load, device = told["load"], told["device"]
    _say(
        console,
        f"{load['seconds']:.3f} s, {load['tokens_per_s']:,.0f} tokens/s; "
        f"first token {1e3 * load['first_s_p50']:.1f} ms (99 %: {1e3 * load['first_s_p99']:.0f}), "
        f"a token {1e3 * load['token_s_p50']:.2f} ms "
        f"({1e3 * load['token_s_p99']:.2f}), gap {1e3 * load['gap_s_p50']:.2f} ms ({1e3 * load['gap_s_p99']:.1f}, "
        f"most {1e3 * load['gap_s_most']:.0f}); {told['num_steps']} steps, graphs {told['graphs'] or 'none'}",
    )
    table = _table("of the device", "seconds", "share")
    for name, seconds in device.items():
        table.add_row(name, f"{seconds:.3f}", f"{seconds / device['window']:.1%}")
    console.print(table)
    _print_rows(console, "gaps between steps", told["gaps"])
    _print_rows(console, "decode steps", told["decode"])
    uncovered = told["uncovered"]
    if uncovered["captures"]:
        _say(
            console,
            f"steps without a graph: {uncovered['steps']} of {uncovered['of']} ({uncovered['seconds']:.3f} s), "
            f"of rows {uncovered['rows']}; {uncovered['mean padding rows']:.1f} rows of a graph are padding",
        )
    units = ", ".join(f"{name} {_number(value)}" for name, value in told["units"].items())
    _say(console, f"prefill: {units}")
    _print_rows(console, "the engine's thread", told["host"][:_HOST_ROWS])
    cpu = ", ".join(
        f"{name} {seconds:.2f} s ({seconds / device['window']:.0%} of a core, "
        f"{1e3 * seconds / max(1, told['num_steps']):.2f} ms a step)"
        for name, seconds in told["cpu_s"].items()
    )
    _say(console, f"CPU: {cpu}")
    if told["stages"][0]["ms"] is not None:
        _print_rows(console, "stages to a first token, means", told["stages"])
    slices = [{**row, **{f"CPU {name}": share for name, share in row["cpu"].items()}} for row in told["bins"]]
    for row in slices:
        del row["cpu"]
    _print_rows(console, "slices", slices)
    if told["kernels"] is not None:
        _print_kernels(console, told["kernels"])


def _print_kernels(console: Console, kernels: Record) -> None:
    if not kernels["groups"]:
        _say(console, "kernels: none were traced; the driver lets nobody, or the window was empty")
        return
    from lab.speed.prefill_trace import tabulate_groups

    console.print(tabulate_groups(kernels["groups"], [tuple(one) for one in kernels["kernels"]]))
    gaps = ", ".join(
        f"{'more' if bound is None or bound == float('inf') else f'up to {bound:g} us'}: {count:,} ({ms:.1f} ms)"
        for bound, count, ms in kernels["gaps"]
    )
    _say(console, f"gaps between kernels: {gaps}")


def _print_rows(console: Console, name: str, rows: list[Record]) -> None:
    if not rows:
        return
    first, *others = rows[0]
    table = _table(f"{name}: {first}", *others)
    for row in rows:
        table.add_row(*(_number(value) for value in row.values()))
    console.print(table)


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) >= 1e-3 else "0"
    return str(value)


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)

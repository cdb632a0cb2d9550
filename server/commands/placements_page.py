"""Show placements side by side for `tandem plan`: as a table, or as plain data."""

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from server.planning.placements import Comparison, StepEstimate


def describe_comparison(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as plain data.

    Keys: `{context_tokens, batches, share_read, rates, rates_from, placements, taken, verdict, sampling, experts}`. Of
    a placement's steps, one for each batch, null is one that does not fit.
    """
    return {
        "context_tokens": comparison.context_tokens,
        "batches": list(comparison.batches),
        "share_read": comparison.share_read,
        "rates": {
            name: {"rate": rate, "source": comparison.rates.sources[name]} for name, rate in comparison.rates.of.items()
        },
        "rates_from": comparison.rates.text,
        "placements": [
            {
                "name": placement.name,
                "most_contexts": placement.most_contexts,
                "why_not": placement.why_not,
                "steps": [None if step is None else _describe_step(step) for step in placement.steps],
            }
            for placement in comparison.placements
        ],
        "taken": comparison.taken,
        "verdict": comparison.verdict,
        "sampling": comparison.sampling,
        "experts": comparison.experts,
    }


def _describe_step(step: StepEstimate) -> dict[str, float]:
    return asdict(step) | {"ms": step.ms, "tokens_s": step.tokens_s}


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print a row for each placement and a column for each batch, within 80 characters, and then details.

    The details are what batch 1 is made of or why there is none, the placement in use, whether sampling pays, and the
    source of the rates.
    """
    title = f"placements, ms a token of each context of {comparison.context_tokens:,} tokens, by batch"
    table = Table(title=title, title_justify="left")
    table.add_column("placement")
    table.add_column("contexts", justify="right")
    for batch in comparison.batches:
        table.add_column(str(batch), justify="right", no_wrap=True)
    whys = []
    for placement in comparison.placements:
        mark = " (taken)" if placement.name == comparison.taken else ""
        steps = ["-" if step is None else f"{step.ms:,.1f}" for step in placement.steps]
        table.add_row(placement.words + mark, f"{placement.most_contexts:,}", *steps)
        if placement.why_not is not None:
            whys.append(f"{placement.words}: {placement.why_not}")
        elif placement.first is not None:
            whys.append(f"{placement.words}, batch 1: {_parts(placement.first)}")
    console.print(table)
    for line in (*whys, comparison.verdict, comparison.sampling, comparison.experts):
        if line is None:
            continue
        console.print(line, highlight=False, markup=False)
    share = f"of the keys on the host a query head reads {100 * comparison.share_read:.1f} % where it samples"
    console.print(f"estimates: bytes divided by rates, without overlap; {share}", highlight=False)
    of = comparison.rates.of  # those of a core count where experts lie in host memory alone
    rates = ", ".join(f"{name} {of[name]:g}" for name in of if comparison.experts or not name.startswith("core_"))
    console.print(f"rates: {rates}: {comparison.rates.text}", highlight=False, markup=False)


def _parts(step: StepEstimate) -> str:
    experts = f"experts in host memory {step.experts_ms:.1f}, " if step.experts_ms else ""
    parts = f"weights {step.weights_ms:.1f}, {experts}KV on the device {step.device_kv_ms:.1f}"
    if not step.offloaded_tokens:
        return parts
    if step.fetch_ms:
        parts += f", rows fetched {step.fetch_ms:.1f} at most"
    return f"{parts}, link {step.link_ms:.2f}, host {step.host_ms:.1f} of {step.offloaded_tokens:,} tokens"

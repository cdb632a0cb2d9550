"""Choose the best (K, L) of LSH sampling for a budget of reads and of table memory, on a model and some text.

One pass of the model measures it: as the prefill computes each layer, its queries and keys are measured over the whole
grid. Invariant: the chosen setting was measured to be within the budget.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from evals.forward import ReferenceDecoder
from evals.methods.attention_method import PromptLayer, parse_layers
from evals.score_rows import Row
from evals.tuning.collisions import even_bucket_fraction
from evals.tuning.grid import LayerSamples, Resident, Setting, Tally, table_memory_bytes

MEASURED_SHARE = 4
"""One over the share of the text, at its end, whose queries are measured; all of them use the same centre of keys."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Upper limits. read: share of offloaded keys that a query head reads. memory_bytes: of one context's tables; None:
    no limit.
    """

    read: float
    memory_bytes: float | None


def measure_grid(
    decoder: ReferenceDecoder,
    tokens: Sequence[int],
    grid: Sequence[Setting],
    num_queries: int,
    resident: Resident,
    dense_layers: str,
    seed: int,
    advance: Callable[[], None],
) -> dict[int, dict[Setting, Tally]]:
    """Return sums of every setting in every layer that is sampled, from one prefill of `tokens`.

    Queries are spread evenly over the last quarter of the text. `advance` is called after each layer. Raises ValueError
    for a text too short for its sink, window and queries, or too long for the model.
    """
    count, room = len(tokens), decoder.architecture.max_context_tokens
    first = count - count // MEASURED_SHARE
    if count // MEASURED_SHARE < num_queries or first <= resident.sink + resident.window:
        raise ValueError(
            f"tune: {count} tokens for {num_queries} queries in their last quarter, beyond a sink of {resident.sink} "
            f"and a window of {resident.window}; raise --context or lower --queries"
        )
    if count > room:
        raise ValueError(f"tune: a context of {count} tokens, the model has {room} positions; lower --context")
    positions = torch.linspace(first, count - 1, num_queries, device=decoder.device).long()
    num_layers = decoder.architecture.num_layers
    dense = {*parse_layers(dense_layers, num_layers), *decoder.architecture.window_layers}
    if len(dense) == num_layers:
        raise ValueError(
            f"tune: all {num_layers} layers are read in full, {len(decoder.architecture.window_layers)} since they "
            "have windows: there is nothing to sample; name fewer in --dense-layers, or serve without `host`"
        )
    found: dict[int, dict[Setting, Tally]] = {}

    def measure(prompt: PromptLayer) -> None:
        if prompt.layer not in dense:
            found[prompt.layer] = LayerSamples(prompt, positions, resident).measure(grid, seed)
        advance()

    ids = torch.tensor([list(tokens)], device=decoder.device)
    decoder.prefill(ids, torch.tensor([count], device=decoder.device), count, count, measure)
    return found


def summarize_grid(found: dict[int, dict[Setting, Tally]], kv_heads: int, table_tokens: int) -> list[Row]:
    """Return a row for each setting: `read`, `read_even_buckets` (equation 21), `memory_bytes` of `table_tokens`,
    `error` (mean over layers), `worst_error` and its `worst_layer`, and `layers`: each layer's own `read` and `error`.
    """
    rows = []
    for setting in next(iter(found.values())):
        layers = [
            {"layer": layer, "read": tally.read / tally.terms, "error": tally.error / tally.terms}
            for layer, tally in ((layer, tallies[setting]) for layer, tallies in found.items())
        ]
        worst = max(layers, key=lambda one: one["error"])
        rows.append(
            {
                "bits_per_table": setting.bits_per_table,
                "num_tables": setting.num_tables,
                "read": sum(one["read"] for one in layers) / len(layers),
                "read_even_buckets": even_bucket_fraction(setting.bits_per_table, setting.num_tables),
                "memory_bytes": table_memory_bytes(setting, table_tokens, len(layers), kv_heads),
                "error": sum(one["error"] for one in layers) / len(layers),
                "worst_error": worst["error"],
                "worst_layer": worst["layer"],
                "layers": layers,
            }
        )
    return rows


def choose_setting(rows: Sequence[Row], budget: Budget) -> Row:
    """Return the row with the least error within the budget. Raises ValueError, naming the nearest, if none is."""
    fits = [row for row in rows if budget.memory_bytes is None or row["memory_bytes"] <= budget.memory_bytes]
    if not fits:
        least = min(row["memory_bytes"] for row in rows)
        raise ValueError(
            f"tune: tables of {(budget.memory_bytes or 0) / 2**30:.3g} GiB allowed, the grid's smallest take "
            f"{least / 2**30:.3g} GiB; raise --memory-gib or give smaller --tables"
        )
    within = [row for row in fits if row["read"] <= budget.read]
    if not within:
        least = min(fits, key=lambda row: row["read"])
        raise ValueError(
            f"tune: a budget of {budget.read:.2%} allowed, the least that fits reads {least['read']:.2%} "
            f"(K {least['bits_per_table']}, L {least['num_tables']}); raise --budget or give other --bits and --tables"
        )
    return min(within, key=lambda row: row["error"])

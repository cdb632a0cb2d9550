"""Choose bits and budget of `indexed` on a model and some text: the fewest bytes that keep next tokens close enough.

Every setting is fed the same tokens as full attention (`evals.fidelity`). Invariant: the chosen setting was measured.
"""

from collections.abc import Callable, Sequence
from itertools import product

from evals.fidelity import compare_methods
from evals.forward import ReferenceDecoder
from evals.score_rows import Row
from evals.tuning.index_method import Index, index_bytes

MOST_INDEX_BYTES = 4 * 2**30  # of all settings that share one prefill
KEPT = ("key_bits", "value_bits", "budget_share")


def make_grid(key_bits: Sequence[int], value_bits: Sequence[int], shares: Sequence[float]) -> list[Index]:
    """Return one method for each setting. Raises ValidationError for bits that the served method does not have."""
    methods = [
        Index(key_bits=keys, value_bits=values, budget_share=share)
        for keys, values, share in product(key_bits, value_bits, shares)
    ]
    for method in methods:
        method.served()
    return methods


def measure_index(
    decoder: ReferenceDecoder,
    prompts: Sequence[Sequence[int]],
    grid: Sequence[Index],
    forced_tokens: int,
    advance: Callable[[], None],
) -> list[Row]:
    """Return a row for each setting, in ascending bytes. `advance` is called after each setting.

    A row has the setting and: `index_bytes` of a token and KV head; `bytes` read, as a share of all keys' and values';
    `error` of attention's output as a mean over layers; `worst_error` and its `worst_layer`; `kl` of the next token in
    nats.
    """
    shape, rows = decoder.architecture, []
    at_once = count_at_once(decoder, sum(map(len, prompts)))
    for begin in range(0, len(grid), at_once):
        methods = {method.label: method for method in grid[begin : begin + at_once]}
        (_, *found), of_layers = compare_methods(decoder, prompts, methods, forced_tokens)
        for row, (label, method) in zip(found, methods.items(), strict=True):
            layers = [one for one in of_layers if one["method"] == label]
            worst = max(layers, key=lambda one: one["error"])
            rows.append(
                {name: getattr(method, name) for name in KEPT}
                | {
                    "index_bytes": index_bytes(method.served(), shape.dim),
                    "bytes": row["bytes_fraction"],
                    "error": sum(one["error"] for one in layers) / len(layers),
                    "worst_error": worst["error"],
                    "worst_layer": worst["layer"],
                    "kl": row["kl"],
                }
            )
            advance()
    return sorted(rows, key=lambda row: row["bytes"])


def count_at_once(decoder: ReferenceDecoder, num_tokens: int) -> int:
    """Return for how many settings the indexes of num_tokens tokens fit in memory after one prefill."""
    shape = decoder.architecture
    token_bytes = 2 * 4 * shape.num_layers * shape.num_kv_heads * shape.dim  # as `LayerIndex` has them
    return max(1, MOST_INDEX_BYTES // (token_bytes * num_tokens))


def choose_index(rows: Sequence[Row], most_kl: float) -> Row:
    """Return the row with the fewest bytes whose KL is within the limit and that does not fail on tasks.

    On short texts several shares may read the same; then the largest share is taken. Raises ValueError if there is
    none, and names the nearest.
    """
    within = [row for row in rows if row["kl"] <= most_kl]
    if not within:
        best = min(rows, key=lambda row: row["kl"])
        words = ", ".join(f"{name} {best[name]:g}" for name in KEPT)
        raise ValueError(
            f"tune: a KL of {most_kl:g} allowed, the least of these is {best['kl']:.4f} ({words}); raise --kl or give "
            "larger --shares, --key-bits and --value-bits"
        )
    within = [row for row in within if not row.get("task_fails")]
    if not within:
        raise ValueError(
            f"tune: a KL of {most_kl:g} allowed, and all settings within it lose too many points on tasks; give larger "
            "--shares, --key-bits and --value-bits"
        )
    return min(within, key=lambda row: (row["bytes"], -row["budget_share"]))

"""Choose bits and budget of `indexed` on a model and some text: the fewest bytes whose next tokens are near enough.

Every setting follows the same tokens as full attention (`evals.fidelity`). Invariant: what is chosen was measured.
"""

from collections.abc import Callable, Sequence
from itertools import product

from evals.fidelity import compare_methods
from evals.forward import ReferenceDecoder
from evals.score_rows import Row
from evals.tuning.index_method import Index, index_bytes

MOST_INDEX_BYTES = 4 * 2**30  # of settings that are measured behind one prefill
KEPT = ("key_bits", "value_bits", "budget_share")


def make_grid(key_bits: Sequence[int], value_bits: Sequence[int], shares: Sequence[float]) -> list[Index]:
    """Return a method a setting. Raises ValidationError for bits that the served method does not have."""
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
    """Return a row a setting, by rising bytes: the setting, `index_bytes` of a token and KV head, `bytes` read of those
    of all keys and values, `error` of attention's output in the mean over layers, `worst_error` and its `worst_layer`,
    and `kl` of the next token in nats. `advance` is called after each setting.
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
    """Return how many settings are measured behind one prefill of so many tokens."""
    shape = decoder.architecture
    token_bytes = 2 * 4 * shape.num_layers * shape.num_kv_heads * shape.dim  # as `LayerIndex` has them
    return max(1, MOST_INDEX_BYTES // (token_bytes * num_tokens))


def choose_index(rows: Sequence[Row], most_kl: float) -> Row:
    """Return the row of the fewest bytes within a KL that does not fail by tasks; where shares read alike, since the
    text is short, the largest. Raises ValueError where none is, naming the nearest.
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

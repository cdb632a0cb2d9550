"""Say which models the compiled decode step computes, and size its arrays of contexts and vocabulary. No torch."""

from dataclasses import fields

from gpu.model.architecture import Architecture
from transfer.arrays import ArraySpec

MAX_ROWS = 32  # most rows of a batch; for larger ones a library's products are as fast (lab/LAB.md)
PART_TOKENS = 1024  # tokens of a context in each part that a thread attends to
HALF_ROW_STEP = 64  # bf16 rows of heads with a multiple of so many elements can be read by vectors of every size

# Fields of an architecture that the step computes whatever their values are: sizes, or what loading has applied to
# weights and rotation tables. All others must have their defaults, and so must all fields of each layer.
COMPUTED = frozenset({
    "name", "family", "hidden", "intermediate", "num_layers", "num_heads", "num_kv_heads", "dim", "vocab_size",
    "max_context_tokens", "rms_norm_eps", "tied_embeddings", "rope", "rotary_dim", "has_neighbour_pairs",
    "bos_token_id", "eos_token_ids", "quantisation", "experts_apart", "draft_heads",
})  # fmt: skip


def has_plain_layers(architecture: Architecture) -> bool:
    """Return whether a model has only plain Llama layers, which the compiled step computes."""
    others = (field for field in fields(architecture) if field.name not in COMPUTED)
    return all(getattr(architecture, field.name) == field.default for field in others)


def num_step_rows(max_running: int) -> int:
    """Return the most rows of a step."""
    return min(MAX_ROWS, max_running)


def part_arrays(architecture: Architecture, num_rows: int, context_tokens: int) -> dict[str, ArraySpec]:
    """Return the arrays of partials for contexts of `context_tokens`: out `[rows, heads, parts, dim]`; top and mass
    without the last axis.
    """
    each = (num_rows, architecture.num_heads, -(-context_tokens // PART_TOKENS))
    return {
        "out": ArraySpec((*each, architecture.dim), "float32"),
        "top": ArraySpec(each, "float32"),
        "mass": ArraySpec(each, "float32"),
    }


def logits_array(architecture: Architecture, num_rows: int) -> ArraySpec:
    return ArraySpec((num_rows, architecture.vocab_size), "float32")

"""Arrays of the compiled decode step that grow with contexts and vocabulary. No torch."""

from gpu.model.architecture import Architecture
from transfer.arrays import ArraySpec

MAX_ROWS = 32  # of a batch; with larger ones a library's products draw level (lab/LAB.md)
PART_TOKENS = 1024  # of a context, in each part that a thread attends to


def num_step_rows(max_running: int) -> int:
    """Return the most rows of a step."""
    return min(MAX_ROWS, max_running)


def part_arrays(architecture: Architecture, num_rows: int, context_tokens: int) -> dict[str, ArraySpec]:
    """Return the partials of the parts of so long contexts: out `[rows, heads, parts, dim]`, top and mass alike."""
    each = (num_rows, architecture.num_heads, -(-context_tokens // PART_TOKENS))
    return {
        "out": ArraySpec((*each, architecture.dim), "float32"),
        "top": ArraySpec(each, "float32"),
        "mass": ArraySpec(each, "float32"),
    }


def logits_array(architecture: Architecture, num_rows: int) -> ArraySpec:
    return ArraySpec((num_rows, architecture.vocab_size), "float32")

"""Compute the arrays of recurrent layers: a sequence's states, and scratch memory of a prompt's segment. No torch."""

from gpu.model.spec import Recurrent
from transfer.arrays import FLOATS, ArraySpec, sum_bytes

CHUNK_TOKENS = 64  # tokens of a prompt that are multiplied at once
SEGMENT_TOKENS = 1024  # tokens whose chunks are prepared together, so that memory does not grow with prompts
CHUNKS_AT_ONCE = 16  # chunks of a unit whose parts exist together in kernels
MOST_STEP_ROWS = 5  # of one sequence in a decode step: later rows must not overwrite inputs that the first one reads
SHORT_COPIES = 5  # arrays as wide as a short convolution's input that exist at once
SEGMENT_COPIES = 8  # copies of queries, keys and values in float32 that exist at once


def ring_length(conv_tokens: int) -> int:
    """Return how many inputs of its convolution a sequence keeps, a power of two.

    These are enough that a step's rows do not overwrite inputs that its first row still reads.
    """
    length = 1
    while length < MOST_STEP_ROWS + conv_tokens - 1:
        length *= 2
    return length


def state_arrays(own: Recurrent, count: int, dtype_bytes: int, state_bytes: int) -> dict[str, ArraySpec]:
    """Return one layer's states and rings for so many sequences.

    dtype_bytes: of the compute dtype. state_bytes: of an element of a state.
    """
    ring = (count, ring_length(own.conv_tokens), own.conv_width)
    return {
        "states": ArraySpec((count, own.value_heads, own.key_dim, own.value_dim), FLOATS[state_bytes]),
        "rings": ArraySpec(ring, FLOATS[dtype_bytes]),
    }


def draft_array(own: Recurrent, slots: int, dtype_bytes: int) -> ArraySpec:
    """Return the array for the gates of a layer's drafted tokens, kept until it is known which are accepted.

    The inputs of these tokens are in the ring.
    """
    return ArraySpec((slots, MOST_STEP_ROWS - 1, own.gate_rows), FLOATS[dtype_bytes])


def stacked_arrays(own: Recurrent, layers: int, dtype_bytes: int) -> dict[str, ArraySpec]:
    """Return the arrays of all layers' state update weights, stacked for the kernel that updates all layers."""
    biases = {"conv_bias": ArraySpec((layers, own.conv_width), FLOATS[dtype_bytes])} if own.is_mamba else {}
    return biases | {
        "conv": ArraySpec((layers, own.conv_width, own.conv_tokens), FLOATS[dtype_bytes]),
        "decay": ArraySpec((layers, own.value_heads), "float32"),
        "time_bias": ArraySpec((layers, own.value_heads), "float32"),
    }


def padded(dim: int) -> int:
    """Return a head's size as kernels use it: a power of two, at least 16."""
    return max(16, 1 << (dim - 1).bit_length())


def chunk_arrays(own: Recurrent, num_chunks: int) -> dict[str, ArraySpec]:
    """Return the arrays that kernels pass to one another for a unit's chunks.

    parts: for each head three matrices as wide as a key, one as wide as a value, one as wide as a chunk. fades: how
    much of the state remains.
    """
    count = min(num_chunks, CHUNKS_AT_ONCE)
    width = 3 * padded(own.key_dim) + padded(own.value_dim) + CHUNK_TOKENS
    return {
        "parts": ArraySpec((count, own.value_heads, CHUNK_TOKENS, width), "float32"),
        "fades": ArraySpec((count, own.value_heads), "float32"),
    }


def segment_bytes(own: Recurrent, num_tokens: int, has_kernels: bool) -> int:
    """Return the scratch bytes of a layer for a prompt's segment, or for the rows of a decode step."""
    if own.is_short:
        return 4 * min(num_tokens, SEGMENT_TOKENS) * SHORT_COPIES * own.conv_width
    if has_kernels:
        made = 4 * num_tokens * own.value_width if own.is_mamba else 0  # outputs that are not normed yet
        return sum_bytes(chunk_arrays(own, -(-num_tokens // CHUNK_TOKENS)).values()) + made
    tokens = min(num_tokens, SEGMENT_TOKENS)
    heads = own.value_heads * (2 * own.key_dim + own.value_dim)
    products = 3 * own.value_heads * CHUNK_TOKENS
    return 4 * tokens * (SEGMENT_COPIES * heads + products + 2 * own.conv_width)

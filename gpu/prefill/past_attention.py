"""Attend to a prefill chunk's past in pieces of a few sizes, and merge these with the chunk itself.

There are two reasons to cut the past. First, cuDNN makes a plan for every shape, which takes as long as attending to
thousands of tokens, and a past grows with each chunk. So a past is cut into pieces of powers of two, the longest in
front, and the number of queries is padded to a power of two. Then a deployment needs a few dozen plans, which are made
while it loads. Second, a block of such a kernel keeps its SM until it has seen all keys of its launch, while the other
lane's kernels wait. The length of the longest piece bounds that time. The rest of the past and the chunk's own causal
part are one launch of a kernel that needs no plans.

A chunk with little or no past is a causal square, which cuDNN computes in one launch: queries are padded in front, for
the past, and both queries and keys at the end, to a multiple of SQUARE_STEP.
"""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu.attention.prefill_attention import Whole, past_attention, prefill_attention
from gpu.attention.prefill_query import Attended
from gpu.operations.prefill_attention.merge_attended import merge_attended
from gpu.prefill.prefill_arrays import MERGED_PIECES, PIECE_TOKENS

LEAST_QUERIES = 256  # of a padded chunk; with fewer, a launch takes longer than its work
SQUARE_STEP = 1024  # a square's size is a multiple of this
LEAST_SQUARE = 2048
TILE_QUERIES = 128  # of a block, in all kernels that we know

Kernel = Whole | Literal["cudnn"]


def cut_past(num_tokens: int, most_tokens: int | None) -> list[range]:
    """Cut `[0, num_tokens)` into pieces, the longest in front.

    Up to PIECE_TOKENS - 1 tokens are left over at the end.

    most_tokens: the longest piece, a power of two; None: no limit.
    """
    pieces, begin = [], 0
    while num_tokens - begin >= PIECE_TOKENS:
        length = 1 << ((num_tokens - begin).bit_length() - 1)
        length = min(length, most_tokens or length)
        pieces.append(range(begin, begin + length))
        begin += length
    return pieces


def longest_piece(block_seconds: float, key_seconds: float) -> int:
    """Return the tokens of the longest piece that a block attends to in so many seconds: a power of two.

    key_seconds: seconds per token. The result is at least PIECE_TOKENS.
    """
    return max(PIECE_TOKENS, 1 << (max(1, int(block_seconds / key_seconds)).bit_length() - 1))


def key_seconds(flop_s: float, dim: int, num_sms: int) -> float:
    """Return a block's seconds per key of its launch, if the device computes `flop_s` and each SM has one tile."""
    return 4.0 * TILE_QUERIES * dim * num_sms / flop_s


def padded_queries(num_queries: int) -> int:
    """Return the next power of two, LEAST_QUERIES or more."""
    return max(LEAST_QUERIES, 1 << (num_queries - 1).bit_length())


def square_size(num_tokens: int) -> int:
    """Return the size of the smallest square that holds so many tokens."""
    return -(-num_tokens // SQUARE_STEP) * SQUARE_STEP


def attend_in_square(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Attended:
    """Attend as `prefill_attention` does, by one causal launch of cuDNN.

    Keys and values are copied, and queries that are not as many as the square, so that all squares of one size have the
    same strides and share a plan. Padding is zero: NaN would get through to other rows.
    """
    (tokens, heads, dim), (kv_heads, end, _) = query.shape, keys.shape
    size, past = square_size(end), end - tokens
    padded = query.contiguous()
    if tokens < size:
        padded = query.new_empty(size, heads, dim)
        padded[:past], padded[past:end], padded[end:] = 0, query, 0
    room = keys.new_empty(2, kv_heads, size, dim)
    room[0, :, :end], room[1, :, :end], room[:, :, end:] = keys, values, 0
    square = cudnn_attention(padded, room[0], room[1], True, scale)
    return Attended(square.out[past:end], square.partial_lse[past:end])


def attend_in_pieces(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, kernel: Whole, piece_kernel: Kernel,
    most_tokens: int | None,
) -> Attended:  # fmt: skip
    """Attend as `prefill_attention` does, with the past in pieces that are merged, a few at a time.

    Pieces of up to `most_tokens` go to `piece_kernel`, the rest to `kernel`. The past has at least PIECE_TOKENS tokens.
    cuDNN needs CUDA and half precision. Raises RuntimeError if cuDNN has no plan.
    """
    tokens = query.shape[0]
    pieces = cut_past(keys.shape[1] - tokens, most_tokens)
    more = padded_queries(tokens) - tokens if piece_kernel == "cudnn" else 0
    padded = F.pad(query, (0, 0, 0, 0, 0, more)) if more else query
    end = pieces[-1].stop
    if piece_kernel == "cudnn" and not more and keys.shape[1] - end == tokens:
        merged = cudnn_attention(query, keys[:, end:], values[:, end:], True, scale)
    else:
        merged = prefill_attention(query, keys[:, end:], values[:, end:], scale, kernel)
    for first in range(0, len(pieces), MERGED_PIECES):
        end = first + MERGED_PIECES
        dtype = query.dtype if end >= len(pieces) else torch.float32
        merged = _merge_pieces(padded, keys, values, pieces[first:end], merged, scale, piece_kernel, dtype)
    return merged


def _merge_pieces(
    query: Tensor, keys: Tensor, values: Tensor, pieces: Sequence[range], before: Attended, scale: float,
    kernel: Kernel, dtype: torch.dtype,
) -> Attended:  # fmt: skip
    """Attend to these pieces, and merge the results with what was attended to before."""
    tokens, outs, lses = before.out.shape[0], [], []
    for piece in pieces:
        of_keys, of_values = keys[:, piece.start : piece.stop], values[:, piece.start : piece.stop]
        if kernel == "cudnn":
            side = cudnn_attention(query, of_keys, of_values, False, scale)
        else:
            side = past_attention(query, of_keys, of_values, scale, kernel)
        outs.append(side.out[:tokens])
        lses.append(side.partial_lse[:tokens])
    return Attended(*merge_attended([*outs, before.out], [*lses, before.partial_lse], dtype))


def compile_merges(num_heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compile the merge of every number of pieces that may occur, so that no prompt waits for it."""
    outs = torch.zeros(MERGED_PIECES + 1, LEAST_QUERIES, num_heads, dim, dtype=dtype, device=device)
    lses = torch.zeros(MERGED_PIECES + 1, num_heads, LEAST_QUERIES, device=device).transpose(1, 2)
    for count in range(1, MERGED_PIECES + 1):
        for last in (outs[-1], outs[-1].float()):
            for to in {dtype, torch.float32} if count == MERGED_PIECES else (dtype,):
                merge_attended([*outs[:count], last], [*lses[:count], lses[-1]], to)


def cudnn_attention(query: Tensor, keys: Tensor, values: Tensor, is_causal: bool, scale: float) -> Attended:
    """Attend by cuDNN, with queries `[tokens, heads, dim]`, to all of `[kv_heads, context, dim]` or, if causal, to a
    square.

    cuDNN keeps a plan for each shape in each thread. Raises RuntimeError if it has none.
    """
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query.transpose(0, 1).unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), None, True, 0.0, is_causal, False,
        scale=scale,
    )  # fmt: skip
    return Attended(out[0].transpose(0, 1), lse[0].view(lse.shape[1:3]).transpose(0, 1))

"""A chunk's past in pieces of a few sizes, each by a kernel with a plan for its shape, merged with the chunk itself.

cuDNN makes a plan for every shape, which takes as long as attending to thousands of tokens, and a past grows with each
chunk. So a past is cut into pieces of powers of two, the longest in front, and queries are padded to such a number:
the plans that a deployment can ever need are a few dozen, and all are made while it loads. What the pieces leave, and
the chunk's own causal part, is one launch of a kernel that makes no plans, but for a chunk that is itself such a number
and has nothing left in front of it. It refuses to know which is faster where.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu.kernels.merge_attended import merge_attended
from gpu.memory.demand import PIECE_TOKENS
from gpu.prefill.attention import Whole, prefill_attention
from gpu.prefill.query import Attended

LEAST_QUERIES = 256  # of a padded chunk; shorter ones are launches, not work


def cut_past(num_tokens: int) -> list[range]:
    """Pieces of `[0, num_tokens)`, the longest in front; up to PIECE_TOKENS - 1 are left over at the end."""
    pieces, begin = [], 0
    while num_tokens - begin >= PIECE_TOKENS:
        length = 1 << ((num_tokens - begin).bit_length() - 1)
        pieces.append(range(begin, begin + length))
        begin += length
    return pieces


def padded_queries(num_queries: int) -> int:
    """The next power of two, LEAST_QUERIES or more."""
    return max(LEAST_QUERIES, 1 << (num_queries - 1).bit_length())


def attend_in_pieces(query: Tensor, keys: Tensor, values: Tensor, scale: float, kernel: Whole) -> Attended:
    """As `gpu.prefill.attention.prefill_attention`, which gets what is left, by `kernel`. On CUDA in half precision, of
    a past of PIECE_TOKENS or more. Raises RuntimeError where cuDNN has no plan.
    """
    tokens = query.shape[0]
    pieces = cut_past(keys.shape[1] - tokens)
    more = padded_queries(tokens) - tokens
    padded = F.pad(query, (0, 0, 0, 0, 0, more)) if more else query
    sides = [
        cudnn_attention(padded, keys[:, piece.start : piece.stop], values[:, piece.start : piece.stop], False, scale)
        for piece in pieces
    ]
    end = pieces[-1].stop
    if not more and keys.shape[1] - end == tokens:
        own = cudnn_attention(query, keys[:, end:], values[:, end:], True, scale)
    else:
        own = prefill_attention(query, keys[:, end:], values[:, end:], scale, kernel)
    outs = [*(side.out[:tokens] for side in sides), own.out]
    lses = [*(side.partial_lse[:tokens] for side in sides), own.partial_lse]
    return Attended(*merge_attended(outs, lses, query.dtype))


def cudnn_attention(query: Tensor, keys: Tensor, values: Tensor, is_causal: bool, scale: float) -> Attended:
    """Queries `[tokens, heads, dim]` to all keys `[kv_heads, context, dim]`, or causal to as many, by cuDNN, which
    has a plan for each shape in each thread. Raises RuntimeError where it has none.
    """
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query.transpose(0, 1).unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), None, True, 0.0, is_causal, False,
        scale=scale,
    )  # fmt: skip
    return Attended(out[0].transpose(0, 1), lse[0].view(lse.shape[1:3]).transpose(0, 1))

"""Attend densely in prefill, for profiles without a prefill method: each query attends exactly to its whole past.

Short prompts are packed into one launch (`unit_attention`), and other methods fall back on this one. The kernel depends
on the numbers of queries and keys and on what was measured at start.
"""

import logging

import torch
from torch import Tensor

from gpu.attention.prefill_attention import Whole, default_kernel, has_flash, prefill_attention, scattered_attention
from gpu.attention.prefill_query import Attended, PrefillQuery
from gpu.methods.prefill_side import PrefillSide
from gpu.prefill.choice import KernelChoice, choose_kernel
from gpu.prefill.past_attention import (
    attend_in_pieces,
    attend_in_square,
    compile_merges,
    key_seconds,
    longest_piece,
)
from transfer.measured import keep_measured, measured_path

log = logging.getLogger(__name__)


class Dense(PrefillSide):
    """Dense attention, which keeps no state between units. A unit may end anywhere.

    choice: the fastest kernels on this machine; None: not measured. limits_prefill_blocks: whether rows of the other
    lane wait for the host now; then each block of a kernel keeps to the limit of `bound_blocks`.
    """

    def __init__(self) -> None:
        self.choice: KernelChoice | None = None
        self.limits_prefill_blocks = False
        self.longest_piece: int | None = None
        self._key_seconds: float | None = None

    def choose(self, keys: Tensor, values: Tensor, num_heads: int, chunk_tokens: int) -> None:
        """Measure which kernel is fastest if there is a choice, and store the result for `tandem doctor`; see
        `choose_kernel`.
        """
        if not has_flash(keys):
            return
        self.choice = choice = choose_kernel(keys, values, num_heads, chunk_tokens)
        compile_merges(num_heads, keys.shape[2], keys.dtype, keys.device)
        flop_s = 1e12 * choice.tflop_s[choice.kernel(chunk_tokens, keys.shape[1])]
        num_sms = torch.cuda.get_device_properties(keys.device).multi_processor_count
        self._key_seconds = key_seconds(flop_s, keys.shape[2], num_sms)
        of = {
            "gpu": torch.cuda.get_device_name(keys.device),
            "torch": str(torch.__version__),
            "heads": num_heads,
            "kv_heads": keys.shape[0],
            "dim": keys.shape[2],
            "dtype": str(keys.dtype).removeprefix("torch."),
        }
        log.info("prefill_attention choice=%s of=%s", choice.as_row(), of)
        keep_measured(measured_path(), "prefill_attention", of, choice.as_row())

    def bound_blocks(self, seconds: float) -> None:
        """Limit the keys that one block of a prefill kernel reads while decode rows wait.

        The limit is what a block reads in so many seconds by measured rates, but at least a few thousand keys. seconds
        0: no limit.
        """
        if seconds and self._key_seconds is not None:
            self.longest_piece = longest_piece(seconds, self._key_seconds)
            log.info("prefill_attention longest_piece=%d block_us=%.0f", self.longest_piece, 1e6 * seconds)

    def is_faster_alone(self, num_queries: int, past: int) -> bool:
        return self.choice is not None and self.choice.is_square(num_queries, past)

    @property
    def packed_kernel(self) -> Whole:
        return "flash3" if self.choice is not None and self.choice.whole == "flash3" else "flash"

    def attend(self, query: PrefillQuery) -> Attended:
        if query.begin is None:
            return scattered_attention(query.query, query.keys, query.values, query.positions, query.scale, None)
        tokens = query.query.shape[0]
        end = query.begin + tokens
        keys, values = query.keys[:, :end], query.values[:, :end]
        if self.choice is None:
            return prefill_attention(query.query, keys, values, query.scale, default_kernel(query.query))
        kernel, whole = self.choice.kernel(tokens, query.begin), self.choice.whole
        most = self.longest_piece if self.limits_prefill_blocks else None
        if self.choice.is_square(tokens, query.begin) and (most is None or end <= most):
            return attend_in_square(query.query, keys, values, query.scale)
        if kernel == "cudnn" or (most is not None and query.begin > most):
            return attend_in_pieces(query.query, keys, values, query.scale, whole, kernel, most)
        return prefill_attention(query.query, keys, values, query.scale, whole)

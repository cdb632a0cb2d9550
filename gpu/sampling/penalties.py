"""Count the tokens that a sequence holds, on the device, for repetition, presence and frequency penalties.

Memory for all sequences (5 bytes a vocabulary entry) is kept from the start, because steps in flight read it. After
`count`, the table equals a recount of prompt and output. It is updated from tokens on the device, so the host may run
ahead.
"""

import numpy as np
import torch

from gpu.sampling.sampling_arrays import penalty_arrays
from gpu.upload import upload
from transfer.allocation import allocate_all


class PenaltyTable:
    """Counts of all sequences' tokens: `in_prompt` bool, `counts` int32 of the output, both `[rows, vocab]`."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        made = allocate_all(penalty_arrays(num_rows, vocab_size), device)
        self.counts, self.in_prompt = made["counts"], made["in_prompt"]
        self._free = list(range(num_rows))

    def add(self, prompt_ids: np.ndarray, output_ids: np.ndarray) -> int:
        """Add a row for a sequence; int32 `[tokens]` each."""
        row = self._free.pop()
        self.in_prompt[row].zero_().index_fill_(0, upload(prompt_ids.astype(np.int64), self.device), True)
        ids = upload(output_ids.astype(np.int64), self.device)
        self.counts[row].zero_().scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
        return row

    def remove(self, row: int) -> None:
        """Free a row. Its content is cleared when it is given out again."""
        self._free.append(row)

    def apply(self, scores: torch.Tensor, rows: torch.Tensor, settings: torch.Tensor) -> torch.Tensor:
        """Return penalised copies of `scores` float32 `[rows, vocab]`.

        `settings` float32 `[3, rows]`: repetition (over prompt and output: positive scores are divided by it, negative
        ones multiplied), then presence and frequency (over the output alone: subtracted, once and per occurrence).
        """
        repetition, presence, frequency = settings[:, :, None]
        counts = self.counts.index_select(0, rows)
        present = counts > 0
        seen = self.in_prompt.index_select(0, rows) | present
        repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
        return torch.where(seen, repeated, scores) - frequency * counts - presence * present

    def count(self, rows: torch.Tensor, token_ids: torch.Tensor, stands: torch.Tensor | None = None) -> None:
        """Count a token, drawn or of a run, in each of `rows`; all arguments are int64 `[rows]`.

        stands: 1, or 0 for a token that is void after all; None: all count.
        """
        amounts = torch.ones_like(token_ids) if stands is None else stands
        self.counts.view(-1).scatter_add_(0, rows * self.vocab_size + token_ids, amounts.int())

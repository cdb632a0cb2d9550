"""Compute the outputs of a finished prefill job: logits to draw from, logprobs of prompts, and pooled vectors.

A prompt's results depend on its own hidden states alone, and where units of logits are cut changes no bit of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpu.layers.decoder import Decoder
from gpu.pooling import Pooling
from gpu.prefill.job_state import JobState
from gpu.prefill.row_sizes import pad_indices
from gpu.prefill.scored_rows import cut_rows
from gpu.sampling.logprobs import Logprobs, gather_logprobs, join_logprobs, to_pinned
from gpu.sampling.sampler import Drawing
from gpu.step import LogitsUnit
from gpu.upload import upload

POOLED_TOKENS = 2048  # tokens that are normed at once for a mean


@dataclass(slots=True)
class FinishedJob:
    """The results of a job: the next tokens of its prompts, in order, and what some requests asked for, by slot.

    prompt_logprobs: of prompts that are scored; row i belongs to prompt token `i + 1`. pooled: float32 vectors
        (`gpu.pooling`).
    """

    drawing: Drawing
    prompt_logprobs: dict[int, Logprobs]
    pooled: dict[int, Tensor]

    def copy_to_host(self) -> None:
        """Start the copies of all results to the host, on the current stream."""
        self.drawing.copy_to_host()
        self.prompt_logprobs = {slot: logprobs.copy_to_host() for slot, logprobs in self.prompt_logprobs.items()}
        self.pooled = {slot: to_pinned(vector) for slot, vector in self.pooled.items()}


def score_tokens(decoder: Decoder, state: JobState, unit: LogitsUnit) -> None:
    """Compute the logprobs of a unit's tokens, prompt by prompt, and append them to `state.scored`."""
    assert state.hidden is not None
    first = 0
    for prompt, offset in zip(state.job.prompts, state.offsets, strict=False):
        begin, end = max(unit.begin - first, 0), min(unit.end - first, prompt.num_scored_tokens)
        first += prompt.num_scored_tokens
        if begin >= end:
            continue
        assert prompt.begin == 0, "prompt logprobs need every prompt token's hidden state; begin at 0"
        hidden = state.hidden[offset : offset + prompt.num_scored_tokens]
        token_ids = state.token_ids[offset + 1 : offset + 1 + prompt.num_scored_tokens]
        num_top = prompt.sampling.num_prompt_logprobs
        assert num_top is not None
        for rows in cut_rows(begin, end, prompt.num_scored_tokens):
            logits = decoder.projections.logits(hidden[rows.computed])[rows.wanted]
            state.scored[prompt.slot].append(gather_logprobs(logits, token_ids[rows.reported], num_top))


def finish_job(decoder: Decoder, state: JobState, row_sizes: Sequence[int]) -> FinishedJob:
    """Compute the results of a job whose layers are done. Nothing is drawn yet. row_sizes: see `pad_indices`."""
    prompts, hidden = state.job.prompts, state.hidden
    assert hidden is not None
    last_rows = upload(pad_indices([offset - 1 for offset in state.offsets[1:]], row_sizes), decoder.pool.device)
    logits = decoder.projections.logits(hidden.index_select(0, last_rows))[: len(prompts)]
    scored = {slot: join_logprobs(pieces) for slot, pieces in state.scored.items()}
    drawing = Drawing(logits, [prompt.slot for prompt in prompts], [prompt.samples for prompt in prompts])
    return FinishedJob(drawing, scored, _pool(decoder, state, hidden, logits))


def _pool(decoder: Decoder, state: JobState, hidden: Tensor, logits: Tensor) -> dict[int, Tensor]:
    """Return the pooled vectors by slot. hidden: of all tokens of the job. logits: of each prompt's last token."""
    pooled = {}
    for row, prompt in enumerate(state.job.prompts):
        begin, end = state.offsets[row], state.offsets[row + 1]
        match prompt.pooling:
            case None:
                continue
            case Pooling(kind="logits", token_ids=token_ids):
                wanted = upload(np.array(token_ids, dtype=np.int64), decoder.pool.device)
                pooled[prompt.slot] = logits[row].index_select(0, wanted)
            case Pooling(kind="last"):
                pooled[prompt.slot] = decoder.projections.final_norm(hidden[end - 1 : end])[0].float()
            case _:
                assert prompt.begin == 0, "the mean needs every prompt token's hidden state; begin at 0"
                blocks = hidden[begin:end].split(POOLED_TOKENS)
                sums = [decoder.projections.final_norm(block).sum(0, dtype=torch.float32) for block in blocks]
                pooled[prompt.slot] = torch.stack(sums).sum(0) / (end - begin)
    return pooled

"""Add rows to a decode step for the tokens behind a slot's input token: known tokens, and drafts.

A slot's input token is in `last_tokens` at its slot; the caller gives the index from which the tokens behind it follow
in order. A profile drafts in steps of one token. Each draft step reads the token that the step before it drew, and
draws as the verifying step will. Draft steps write cells that the verifying step writes again, so nothing has to be
undone, and the host waits for none of them.
"""

from collections.abc import Callable, Sequence
from itertools import chain, islice

import numpy as np
import torch
from torch import Tensor

from gpu.decode.steps import Batch, LaunchedStep
from gpu.methods.device_side import RingSide
from gpu.sampling.sampler import Sampler
from gpu.step import TO_DRAFT, DecodeGroup
from gpu.upload import upload


class Followers:
    """Adds rows for known tokens and drafts to a batch, and draws the drafts.

    step: computes a batch. last_tokens: see `gpu.decode.loop.LayerLoop`. sides: of methods with rings. guess: returns
    the logits of the tokens that the checkpoint's draft head guesses after a batch whose slots hold no drafting ring.
    """

    def __init__(
        self, step: Callable[[Batch], LaunchedStep], sampler: Sampler, last_tokens: Tensor, sides: Sequence[RingSide],
        guess: Callable[[Batch], Tensor],
    ) -> None:  # fmt: skip
        self._step = step
        self._sampler = sampler
        self._last_tokens = last_tokens
        self._sides = sides
        self._guess = guess

    def add_rows(self, batch: Batch, group: DecodeGroup, first: int) -> Batch:
        """Return the batch with a row more for each token of a run or a draft. batch: the first row of each slot.

        The ids of these tokens are written to `last_tokens` from index `first` on.
        """
        drafts = group.drafts or [()] * len(group.slots)
        followers, most = group.followers, (len(self._last_tokens) - 1) // 3
        token_ids = [*chain.from_iterable(followers)]
        rows = len(batch) + len(token_ids)
        assert rows <= most, f"runner: a step of {rows} rows; have {most}"
        self._last_tokens[first : first + len(token_ids)].copy_(upload(np.array(token_ids, np.int64), self._device))
        places = iter(range(first, first + len(token_ids)))
        spread = [(row, step) for row, tokens in enumerate(followers) for step in range(1 + len(tokens))]
        return Batch(
            [batch.slots[row] for row, _ in spread],
            [batch.positions[row] + step for row, step in spread],
            [batch.host_reads[row] for row, _ in spread],
            batch.reuses,
            [next(places) if step else batch.slots[row] for row, step in spread],
            batch.has_host_reads,
            [step > len(followers[row]) - len(drafts[row]) for row, step in spread],
        )

    def draft(self, batch: Batch, whole: Batch, group: DecodeGroup) -> tuple[list[LaunchedStep], Tensor | None]:
        """Draft the tokens that are marked TO_DRAFT. batch: the first row of each slot.

        whole: the batch with all rows.

        Returns the launched steps, and the tokens of all drafts of the group in order, int64. Returns no steps and None
        if there is nothing to draft.
        """
        drafting = [row for row, draft in enumerate(group.drafts or ()) if TO_DRAFT in draft]
        if not drafting:
            return [], None
        places = _places_of_drafts(whole, group)
        found = {row: next((one for one in self._sides if group.slots[row] in one.resting), None) for row in drafting}
        sides = {row: side for row, side in found.items() if side is not None}
        for row, side in sides.items():
            side.wake(group.slots[row])
        launched: list[LaunchedStep] = []

        def compute(own: Batch) -> Tensor:
            launched.append(self._step(own))
            return launched[-1].logits

        try:
            for rows, guess in (([*sides], compute), ([row for row in drafting if row not in sides], self._guess)):
                self._draw(batch, rows, guess, group.samples, places)
        finally:
            for row, side in sides.items():
                side.rest(group.slots[row])
        return launched, self._last_tokens[self._upload([*chain.from_iterable(places)])]

    def _draw(
        self, batch: Batch, rows: Sequence[int], guess: Callable[[Batch], Tensor], samples: Sequence[int],
        places: Sequence[Sequence[int]],
    ) -> None:  # fmt: skip
        """Draw the drafts of these rows, one token of each row per step."""
        for step in range(max((len(places[row]) for row in rows), default=0)):
            going_on = [row for row in rows if step < len(places[row])]
            logits = guess(_drafting_rows(batch, going_on, step, places))
            slots, numbers = [batch.slots[row] for row in going_on], [samples[row] + step for row in going_on]
            tokens = self._sampler.guess(logits, slots, numbers)
            self._last_tokens.index_copy_(0, self._upload([places[row][step] for row in going_on]), tokens)

    @property
    def _device(self) -> torch.device:
        return self._last_tokens.device

    def _upload(self, places: Sequence[int]) -> Tensor:
        return upload(np.array(places, np.int64), self._device)


def _drafting_rows(batch: Batch, rows: Sequence[int], step: int, places: Sequence[Sequence[int]]) -> Batch:
    """Return the rows that draft token number `step` of their drafts."""
    return Batch(
        [batch.slots[row] for row in rows],
        [batch.positions[row] + step for row in rows],
        [batch.host_reads[row] for row in rows],
        True,
        [places[row][step - 1] if step else batch.slots[row] for row in rows],
        batch.has_host_reads,
        [step > 0 for _ in rows],
    )


def _places_of_drafts(whole: Batch, group: DecodeGroup) -> list[list[int]]:
    """Return the indices in `last_tokens` of the tokens of each slot's draft."""
    places = iter(whole.places)
    of_slots = [[*islice(places, length)] for length in group.lengths]
    return [own[len(own) - len(draft) :] for own, draft in zip(of_slots, group.drafts or (), strict=True)]

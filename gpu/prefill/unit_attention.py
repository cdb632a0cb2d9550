"""Attend for a prefill unit in one layer: select keys and values, call the method, and show the queries to other
methods.

A prompt's queries get the same result as if the prompt were alone. Methods that reuse what queries read see a prompt's
queries in order.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from gpu.attention.prefill_attention import (
    Packing,
    default_kernel,
    has_flash,
    packed_prefill_attention,
    past_attention,
    prefill_attention,
    scattered_attention,
    windowed_attention,
)
from gpu.attention.prefill_query import Attended, PrefillQuery, joined
from gpu.host.gathered import GatheredKv
from gpu.layers.decoder import Decoder
from gpu.layers.latent import LatentLayers
from gpu.methods.device_side import RingSide
from gpu.methods.prefill_side import PrefillSide
from gpu.prefill.job_state import JobState, PackedTokens, PromptPart
from gpu.prefill.prefill_arrays import EXPANDED_TOKENS
from gpu.step import DENSE, PrefillPrompt, PrefillUnit
from gpu.upload import upload
from transfer.partial import merge

MOST_PACKED_TOKENS = 16_384  # of all contexts in one launch; a longer context is worth a launch of its own


class UnitAttention:
    """Attention of prefill units.

    sides: prefill methods by the name that units use, `DENSE` among them.
    reusing: methods that observe the prompts of slots that hold one of their rings.
    gathered: buffer to which rows of pages are copied.
    """

    def __init__(
        self, decoder: Decoder, gathered: GatheredKv, sides: Mapping[str, PrefillSide], reusing: Sequence[RingSide]
    ) -> None:
        self.sides = sides
        self.reusing = reusing
        """Sees what a prompt that is alone in its unit attends to, in each layer that attends to everything."""
        self._decoder = decoder
        self._gathered = gathered
        self._device = gathered.pool.device
        self._most_packed_tokens = min(MOST_PACKED_TOKENS, gathered.pool.max_pages * gathered.pool.page_tokens)

    def sees(self, slot: int) -> bool:
        """Return whether a method that observes queries holds a ring of the slot."""
        return any(method.sees_prompts and method.has_ring(slot) for method in self.reusing)

    def attend(
        self, state: JobState, unit: PrefillUnit, parts: Sequence[PromptPart], query: Tensor, pre_rope_query: Tensor
    ) -> Attended:
        """Attend for a unit whose keys and values are written; all `[tokens, heads, dim]`.

        parts: the tokens whose queries these are: all of the unit, or with the dense method the last ones of some of
        its prompts. Attention to latents is always dense.
        """
        latent = self._decoder.latent
        if latent is not None:
            attended = []
            for part, own in _with_rows(parts):
                rows, _ = self._keys_and_values(state, part.prompt, unit.layer, part.context)
                attended.append(attend_to_latents(latent, unit.layer, query[own], rows[0]))
            return joined(attended)
        if state.job.is_scattered(unit.layer):
            return self._attend_scattered(state, unit, query, pre_rope_query)
        return self._attend_packed(state, unit, parts, query, pre_rope_query)

    def whole(self, state: JobState, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all tokens of the job's only prompt, as they are now."""
        self._gathered.forget()
        prompt = state.job.prompts[0]
        return self._keys_and_values(state, prompt, layer, len(prompt.token_ids))

    def _attend_scattered(self, state: JobState, unit: PrefillUnit, query: Tensor, pre_rope_query: Tensor) -> Attended:
        """Attend densely for a unit whose tokens are scattered over the prompt."""
        keys, values = self.whole(state, unit.layer)
        positions, window = state.positions[unit.begin : unit.end], self._decoder.specs[unit.layer].window_tokens
        num_tokens, scale = keys.shape[1], self._decoder.scale
        prefill_query = PrefillQuery(
            unit.layer, query, pre_rope_query, keys, values, positions, None, num_tokens, scale, None
        )  # fmt: skip
        if window is None:
            self._show_tail(state, unit, prefill_query)
        return scattered_attention(query, keys, values, positions, scale, window)

    def _show_tail(self, state: JobState, unit: PrefillUnit, prefill_query: PrefillQuery) -> None:
        """Show a prompt's last queries, in order, to the methods in whose rings its slot takes part."""
        num_own, slot = state.num_of_tail(unit), state.job.prompts[0].slot
        if not num_own or not self.sees(slot):
            return
        end = prefill_query.num_prompt_tokens - (state.offsets[-1] - unit.end)
        own = slice(len(prefill_query.query) - num_own, None)
        tail = replace(
            prefill_query,
            query=prefill_query.query[own],
            pre_rope_query=prefill_query.pre_rope_query[own],
            keys=prefill_query.keys[:, :end],
            values=prefill_query.values[:, :end],
            positions=prefill_query.positions[own],
            begin=end - num_own,
        )
        self._show(tail, slot)

    def _attend_packed(
        self, state: JobState, unit: PrefillUnit, parts: Sequence[PromptPart], query: Tensor, pre_rope_query: Tensor
    ) -> Attended:
        """Attend for a packed prefill chunk: all prompts in one launch, or prompt by prompt; all `[tokens, heads,
        dim]`.
        """
        window = self._decoder.specs[unit.layer].window_tokens
        is_packed = (unit.method == DENSE or window is not None) and len(parts) > 1 and has_flash(query)
        if is_packed and window is None:
            dense = self.sides[DENSE]
            is_packed = not any(dense.is_faster_alone(part.num_tokens, part.past) for part in parts)
        if is_packed and sum(part.context for part in parts) <= self._most_packed_tokens:
            packed = self._pack(state, unit, parts)
            keys, values = self._gathered.pack(unit.layer, packed.rows)
            kernel = self.sides[DENSE].packed_kernel
            packed_attended = packed_prefill_attention(
                query, keys, values, packed.packing, self._decoder.scale, window, kernel
            )
            for part, own in _with_rows(parts) if window is None else ():
                if self.sees(part.prompt.slot):
                    self._show(self._query_of(state, unit, part, query[own], pre_rope_query[own]), part.prompt.slot)
            return packed_attended
        return joined(
            [self._attend_part(state, unit, part, query[own], pre_rope_query[own]) for part, own in _with_rows(parts)]
        )

    def _attend_part(
        self, state: JobState, unit: PrefillUnit, part: PromptPart, query: Tensor, pre_rope_query: Tensor
    ) -> Attended:
        """Attend for one prompt's part of a unit by the unit's method. query, pre_rope_query: of the part."""
        side, prompt = self.sides[unit.method], part.prompt
        num_prompt_tokens = len(prompt.token_ids)
        window = self._decoder.specs[unit.layer].window_tokens
        if window is not None:  # methods take no part in such a layer
            keys, values = self._keys_and_values(state, prompt, unit.layer, part.context)
            return windowed_attention(query, keys, values, window, self._decoder.scale)
        begin = part.past
        keeps_state = unit.method != DENSE  # a dense prompt may have begun packed with others, and needs no state
        if keeps_state and begin == prompt.begin:
            state.method_states[prompt.slot] = side.make_state(unit.layer, begin, num_prompt_tokens)
        prefill_query = self._query_of(state, unit, part, query, pre_rope_query)
        attended = side.attend(replace(prefill_query, state=state.method_states[prompt.slot] if keeps_state else None))
        self._show(prefill_query, prompt.slot)
        if keeps_state and part.context == num_prompt_tokens:
            del state.method_states[prompt.slot]
        return attended

    def _show(self, query: PrefillQuery, slot: int) -> None:
        """Show queries to the methods that will reuse what similar queries read."""
        for method in self.reusing:
            if method.sees_prompts and method.has_ring(slot):
                method.see_prompt(slot, query, self.sides[DENSE].attend)

    def _query_of(
        self, state: JobState, unit: PrefillUnit, part: PromptPart, query: Tensor, pre_rope_query: Tensor
    ) -> PrefillQuery:
        """Return one prompt's part of a unit as a PrefillQuery. query, pre_rope_query: of the part."""
        keys, values = self._keys_and_values(state, part.prompt, unit.layer, part.context)
        return PrefillQuery(
            layer=unit.layer,
            query=query,
            pre_rope_query=pre_rope_query,
            keys=keys,
            values=values,
            positions=state.positions[part.begin : part.end],
            begin=part.past,
            num_prompt_tokens=len(part.prompt.token_ids),
            scale=self._decoder.scale,
            state=None,
        )

    def _pack(self, state: JobState, unit: PrefillUnit, parts: Sequence[PromptPart]) -> PackedTokens:
        """Return the packing of a unit's tokens. Consecutive layers of the same tokens share it."""
        known, num_queries = state.packed, sum(part.num_tokens for part in parts)
        if known is not None and (known.begin, known.end, known.num_queries) == (unit.begin, unit.end, num_queries):
            return known
        begins = np.array([[0, 0], *((part.num_tokens, part.context) for part in parts)], np.int32)
        most_queries, most_keys = begins.max(0).tolist()
        most_queries = max(most_queries, 2)  # for 1, FlashAttention 2 has another path and layout of the lse
        query_begins, key_begins = upload(begins.cumsum(0, dtype=np.int32).T.copy(), self._device).unbind(0)
        tokens = (
            [np.full(part.context, part.prompt.slot) for part in parts],
            [np.arange(part.context) for part in parts],
        )
        slots, positions = upload(np.stack([np.concatenate(one) for one in tokens]), self._device).unbind(0)
        packing = Packing(query_begins, key_begins, most_queries, most_keys)
        rows = self._gathered.rows_of(slots, positions)
        state.packed = PackedTokens(unit.begin, unit.end, packing, rows, num_queries)
        return state.packed

    def _keys_and_values(self, state: JobState, prompt: PrefillPrompt, layer: int, end: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values `[kv_heads, end, dim]` of a prompt's tokens `[0, end)`, from staging or from
        pages.
        """
        place = state.staged.place(layer) if state.staged is not None else None
        if state.staged is None or place is None:
            return self._gathered.gather(state.job.job_id, prompt.slot, layer, end)
        keys, values = state.staged.staging.buffer(place)
        return keys[:, :end], values[:, :end]


def _with_rows(parts: Sequence[PromptPart]) -> Iterator[tuple[PromptPart, slice]]:
    """Yield each part with its rows among those of all parts."""
    end = 0
    for part in parts:
        begin, end = end, end + part.num_tokens
        yield part, slice(begin, end)


def attend_to_latents(latent: LatentLayers, layer: int, query: Tensor, rows: Tensor) -> Attended:
    """Attend causally to all latent rows of a context, for its last queries.

    query: `[tokens, heads, query_dim]`, after RoPE. rows: `[context, rank + rotated]`. Returns out `[tokens, heads,
    value]` and lse float32 `[tokens, heads]`.
    """
    shape, past = latent.shape, len(rows) - len(query)
    query = F.pad(query, (0, max(0, shape.value - shape.query_dim)))
    kernel = default_kernel(query)
    merged = prefill_attention(query, *latent.expand(layer, rows[past:]), shape.scale, kernel)
    for begin in range(0, past, EXPANDED_TOKENS):
        keys, values = latent.expand(layer, rows[begin : min(begin + EXPANDED_TOKENS, past)])
        piece = merge(merged.partial(), past_attention(query, keys, values, shape.scale, kernel).partial())
        merged = Attended(piece.out, piece.lse)
    return Attended(merged.out[..., : shape.value], merged.lse)

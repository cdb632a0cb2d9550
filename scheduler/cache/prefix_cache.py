"""Find which prefix of a prompt is cached or being computed, and publish the blocks that a plan computes.

A block's hash covers all tokens to its end and is seeded with the model, the profile and the salt, so KV computed in
another way is never shared. If a profile computes KV in aligned blocks, a prefix ends at such a border, and a prompt's
last block is never published. Of a prompt with document chunks, only the text before the first chunk is published. If
layers have windows, a prefix ends where a window is kept. Invariant: a published block's page holds final keys and
values once every launched plan is carried out, and they depend only on the tokens up to the block's end.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from hashlib import blake2b

import numpy as np

from gpu.profiles import Profile
from scheduler.cache.page_pool import PagePool
from scheduler.cache.window_pool import Windows
from scheduler.sequences.sequence import Sequence

_NO_END = 1 << 62
_BLOCKS_AT_ONCE = 64  # hashed between two rests: a tenth of a millisecond


class PrefixCache:
    """Full KV blocks by the hash of their prefix. model_key: names the model in hashes. Profiles with the same `kv_key`
    share blocks.
    """

    def __init__(self, pages: PagePool, windows: Windows, page_tokens: int, enabled: bool, model_key: bytes) -> None:
        self._pages = pages
        self._windows = windows
        self._page_tokens = page_tokens
        self.is_enabled = enabled
        self._model_key = model_key
        self._computing: dict[bytes, Sequence] = {}

    # --- hashes -------------------------------------------------------------------------------------------------------

    def hash_prompt(self, prompt: np.ndarray, profile: Profile, salt: str, rest: Callable[[], None]) -> list[bytes]:
        """Return the hashes of the prompt's full blocks, int32 `[tokens]`. Any thread may call.

        `rest` is called after every 64 blocks.
        """
        hashes: list[bytes] = []
        if self.is_enabled:
            seed = self._seed_of(profile, salt)
            size = _BLOCKS_AT_ONCE * self._page_tokens
            for begin in range(0, len(prompt), size):
                extend_hashes(hashes, prompt[begin : begin + size], self._page_tokens, seed)
                rest()
        return hashes

    def known_hashes(self, sequence: Sequence) -> list[bytes]:
        """Return the hashes of all full blocks of the tokens known so far."""
        if self.is_enabled and len(sequence.hashes) < sequence.num_tokens // self._page_tokens:
            seed = self._seed_of(sequence.profile, sequence.request.prefix_salt)
            unhashed = sequence.tokens_from(len(sequence.hashes) * self._page_tokens)
            extend_hashes(sequence.hashes, unhashed, self._page_tokens, seed)
        return sequence.hashes

    def _seed_of(self, profile: Profile, salt: str) -> bytes:
        """Return the seed of hashes: requests with different salts find nothing of each other.

        It is a digest, since a seed has at most 64 bytes while model key and profile key may have any length.
        """
        seed = blake2b(self._model_key + profile.kv_key.encode(), digest_size=32).digest()
        return blake2b(salt.encode(), key=seed, digest_size=32).digest() if salt else seed

    def await_blocks(self, sequence: Sequence) -> None:
        """Note which blocks of a waiting sequence can be reused if they are cached."""
        self.known_hashes(sequence)
        is_used = self.is_enabled and not sequence.needs_every_token
        sequence.num_usable_blocks = (sequence.num_tokens - 1) // self._page_tokens if is_used else 0
        align = sequence.profile.align_tokens
        sequence.border_blocks = math.lcm(align, self._page_tokens) // self._page_tokens
        end = _NO_END if align == 1 else (sequence.num_tokens - 1) // align * align
        if sequence.chunks:  # after the first chunk, keys and values differ from those of plain prefill
            end = min(end, sequence.chunks[0].begin)
            sequence.num_usable_blocks = min(sequence.num_usable_blocks, end // self._page_tokens)
        sequence.num_final_blocks = end // self._page_tokens
        sequence.num_known_blocks = sequence.num_held_blocks = sequence.num_seen_blocks = 0
        sequence.finds_live = False
        sequence.shares = None

    # --- what is known ------------------------------------------------------------------------------------------------

    def look(self, sequence: Sequence) -> Sequence | None:
        """Update the number of the sequence's known blocks: its first usable blocks that are published.

        Returns the sequence whose running prefill computes the next usable block, if there is one and this sequence
        can start after that block; else None.
        """
        hashes, end = sequence.hashes, sequence.num_usable_blocks
        known = self._pages.count_known(hashes, sequence.num_known_blocks, end)
        if sequence.live and self._look_for_live(sequence, known):
            return None
        sequence.num_seen_blocks = known // sequence.border_blocks * sequence.border_blocks
        sequence.num_known_blocks = self._windows.last_end(hashes, known, sequence.border_blocks)
        if self._windows.count:  # tokens after the last kept window are computed again, even if they are cached
            known = sequence.num_known_blocks
        other = self._computing.get(hashes[known]) if known < end and self._computing else None
        if other is None or not self._windows.count:
            return other
        return other if known < self._windows.first_end(other) <= self.count_shared(sequence, other) else None

    def _look_for_live(self, sequence: Sequence, num_known_blocks: int) -> bool:
        """Return whether all that a preempted sequence left still exists, so that it continues where it stopped."""
        is_there = num_known_blocks >= sequence.num_live_blocks and all(
            map(self._pages.is_known, self._live_pages(sequence))
        )
        sequence.finds_live = is_there and self._windows.has_live(sequence)
        if sequence.finds_live:
            sequence.num_known_blocks = sequence.num_seen_blocks = sequence.num_live_blocks
        return sequence.finds_live

    def _live_pages(self, sequence: Sequence) -> list[bytes]:
        """Return the names of the left pages that hold its tokens; the others were for drafted tokens, now rejected."""
        return sequence.live[: -(-sequence.num_live_tokens // self._page_tokens) - sequence.num_live_blocks]

    def begin_of(self, sequence: Sequence) -> int:
        """Count the sequence's first tokens that need not be computed, as of the last `look`."""
        return sequence.num_live_tokens if sequence.finds_live else sequence.num_known_blocks * self._page_tokens

    def count_held(self, sequence: Sequence) -> int:
        """Count the first of the sequence's known blocks whose pages are held."""
        near, known = sequence.num_held_blocks, sequence.num_known_blocks
        sequence.num_held_blocks = held = self._pages.count_held(sequence.hashes, min(near, known), known)
        return held

    def count_shared(self, sequence: Sequence, other: Sequence) -> int:
        """Count the first usable blocks that the other sequence's prompt has as well."""
        if sequence.shares is None or sequence.shares[0] is not other:
            end = min(sequence.num_usable_blocks, len(other.hashes))
            differs = bisect_left(range(end), True, key=lambda block: sequence.hashes[block] != other.hashes[block])
            sequence.shares = (other, differs)
        return sequence.shares[1]

    # --- what is being computed ---------------------------------------------------------------------------------------

    def start(self, sequence: Sequence, num_cached_tokens: int) -> None:
        """Start a prefill that computes the blocks after the first `num_cached_tokens` tokens."""
        sequence.num_published = num_cached_tokens // self._page_tokens
        if sequence.context is not None:
            return
        for digest in sequence.hashes[sequence.num_published : sequence.num_final_blocks]:
            self._computing.setdefault(digest, sequence)

    def stop(self, sequence: Sequence) -> None:
        """Stop a prefill that was dropped, or that is done and about to be published."""
        for digest in sequence.hashes[sequence.num_published :]:
            if self._computing.get(digest) is sequence:
                del self._computing[digest]

    # --- what is published --------------------------------------------------------------------------------------------

    def publish(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Publish the final blocks among a sequence's first `num_computed_tokens` tokens, once a plan computes them.

        For a context with offloaded tokens, `Residence.publish_run` does this instead.
        """
        end = min(num_computed_tokens // self._page_tokens, sequence.num_final_blocks)
        if end <= sequence.num_published or not self.is_enabled or not sequence.pages:
            return
        if sequence.open_context is not None:
            return
        self.describe(sequence, sequence.num_published, end)
        self._pages.publish(self.known_hashes(sequence), sequence.pages, sequence.num_published, end)
        sequence.num_published = end

    def describe(self, sequence: Sequence, begin: int, end: int) -> None:
        """Record the tokens of blocks `[begin, end)` for block events, if these are recorded."""
        events = self._pages.events
        if events is None or begin >= end:
            return
        tokens = sequence.tokens_from(begin * self._page_tokens)[: (end - begin) * self._page_tokens]
        request = sequence.request
        events.describe(self.known_hashes(sequence), begin, end, tokens, request.adapter, request.told_salt)

    def leave_live(self, sequence: Sequence) -> None:
        """Publish the pages of a sequence that is being preempted, so that it can continue where it stopped.

        Pages that are not full, or that end with tokens in flight, get names that only this sequence knows. Nothing is
        left if it would have to start elsewhere anyway.
        """
        num_tokens = sequence.next_position
        if not self.is_enabled or sequence.needs_every_token or sequence.profile.align_tokens > 1:
            return
        begin, end = num_tokens // self._page_tokens, -(-num_tokens // self._page_tokens)
        if sequence.num_drafted:  # all drafted tokens may be rejected
            begin = (num_tokens - sequence.num_drafted) // self._page_tokens
        begin = min(begin, len(self.known_hashes(sequence)), sequence.num_final_blocks)
        self.publish(sequence, begin * self._page_tokens)
        if begin == end:
            return  # all pages are full, and public
        names = [
            blake2b(f"{block} {sequence.request_id}".encode(), digest_size=16, person=b"live").digest()
            for block in range(begin, end)
        ]
        self._pages.publish([*sequence.hashes[:begin], *names], sequence.pages, begin, end)
        if self._pages.is_known(names[-1]):
            sequence.live, sequence.num_live_blocks, sequence.num_live_tokens = names, begin, num_tokens

    def take_live(self, sequence: Sequence) -> list[int]:
        """Hold and return the pages that a preempted sequence left for itself."""
        page_ids = list(map(self._pages.page_of, self._live_pages(sequence)))
        self._pages.hold(page_ids)
        return page_ids

    def forget_live(self, sequence: Sequence) -> None:
        """Forget what a preempted sequence left for itself, once it has started again or is cancelled."""
        if sequence.live:
            self._pages.retract(sequence.live[0])
            self._windows.forget_live(sequence)
        sequence.live, sequence.finds_live = [], False

    def retract(self, sequence: Sequence) -> None:
        """Withdraw all blocks of a context that gave no finite logits, whether the sequence holds them or not."""
        if sequence.hashes:
            self._pages.retract(sequence.hashes[0])
            self._windows.retract(sequence)


def extend_hashes(hashes: list[bytes], token_ids: np.ndarray, page_tokens: int, seed: bytes) -> None:
    """Append the hashes of the full blocks of `token_ids`, int32 `[tokens]`, which follow the tokens hashed already.

    Each hash covers all tokens to its end. seed: at most 64 bytes that name the model and how the KV is computed, so
    that other KV never matches.
    """
    block_bytes = page_tokens * token_ids.itemsize
    raw = token_ids.tobytes()
    last = hashes[-1] if hashes else seed
    for begin in range(0, len(raw) - block_bytes + 1, block_bytes):
        last = blake2b(raw[begin : begin + block_bytes], key=last, digest_size=16).digest()
        hashes.append(last)

"""Which prefixes are known, which are being computed, and by whom. Shares a sequence's full blocks by their hashes.

A block's hash covers all tokens to its end and is seeded with the model and with what produced the KV (prefill method
and decode profile), so approximate KV never serves a request that asked for another making. Invariant: a published
block's page holds final keys and values once every plan launched so far is carried out.
"""

from collections.abc import Mapping
from hashlib import blake2b

from scheduler.pages import PagePool, extend_hashes
from scheduler.sequence import Sequence


class PrefixCache:
    """`kv_keys` maps an attention profile to the name of what makes its KV; profiles of one name share blocks."""

    def __init__(
        self, pages: PagePool, page_tokens: int, enabled: bool, model_key: bytes, kv_keys: Mapping[str, str]
    ) -> None:
        self._pages = pages
        self._page_tokens = page_tokens
        self.is_enabled = enabled
        self._seeds = {profile: _seed(model_key, key) for profile, key in kv_keys.items()}
        self._computing: dict[bytes, Sequence] = {}
        self.queries_tokens = 0
        self.hits_tokens = 0

    def match(self, sequence: Sequence) -> tuple[list[int], bool]:
        """Pages of the longest known prefix, and whether the block after it is being computed by a prefill under way.

        A sequence's last token is always computed, for its logits; all are, when prompt logprobs are asked.
        """
        usable = self.usable_hashes(sequence)
        known = self._pages.match(usable)
        return known, len(known) < len(usable) and usable[len(known)] in self._computing

    def usable_hashes(self, sequence: Sequence) -> list[bytes]:
        """Of the blocks that need not be computed if they are known."""
        if not self.is_enabled:
            return []
        hashes = self.known_hashes(sequence)
        if sequence.request.sampling.num_prompt_logprobs is not None:
            return []
        return hashes[: (len(sequence.tokens) - 1) // self._page_tokens]

    def known_hashes(self, sequence: Sequence) -> list[bytes]:
        """Of all full blocks of the tokens known so far."""
        seed = _salted(self._seeds[sequence.request.attention_profile], sequence.request.cache_salt)
        extend_hashes(sequence.hashes, sequence.tokens, self._page_tokens, seed)
        return sequence.hashes

    def start(self, sequence: Sequence, num_cached_tokens: int) -> None:
        """The sequence's prefill begins: it computes the blocks after the first `num_cached_tokens` tokens.

        Nobody waits for a prompt that goes down: its pages do not hold its blocks in all layers.
        """
        sequence.num_published = num_cached_tokens // self._page_tokens
        if sequence.context is not None:
            return
        for digest in sequence.hashes[sequence.num_published :]:
            self._computing.setdefault(digest, sequence)

    def count(self, num_tokens: int, num_cached_tokens: int) -> None:
        self.queries_tokens += num_tokens
        self.hits_tokens += num_cached_tokens

    def stop(self, sequence: Sequence) -> None:
        """The sequence computes no blocks any more: its prefill is done, or dropped."""
        for digest in sequence.hashes:
            if self._computing.get(digest) is sequence:
                del self._computing[digest]

    def publish(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Make the sequence's full blocks among its first `num_computed_tokens` tokens findable."""
        end = num_computed_tokens // self._page_tokens
        if not self.is_enabled or not sequence.pages or end <= sequence.num_published:
            return
        hashes = self.known_hashes(sequence)
        for block in range(sequence.num_published, end):
            self._pages.publish(hashes[block], sequence.pages[block])
        sequence.num_published = end

    def retract(self, sequence: Sequence) -> None:
        """Its context gave no finite logits: none of its blocks is found any more, whether it holds them or not."""
        for digest in sequence.hashes:
            self._pages.retract(digest)


def _salted(seed: bytes, salt: str) -> bytes:
    """Requests of different salts find nothing of each other."""
    return blake2b(salt.encode(), key=seed, digest_size=32).digest() if salt else seed


def _seed(model_key: bytes, kv_key: str) -> bytes:
    """A key of a digest: of any length, where a hash's own key is limited to 64 bytes."""
    return blake2b(model_key + kv_key.encode(), digest_size=32).digest()

"""Counts of tokens on the device and in host memory, for statistics."""

from scheduler.residence.evictions import Evictor
from scheduler.residence.host_contexts import HostContexts


class ResidenceCounts:
    """Counts of resident, offloaded and evicted tokens. contexts, evictor: None if every context stays on the device;
    then all counts are 0.
    """

    def __init__(self, page_tokens: int, contexts: HostContexts | None, evictor: Evictor | None) -> None:
        self._page_tokens = page_tokens
        self._contexts = contexts
        self._evictor = evictor

    @property
    def num_promised_bytes(self) -> int:
        """Return the host memory that contexts use and may still take."""
        return 0 if self._contexts is None else self._contexts.used_bytes

    @property
    def num_offloaded_tokens(self) -> int:
        """Count the tokens in host memory, shared ones once."""
        return 0 if self._contexts is None else self._contexts.num_blocks * self._page_tokens

    @property
    def num_evicted_tokens(self) -> int:
        """Count the offloaded tokens of which the device keeps only the dense layers."""
        return 0 if self._contexts is None else self._contexts.num_evicted * self._page_tokens

    @property
    def num_reloaded_tokens(self) -> int:
        """Count the tokens reloaded since the start, shared ones once."""
        return 0 if self._evictor is None else self._evictor.num_reloaded * self._page_tokens

    @property
    def num_resident_tokens(self) -> int:
        """Count the tokens with pages of all layers in contexts that are offloaded in part.

        Sinks and windows are included, and shared tokens count once.
        """
        if self._contexts is None or self._evictor is None:
            return 0
        down = [context for context in self._contexts if context.num_blocks]
        pages = {page for context in down for page in context.sink_pages}
        for context in down:
            if (sequence := self._evictor.holders.get(context)) is not None:
                pages.update(sequence.pages[len(context.sink_pages) + context.num_blocks :])
        num_blocks = self._contexts.num_blocks - self._contexts.num_evicted
        return (len(pages) + num_blocks) * self._page_tokens

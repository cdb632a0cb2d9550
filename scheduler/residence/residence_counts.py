"""Counts of tokens on the device and in host memory, for statistics."""

from scheduler.residence.evictions import Frontier
from scheduler.residence.host_contexts import HostContexts


class ResidenceCounts:
    """`contexts`, `frontier`: None where every context stays on the device, and then all counts are 0."""

    def __init__(self, page_tokens: int, contexts: HostContexts | None, frontier: Frontier | None) -> None:
        self._page_tokens = page_tokens
        self._contexts = contexts
        self._frontier = frontier

    @property
    def num_promised_bytes(self) -> int:
        """Of host memory: what contexts have, and may have before anybody is asked again."""
        return 0 if self._contexts is None else self._contexts.used_bytes

    @property
    def num_deposited_tokens(self) -> int:
        """In host memory, what contexts share counted once."""
        return 0 if self._contexts is None else self._contexts.num_blocks * self._page_tokens

    @property
    def num_released_tokens(self) -> int:
        """Of those in host memory, what the device has of dense layers alone."""
        return 0 if self._contexts is None else self._contexts.num_released * self._page_tokens

    @property
    def num_restored_tokens(self) -> int:
        """That came back to the device, since the start; what contexts share counted once."""
        return 0 if self._frontier is None else self._frontier.num_restored * self._page_tokens

    @property
    def num_resident_tokens(self) -> int:
        """On the device in all layers, of contexts of which a part is in host memory: sinks and windows as well, and
        what they share counted once.
        """
        if self._contexts is None or self._frontier is None:
            return 0
        down = [context for context in self._contexts if context.num_blocks]
        pages = {page for context in down for page in context.sink_pages}
        for context in down:
            if (sequence := self._frontier.holders.get(context)) is not None:
                pages.update(sequence.pages[len(context.sink_pages) + context.num_blocks :])
        num_blocks = self._contexts.num_blocks - self._contexts.num_released
        return (len(pages) + num_blocks) * self._page_tokens

"""Track contexts in host memory: who holds them, which fork which, what they are charged, and which are dropped.

A context is a run of blocks (whole pages of tokens after the sink), all of them in host memory. Its first blocks are
evicted, and have only dense pages on the device. The others still have resident pages. A finished sequence's context
stays, idle, for prompts that begin with the same tokens. A context is charged the most memory that its own blocks may
take. At first that includes what it may grow to without asking again, later only what it has.

Invariants: charges never exceed the limit. A context outlives its forks. A context that is not held, has no forks and
cannot be found is closed. A block is found only if the one before it is. Forks have the pages of the blocks they share.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace

from scheduler.block_changes import CPU, GPU
from scheduler.cache.block_events import BlockEvents
from scheduler.cache.idle_pages import Ranks
from scheduler.cache.page_pool import PagePool
from scheduler.sequences.capacity import HostCapacity
from scheduler.sequences.offloaded_context import HostContext, RunSize, owner_of, root_of


class HostContexts:
    """The host contexts of an engine, and what each is charged.

    keeps_idle: whether a context outlives its sequence. ranks: the eviction order of owners. used_bytes: all charges.
    """

    def __init__(self, host: HostCapacity, pages: PagePool, keeps_idle: bool, ranks: Ranks) -> None:
        self.limit_bytes = host.limit_bytes
        self.used_bytes = 0
        self.events: BlockEvents | None = None  # records what can be found
        self._host = host
        self._pages = pages
        self._layout = host.layout
        self._keeps_idle = keeps_idle
        self._ranks = ranks
        self._contexts: dict[int, HostContext] = {}
        self._owners: dict[bytes, list[HostContext]] = {}
        self._next_id = 0
        self._uses = 0
        self.closed: list[int] = []  # of which the device has yet to hear

    def __len__(self) -> int:
        return len(self._contexts)

    def __iter__(self) -> Iterator[HostContext]:
        return iter(self._contexts.values())

    @property
    def num_held(self) -> int:
        return sum(context.is_held for context in self._contexts.values())

    @property
    def num_blocks(self) -> int:
        """Count the offloaded blocks, a shared one once."""
        return sum(context.num_own for context in self._contexts.values())

    @property
    def num_evicted(self) -> int:
        """Count the offloaded blocks without resident pages."""
        return sum(max(0, one.num_evicted - one.size.num_shared) for one in self._contexts.values())

    @property
    def num_resident(self) -> int:
        """Count the blocks whose pages could be evicted, a shared one once."""
        contexts = (one for one in self._contexts.values() if one.is_written)
        return sum(len(one.pages) - max(one.num_evicted, one.size.num_shared) for one in contexts)

    def find(self, hashes: list[bytes], begin: int, end: int) -> tuple[HostContext | None, int]:
        """Find a context with the longest run that begins with these blocks, and how many of them it has."""
        last = bisect_left(range(begin, end), True, key=lambda block: hashes[block] not in self._owners)
        return (self._owners[hashes[begin + last - 1]][0], last) if last else (None, 0)

    def owner(self, digest: bytes) -> HostContext | None:
        """Return a context whose run has this block and those before it, or None."""
        owners = self._owners.get(digest)
        return owners[0] if owners else None

    # --- holding ------------------------------------------------------------------------------------------------------

    def has_room(self, size: RunSize, parent: HostContext | None) -> bool:
        """Return whether `add` would find room if all idle contexts but `parent` and its ancestors were dropped."""
        return self._can_free(self._bytes_of(size), [parent])

    def add(self, size: RunSize, parent: HostContext | None) -> HostContext | None:
        """Add a held context, which shares its first blocks with a parent, if any; None if there is no room now."""
        if not self._make_room(self._bytes_of(size), [parent]):
            return None
        num_shared = size.num_shared
        shared = [] if parent is None else parent.pages[:num_shared]
        hashes = [] if parent is None else parent.hashes[:num_shared]
        num_evicted = 0 if parent is None else min(parent.num_evicted, num_shared)
        context = HostContext(
            self._next_id, parent, replace(size, num_blocks=num_shared), shared, num_evicted, num_shared, hashes
        )
        self._next_id += 1
        self._contexts[context.context_id] = context
        self._pages.hold(shared[num_evicted:])
        self._charge(context, size.num_blocks)
        self._use(context)
        if parent is not None:
            parent.num_forks += 1
            self._use(parent)
            self.keep_sink(context, parent.sink_pages)
        return context

    def keep_sink(self, context: HostContext, pages: list[int]) -> None:
        """Hold the sink's pages on the device as long as the context exists."""
        context.sink_pages = list(pages)
        self._pages.hold(context.sink_pages)

    def grow(self, context: HostContext, num_blocks: int) -> bool:
        """Charge the context for `num_blocks`, dropping idle contexts if needed; False if there is no room."""
        if num_blocks <= context.size.num_blocks:
            return True
        num_bytes = self._bytes_of(replace(context.size, num_blocks=num_blocks))
        if not self._make_room(num_bytes - context.charged_bytes, [context]):
            return False
        self._charge(context, num_blocks)
        return True

    def append(self, context: HostContext, page_ids: list[int]) -> None:
        """Append offloaded blocks to a context, which takes over their pages."""
        assert context.num_blocks + len(page_ids) <= context.size.num_blocks, "an offload is paid for before it is made"
        context.pages += page_ids

    def append_evicted(self, context: HostContext, num_blocks: int) -> None:
        """Append offloaded blocks without resident pages. There must be room for their dense pages."""
        assert context.num_blocks + num_blocks <= context.size.num_blocks, "an offload is paid for before it is made"
        assert context.num_resident == 0, "evicted blocks are in front"
        begin, end = context.num_own, context.num_own + num_blocks
        context.storage += self._pages.allocate(self._layout.blocks_for(end) - len(context.storage))
        context.pages += self._layout.dense_pages(context.storage, begin, end)
        context.num_evicted += num_blocks

    def sharers(self, context: HostContext, block: int) -> list[HostContext]:
        """Return all contexts that have this block of the run: its owner, and those that share it."""
        owner = owner_of(context, block)
        behind = [one for one in self._contexts.values() if block < one.num_blocks]
        return [one for one in behind if owner_of(one, block) is owner]

    def publish(self, context: HostContext, hashes: list[bytes]) -> None:
        """Publish the run's first blocks, which must be final, under these hashes."""
        if context.is_closed or not context.is_findable or not self._keeps_idle:
            return
        if self.events is not None:
            first = len(context.hashes)
            self.events.add(CPU, hashes[first:])
            self.events.add(GPU, hashes[max(first, context.num_evicted) :])
        for digest in hashes[len(context.hashes) :]:
            self._owners.setdefault(digest, []).append(context)
            context.hashes.append(digest)

    def release(self, context: HostContext, is_kept: bool) -> None:
        """Release a context whose sequence is done with it. is_kept: others may use its blocks."""
        context.is_held = False
        context.num_landed = context.num_blocks
        self._charge(context, context.num_blocks)
        self._use(context)
        hidden = [context]
        if not (is_kept and self._keeps_idle and context.is_open and context.num_own):
            hidden = self._hide(context)
        for one in hidden:
            self._close_unused(one)

    def discard(self, context: HostContext) -> None:
        """Hide a context and its forks from prompts, and close those that are not held; e.g. if its rows are wrong."""
        if not context.is_closed:
            for hidden in self._hide(context):
                self._close_unused(hidden)

    def retract(self, hashes: list[bytes]) -> None:
        """Hide every context that has a block with one of these hashes, with all its ancestors and forks."""
        owners = {context for digest in hashes for context in self._owners.get(digest, [])}
        for root in {root_of(context) for context in owners}:
            self._hide(root)
        for context in list(self._contexts.values()):
            self._close_unused(context)

    def num_pages_once_evicted(self, context: HostContext) -> int:
        """Return the pages that the context and its ancestors keep once all their blocks are evicted."""
        pages, one = len(context.sink_pages), context
        while True:
            pages += self._layout.blocks_for(one.num_own)
            if one.parent is None:
                return pages
            one = one.parent

    def idle_pages(self, kept: Collection[HostContext]) -> set[int]:
        """Return the device pages that dropping all idle contexts would free, except `kept` and their ancestors."""
        num_idle_holders = Counter(page for context in self._idle(kept) for page in _held(context))
        return {page for page, count in num_idle_holders.items() if self._pages.num_holders(page) == count}

    def free_pages(self, num_pages: int, kept: Collection[HostContext]) -> bool:
        """Free device pages by dropping idle contexts, but only if that is enough; return whether `num_pages` are free.

        Contexts in `kept` stay, and so do those that would free no page.
        """
        if num_pages <= self._pages.num_available:
            return True
        spare = self.idle_pages(kept)
        if num_pages > self._pages.num_available + len(spare):
            return False
        while num_pages > self._pages.num_available:
            freed = self._evict([one for one in self._idle(kept) if not spare.isdisjoint(_held(one))])
            assert freed, "what can be freed was counted"
        return True

    def forget(self, hashes: list[bytes]) -> None:
        """Close the idle contexts that consist of these blocks, longest first, unless others fork them."""
        for context in sorted(self._idle(()), key=lambda one: -len(one.hashes)):
            last = len(context.hashes) + self._host.num_sink_blocks - 1
            if context.hashes and not context.num_forks and hashes[last : last + 1] == context.hashes[-1:]:
                self.discard(context)

    def evict_idle(self, kept: Collection[HostContext | None]) -> bool:
        """Close the least valuable idle context without forks, except `kept`; False if there is none."""
        return self._evict(self._idle(kept))

    def take_closed(self) -> list[int]:
        """Return the ids of contexts closed since the last call, to report to the device."""
        closed, self.closed = self.closed, []
        return closed

    # --- room ---------------------------------------------------------------------------------------------------------

    def _can_free(self, num_bytes: int, kept: Collection[HostContext | None]) -> bool:
        spare_bytes = self.limit_bytes - self.used_bytes + sum(context.charged_bytes for context in self._idle(kept))
        return num_bytes <= spare_bytes

    def _idle(self, kept: Collection[HostContext | None]) -> list[HostContext]:
        """Return the contexts that may be dropped: all but held ones, `kept`, and the ancestors of both."""
        pinned: set[HostContext] = set()
        context: HostContext | None
        for context in [*(one for one in self._contexts.values() if one.is_held), *kept]:
            while context is not None and context not in pinned:
                pinned.add(context)
                context = context.parent
        return [context for context in self._contexts.values() if context not in pinned]

    def _evict(self, idle: list[HostContext]) -> bool:
        """Close the context without forks of lowest rank, of these the least recently used; False: there is none."""
        leaves = [context for context in idle if not context.num_forks]
        if leaves:
            least = min(leaves, key=lambda context: (self._ranks.rank_of(context.owner), context.used))
            self._ranks.note_evicted(least.owner)
            self.discard(least)
        return bool(leaves)

    def _make_room(self, num_bytes: int, kept: Collection[HostContext | None]) -> bool:
        """Drop idle contexts except `kept`, only if that is enough; return whether there is room."""
        if not self._can_free(num_bytes, kept):
            return False
        while self.used_bytes + num_bytes > self.limit_bytes:
            freed = self.evict_idle(kept)
            assert freed, "what can be freed was counted"
        return True

    def _bytes_of(self, size: RunSize) -> int:
        """Return the most bytes that a context's own blocks may take: those written at once, and those added later."""
        num_bulk = min(size.num_own, size.num_bulk)
        bulk_tokens = num_bulk * self._host.page_tokens
        more_tokens = (size.num_own - num_bulk) * self._host.page_tokens
        return self._host.bytes_of_run(bulk_tokens, more_tokens, size.reading, size.num_shared > 0)

    def _charge(self, context: HostContext, num_blocks: int) -> None:
        """Charge a context for its own blocks among `num_blocks`, in place of the charge before."""
        context.size = replace(context.size, num_blocks=num_blocks)
        num_bytes = self._bytes_of(context.size)
        self.used_bytes += num_bytes - context.charged_bytes
        context.charged_bytes = num_bytes

    def _use(self, context: HostContext) -> None:
        self._uses += 1
        context.used = self._uses

    # --- leaving ------------------------------------------------------------------------------------------------------

    def _hide(self, context: HostContext) -> list[HostContext]:
        """Hide a context and all its descendants from prompts; return them, forks before their parents."""
        forks: dict[HostContext, list[HostContext]] = {}
        for one in self._contexts.values() if context.num_forks else ():
            if one.parent is not None:
                forks.setdefault(one.parent, []).append(one)
        hidden = [context]
        for one in hidden:  # grows as it is read: each turn of a conversation forks the turn before
            hidden += forks.get(one, ())
        for one in hidden:
            one.is_findable = False
            if self.events is not None:
                self.events.remove(CPU, one.hashes[one.size.num_shared :])
                self.events.remove(GPU, one.hashes[max(one.size.num_shared, one.num_evicted) :])
            for digest in one.hashes[one.size.num_shared :]:
                owners = self._owners[digest]
                owners.remove(one)
                if not owners:
                    del self._owners[digest]
            del one.hashes[one.size.num_shared :]
        return hidden[::-1]

    def _close_unused(self, context: HostContext | None) -> None:
        """Close a context that is not held, cannot be found and has no forks; then likewise its ancestors."""
        while context is not None and not (
            context.is_closed or context.is_held or context.is_findable or context.num_forks
        ):
            self._charge(context, context.size.num_shared)  # no own blocks are left
            self._pages.release(_held(context))
            del self._contexts[context.context_id]
            context.is_closed = True
            if context.is_open:
                self.closed.append(context.context_id)
            if context.parent is not None:
                context.parent.num_forks -= 1
            context = context.parent


def _held(context: HostContext) -> list[int]:
    """Return the device pages that a context holds."""
    return [*context.sink_pages, *context.storage, *context.pages[context.num_evicted :]]

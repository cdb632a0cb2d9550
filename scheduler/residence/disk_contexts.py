"""Choose which blocks of a prompt are read from disk, and which blocks of a finished sequence are written.

A block is `disk.block_tokens` tokens, counted from the start of the prompt. Its name is the hash of its last KV block,
which covers all tokens before it, the model, the software that computed the keys and values, and the salt. So a shared
prefix is written once, and requests with different salts find nothing of each other. Blocks are copied out of pages
while the pages are still known by their hashes; a request that needs the pages does not wait. The records of a session
are noted before they are written, so that all can be forgotten, even after a restart.

Invariant: a prompt reads only blocks that continue, without a gap, what pages have. What is slower to read than to
compute is neither read nor written.
"""

import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from queue import SimpleQueue

from msgspec.structs import replace

from gpu.step import DiskPrefix, EvictedPart, HostRead, SavedBlock
from scheduler.cache.page_pool import PagePool
from scheduler.cache.window_pool import Windows
from scheduler.messages import FASTER, PAUSED, ContextSaved, pack_tokens
from scheduler.residence.disk_names import digest_of, files, remove_all, write_holder
from scheduler.residence.host_contexts import HostContexts
from scheduler.sequences.conversation import Conversation, Left
from scheduler.sequences.sequence import Sequence
from transfer.disk.context_store import END, GIB, KV, ContextStore
from transfer.disk.holders import SAVED, SESSION, Holder, save_holder

log = logging.getLogger(__name__)

MOST_ENDS = 2  # ends of prefixes that are kept of one context
MOST_UNSAVED = 16_384  # blocks and contexts that wait to be written; beyond that the oldest is dropped

Seconds = Callable[[int, int], float]
"""Return how long it takes to compute a prompt's tokens `[begin, end)`."""


@dataclass(frozen=True, slots=True)
class DiskSide:
    """The store of contexts on disk, and what the device reports about it.

    is_read: whether a layer of a job has been read. lost_jobs: jobs whose blocks turned out to be lost. num_savable:
    blocks that a plan may save now. has_landed: whether offloaded rows have arrived in host memory.
    """

    store: ContextStore
    is_read: Callable[[int, int], bool]
    lost_jobs: Callable[[], list[int]]
    num_savable: Callable[[], int]
    has_landed: Callable[[HostRead], bool]


@dataclass(frozen=True, slots=True)
class _Unsaved:
    """A record that waits to be written: a block, or the end of a prefix, if it has a window that is still `kept`."""

    name: str
    first: int  # number of its first KV block
    hashes: tuple[bytes, ...]  # of its KV blocks
    window: int | None = None
    kept: object = None


@dataclass(frozen=True, slots=True)
class _Saving:
    """A context to save under a name once the records queued before it are written. hashes: of its KV blocks."""

    answer: ContextSaved
    holder: Holder
    hashes: list[bytes]


class DiskContexts:
    """Chooses what is read from disk and written to it.

    side: the store; None: there are no contexts on disk. contexts: those in host memory, which begin after the
    `num_sink_blocks` of the sink; None: there are none.
    """

    def __init__(
        self, side: DiskSide | None, pages: PagePool, page_tokens: int, contexts: HostContexts | None,
        num_sink_blocks: int, windows: Windows,
    ) -> None:  # fmt: skip
        self.side = side
        self._contexts = contexts
        self._num_sink_blocks = num_sink_blocks
        self._windows = windows
        self._pages = pages
        self._page_tokens = page_tokens
        self._block_pages = 1 if side is None else side.store.block_tokens // page_tokens
        self._unsaved: deque[_Unsaved | list[str] | _Saving] = deque()  # a list of names ends a turn's blocks
        self._waiting: set[str] = set()
        self._waiting_ends: set[str] = set()
        self._saved: SimpleQueue[ContextSaved] = SimpleQueue()
        self._num_saving = 0

    # --- reading ------------------------------------------------------------------------------------------------------

    def find(self, sequence: Sequence, begin: int, seconds_of: Seconds, is_read_whole: bool = False) -> int:
        """Return the end, in tokens, of what a prompt reads from disk; 0: nothing.

        begin: tokens that are cached elsewhere. is_read_whole: these too are read from disk. Tokens that are on disk
        but are computed are noted in `Sequence.passed_over`.
        """
        sequence.passed_over = {}
        if self.side is None or sequence.chunks:
            return 0
        count = self._count(sequence) * self._block_pages
        end = self._last_end(sequence, count, begin // self._page_tokens) * self._page_tokens
        if end <= begin:
            return 0
        is_readable = self.side.store.folder.is_readable
        if is_readable and self._pays(end - begin * (not is_read_whole), seconds_of(begin, end)):
            return end
        sequence.passed_over = {FASTER if is_readable else PAUSED: end - begin}
        return 0

    def _last_end(self, sequence: Sequence, count: int, begin: int) -> int:
        """Return the most KV blocks after which a prompt can start, with the disk's help; 0: none.

        count: KV blocks on disk, from the first one on. If some layers have no pages, an end must be on disk as well.
        """
        assert self.side is not None
        most, step = sequence.num_usable_blocks, sequence.border_blocks
        if self.side.store.end is None:
            return min(count, most) // step * step
        last = min(count + self._block_pages - 1, most) // step * step
        folder, hashes = self.side.store.folder, sequence.hashes
        return next((end for end in range(last, begin, -step) if folder.has(END, hashes[end - 1].hex())), 0)

    def prefix(self, sequence: Sequence, begin: int, end: int) -> DiskPrefix | None:
        """Describe for the prefill which tokens `[begin, end)` it reads from disk; None: nothing is read."""
        if end <= begin:
            return None
        block_tokens = self._block_pages * self._page_tokens
        first, last = begin // block_tokens, -(-end // block_tokens)
        pages = sequence.pages[begin // self._page_tokens : end // self._page_tokens]
        end_name, window = "", 0
        if self._windows.count:
            assert sequence.window is not None, "disk: a sequence of a model with windows holds one"
            end_name, window = sequence.hashes[end // self._page_tokens - 1].hex(), sequence.window
            last = end // block_tokens
        names = self._names(sequence, first, last)
        return DiskPrefix(names, first, begin, end, tuple(pages), end_name, window)

    def _count(self, sequence: Sequence) -> int:
        """Count the prompt's blocks, from the first one on, that are on disk; a block known in pages counts as well."""
        assert self.side is not None
        version = self.side.store.folder.version
        if sequence.on_disk is None or sequence.on_disk[:2] != (version, sequence.num_known_blocks):
            num_blocks = len(sequence.hashes) // self._block_pages
            first = min(sequence.num_known_blocks // self._block_pages, num_blocks)
            count = self.side.store.count_front(self._names(sequence, 0, num_blocks), first)
            sequence.on_disk = version, sequence.num_known_blocks, count
        return sequence.on_disk[2]

    def _pays(self, num_tokens: int, seconds: float) -> bool:
        assert self.side is not None
        store = self.side.store
        num_blocks = math.ceil(num_tokens / store.block_tokens)
        return store.config.choose == "always" or store.read_seconds(num_blocks) < seconds

    def _names(self, sequence: Sequence, first: int, last: int) -> tuple[str, ...]:
        return tuple(self._names_of(sequence.hashes[first * self._block_pages : last * self._block_pages]))

    def _names_of(self, hashes: list[bytes]) -> list[str]:
        return [digest.hex() for digest in hashes[self._block_pages - 1 :: self._block_pages]]

    # --- writing ------------------------------------------------------------------------------------------------------

    def note_left(self, sequence: Sequence, num_final_blocks: int, seconds_of: Seconds) -> None:
        """Note the blocks of a leaving sequence, so that those not on disk yet are written while still in pages.

        num_final_blocks: its first KV blocks that are final and known.
        """
        if self.side is None:
            return
        one, hashes = sequence.conversation, sequence.hashes[:num_final_blocks]
        if one is not None and hashes:
            token_ids = sequence.tokens_from(0)[: (len(hashes) + 1) * self._page_tokens]
            one.left = Left(token_ids, hashes, sequence.num_prompt_tokens, sequence.profile.name)
        names, folder = self._names_of(hashes), self.side.store.folder
        num_tokens = len(names) * self.side.store.block_tokens
        if not names or not self._pays(num_tokens, seconds_of(0, num_tokens)):  # all or nothing: a gap ends a prefix
            computed = names[sequence.num_cached_tokens // self.side.store.block_tokens :]
            folder.count("declined", sum(not folder.has(KV, name) for name in computed))
            self._unsaved.append([])  # a turn that writes nothing
            return
        ends = self._ends_to_keep(hashes, sequence.num_prompt_tokens)
        if one is not None:
            self._note_holder(one, {*files(KV, names), *files(END, ends)})
        self._note_unsaved(hashes, names, ends)

    def _note_holder(self, one: Conversation, records: set[str]) -> None:
        assert self.side is not None
        if not one.session:
            one.records |= records
            return
        holders = self.side.store.folder.holders
        holder = holders.note(one.owner, one.session, records)
        if holder is not None:
            self.side.store.run_write(partial(write_holder, holders.write, holder))

    def _note_unsaved(self, hashes: list[bytes], names: list[str], ends: dict[str, _Unsaved]) -> None:
        """Queue the blocks and ends of a prefix that are not on disk, and not queued, to be written."""
        assert self.side is not None
        size, folder = self._block_pages, self.side.store.folder
        new = [block for block, name in enumerate(names) if name not in self._waiting and not folder.has(KV, name)]
        for block in new:
            self._waiting.add(names[block])
            self._unsaved.append(_Unsaved(names[block], block * size, tuple(hashes[block * size : (block + 1) * size])))
        for name, end in ends.items():
            if name not in self._waiting_ends and not folder.has(END, name):
                self._waiting_ends.add(name)
                self._unsaved.append(end)
        self._unsaved.append(list(names))
        while len(self._unsaved) > MOST_UNSAVED:  # the disk is slow, or does not answer
            oldest = self._unsaved.popleft()
            if isinstance(oldest, _Saving):
                self.side.store.run_write(partial(self._finish_save, oldest))
            elif not isinstance(oldest, list):
                (self._waiting if oldest.window is None else self._waiting_ends).discard(oldest.name)

    def _ends_to_keep(self, hashes: list[bytes], num_prompt_tokens: int) -> dict[str, _Unsaved]:
        """Return the ends of a prefix to keep, by name: the last one within the prompt, and the last of all."""
        size = self._block_pages
        kept = self._windows.find_kept(hashes, len(hashes))
        of_prompt = [one for one in kept if one[2] * self._page_tokens <= num_prompt_tokens]
        last = (max(some, key=itemgetter(2)) for some in (of_prompt, kept) if some)
        found: dict[str, _Unsaved] = {}
        for window, ends, end in last:
            name, first = hashes[end - 1].hex(), end // size * size
            found[name] = _Unsaved(name, first, tuple(hashes[first:end]), window, ends)
        return found

    # --- contexts by name ---------------------------------------------------------------------------------------------

    def save(self, answer: ContextSaved, one: Conversation, name: str) -> None:
        """Save a conversation under a name, however fast it can be computed again; `take_saved` has the answer."""
        self._num_saving += 1
        left = one.left
        if self.side is None or left is None:
            self._saved.put(replace(answer, code="no_disk" if self.side is None else "unknown"))
            return
        hashes = self._share_of(one.owner, name, left.hashes)
        if len(left.hashes) >= self._block_pages > len(hashes):
            self._saved.put(replace(answer, code="no_share"))
            return
        names, ends = self._names_of(hashes), self._ends_to_keep(hashes, left.num_prompt_tokens)
        size = self._block_pages
        places = dict(zip(files(KV, names), range(size, len(hashes) + 1, size), strict=True))
        places |= zip(files(END, (digest.hex() for digest in hashes)), range(1, len(hashes) + 1), strict=True)
        self.side.store.folder.begin_save(places)
        self._note_unsaved(hashes, names, ends)
        holder = save_holder(one.owner, name, pack_tokens(left.token_ids.tolist()), left.profile, one.session)
        self._unsaved.append(_Saving(answer, holder, hashes))

    def take_saved(self) -> list[ContextSaved]:
        """Return the answers to `save` since the last call."""
        told = [self._saved.get_nowait() for _ in range(self._saved.qsize())]
        self._num_saving -= len(told)
        return told

    @property
    def is_saving(self) -> bool:
        """Return whether a save is unanswered: until then nothing is forgotten, and no other save begins."""
        return self._num_saving > 0

    def _share_of(self, owner: str, name: str, hashes: list[bytes]) -> list[bytes]:
        """Return the first of these KV blocks that fit in the owner's share, beside what it saved under other names."""
        assert self.side is not None
        store, size = self.side.store, self._block_pages
        others = [one.records for one in store.folder.holders.of(SAVED, owner) if one.name != name]
        held: set[str] = set().union(*others)
        room = int(store.config.saved_gib(owner) * GIB) - store.folder.num_bytes(held)
        if store.end is not None:
            room -= MOST_ENDS * store.end.file_bytes
        for block, file_name in enumerate(files(KV, self._names_of(hashes))):
            room -= 0 if file_name in held else store.kv.file_bytes
            if room < 0:
                return hashes[: block * size]
        return hashes

    def _finish_save(self, saving: _Saving) -> None:
        """Register what was written of a context under its name, and answer. Runs in the writing thread."""
        answer = replace(saving.answer, code="no_room")
        try:
            answer = self._note_saved(saving)
        finally:
            self._saved.put(answer)

    def _note_saved(self, saving: _Saving) -> ContextSaved:
        assert self.side is not None
        store, holder = self.side.store, saving.holder
        names = self._names_of(saving.hashes)
        num_blocks = store.count_front(names, 0)
        num_tokens, ends = num_blocks * store.block_tokens, []
        if store.end is not None:
            last = min(len(saving.hashes), (num_blocks + 1) * self._block_pages - 1)
            ends = [digest.hex() for digest in saving.hashes[:last] if store.folder.has(END, digest.hex())]
            num_tokens = (saving.hashes.index(bytes.fromhex(ends[-1])) + 1) * self._page_tokens if ends else 0
        holder.records = {*files(KV, names[:num_blocks]), *files(END, ends)} if num_tokens else set()
        answer = replace(saving.answer, code="no_room")
        if num_tokens:
            try:
                store.folder.holders.add(holder)
                num_bytes = store.folder.num_bytes(holder.records)
                answer = replace(saving.answer, num_tokens=num_tokens, num_bytes=num_bytes)
            except OSError as error:
                log.warning("context_not_saved name=%s error=%s", holder.name, error)
        store.folder.pin([*files(KV, names), *files(END, (digest.hex() for digest in saving.hashes))])
        return answer

    # --- forgetting ---------------------------------------------------------------------------------------------------

    def retract(self, sequence: Sequence) -> None:
        """Remove all records of a context that gave no finite logits, also those that are being written."""
        if self.side is not None:
            folder, why = self.side.store.folder, "its context gave no finite logits"
            self._remove(self._records_of(sequence.hashes), lambda kind, name: folder.drop(kind, name, why))

    def count_tokens(self, hashes: list[bytes]) -> int:
        """Count the tokens of these KV blocks that are on disk, from the first on and without a gap."""
        if self.side is None:
            return 0
        return self.side.store.count_front(self._names_of(hashes), 0) * self.side.store.block_tokens

    def forget(self, owner: str, session: str, gone: list[Conversation], kept: set[bytes], is_over: bool) -> None:
        """Remove what these conversations of a session have on disk, also what is being written.

        Blocks stay if another holder has them, or if they end with a KV block in `kept`. is_over: the whole session is
        forgotten, with all of its branches.
        """
        if self.side is None:
            return
        holders = self.side.store.folder.holders
        records = set().union(*(one.records | self._records_of(one.hashes) for one in gone))
        holder = holders.find(SESSION, owner, session) if session else None
        if holder is not None and is_over:
            records |= holder.records
            holders.remove(holder)
        elif holder is not None:
            holder.records -= {record for record in records if digest_of(record) not in kept}
            self.side.store.run_write(partial(write_holder, holders.write, holder))
        self._remove_records(records, kept)

    def forget_saved(self, owner: str, name: str, kept: set[bytes]) -> bool:
        """Delete a saved context, and its records that no other holder has; False: there is none of this name."""
        holder = None if self.side is None else self.side.store.folder.holders.find(SAVED, owner, name)
        if holder is None or self.side is None:
            return False
        self.side.store.folder.holders.remove(holder)
        self.side.store.folder.pin()
        self._remove_records(holder.records, kept)
        return True

    def _records_of(self, hashes: list[bytes]) -> set[str]:
        assert self.side is not None
        ends = [digest.hex() for digest in hashes] if self.side.store.end is not None else []
        return {*files(KV, self._names_of(hashes)), *files(END, ends)}

    def _remove_records(self, records: set[str], kept: set[bytes]) -> None:
        assert self.side is not None
        records = {record for record in records if digest_of(record) not in kept}
        self._remove(records - self.side.store.folder.holders.held(), self.side.store.folder.remove)

    def _remove(self, records: set[str], remove: Callable[[str, str], None]) -> None:
        """Drop these records from the queue, and remove them from disk after the writes under way."""
        assert self.side is not None
        store = self.side.store
        blocks, ends = ({name[: -len(kind) - 1] for name in records if name.endswith(f".{kind}")} for kind in (KV, END))
        unsaved, self._unsaved = self._unsaved, deque()
        for one in unsaved:
            if not isinstance(one, _Unsaved) or one.name not in (blocks if one.window is None else ends):
                self._unsaved.append(one)
        self._waiting -= blocks
        self._waiting_ends -= ends
        store.run_write(partial(remove_all, store.folder, remove, blocks, ends))

    @property
    def has_work(self) -> bool:
        """Return whether records wait to be written."""
        return bool(self._unsaved)

    @property
    def num_unsaved_bytes(self) -> int:
        """Return the bytes of records that wait to be written."""
        if self.side is None:
            return 0
        store = self.side.store
        end_bytes = 0 if store.end is None else store.end.file_bytes
        return len(self._waiting) * store.kv.file_bytes + len(self._waiting_ends) * end_bytes

    def take_saves(self) -> list[SavedBlock]:
        """Return the queued records that the next plan copies out of pages; those that are gone are skipped."""
        saves: list[SavedBlock] = []
        if not self._unsaved or self.side is None:
            return saves
        num_savable, store = self.side.num_savable(), self.side.store
        while self._unsaved:
            first = self._unsaved[0]
            if isinstance(first, list):
                if saves:
                    break  # they are written before the turn ends
                store.end_turn(first)
            elif isinstance(first, _Saving):
                if saves:
                    break
                store.run_write(partial(self._finish_save, first))
            elif len(saves) == num_savable:
                break
            else:
                kind, waiting = (KV, self._waiting) if first.window is None else (END, self._waiting_ends)
                saved = None if store.folder.has(kind, first.name) else self._locate(first)
                if saved is not None and store.folder.takes(kind):
                    if not self._has_landed(saved.evicted):
                        break
                    saves.append(saved)
                waiting.discard(first.name)
            self._unsaved.popleft()
        return saves

    def _has_landed(self, part: EvictedPart | None) -> bool:
        assert self.side is not None
        return part is None or self.side.has_landed(HostRead(part.context_id, 0, part.end))

    def _locate(self, block: _Unsaved) -> SavedBlock | None:
        """Find a block in known pages, or in a context in host memory; None: it is gone."""
        if block.window is not None and not self._windows.has_kept(block.window, block.kept):
            return None
        page_ids = self._pages.find_pages(block.hashes)
        if page_ids is not None:
            return SavedBlock(block.name, tuple(page_ids), None, block.window)
        context = None if self._contexts is None else self._contexts.owner(block.hashes[-1])
        if context is None or not context.is_written or not context.is_open:
            return None
        num_sink, last = self._num_sink_blocks, block.first + len(block.hashes)
        pages = [*context.sink_pages, *context.pages[: last - num_sink]][block.first : last]
        first_evicted, end_evicted = max(block.first, num_sink), min(last, num_sink + context.num_evicted)
        if end_evicted <= first_evicted:
            return SavedBlock(block.name, tuple(pages), None, block.window)
        begin, end = ((evicted - num_sink) * self._page_tokens for evicted in (first_evicted, end_evicted))
        part = EvictedPart(context.context_id, begin, end, first_evicted - block.first)
        return SavedBlock(block.name, tuple(pages), part, block.window)

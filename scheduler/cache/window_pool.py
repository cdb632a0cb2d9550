"""Assign windows of layers with sliding attention to sequences, and keep some as the ends of prefixes.

A sequence holds a window while it holds a slot. A kept window is no longer written to. It belongs to one or more ends
of prefixes, and a prompt that begins with such a prefix can continue from a copy of the window. A copy is kept when a
prompt has been computed, if a window is free for it. The window itself is kept when its sequence leaves. The kept
window that is cheapest to compute again is evicted first (`EvictionOrder`), weighted by the conversation or front that
it belongs to. Suppose that pages have more of a prompt than any kept window: then the prompt computes these tokens
again, and leaves a window at their end, a **branch**, for the next prompt.

Invariants: a window is free, held or kept. A kept window has, for each of its ends, all cells that a layer sees from
there. A copy lacks what its source had overwritten.

States of recurrent layers are handled as windows with one end each: the end of the tokens that they have taken in. So
a prompt leaves a copy, a **snapshot**, at the end of its last block, and one at the end of its front if that has none.
If a window is free, a long prompt leaves another one `snapshot_tokens` before its end, for prompts that ask something
else about the same text. A decoding sequence leaves one every `snapshot_tokens`. A preempted sequence leaves the state
itself, for itself alone, under the name of its last page (`PrefixCache.leave_live`). All of these are copied to host
memory as well, if that has places for states (`HostSnapshots`).
"""

from dataclasses import dataclass, field

from gpu.step import StateMove, WindowBranch, WindowWrite
from scheduler.cache.eviction_order import EvictionOrder, Owners
from scheduler.cache.host_snapshots import HostSnapshots
from scheduler.cache.idle_pages import NOBODY
from scheduler.cache.page_pool import Memory, commit_more
from scheduler.sequences.sequence import Sequence

_SPOILT = 1 << 62  # as the number of written cells: every end is overwritten
_MANY_STEPS = 8  # a prompt that computes more than so many times `snapshot_tokens` leaves the snapshot before its end
_LONG_BRANCH_BLOCKS = 16  # a branch evicts a kept window only if it saves at least so many blocks


@dataclass(frozen=True, slots=True)
class _Kept:
    """The ends of prefixes in a window: after `begin` blocks, after one more, and so on.

    root: the hash of the prefix's first block. hashes: for each end, the hash of the last block before it. owner: the
    number of the conversation or front that left the window.
    """

    root: bytes
    begin: int
    hashes: list[bytes]
    owner: int = field(default=NOBODY, compare=False)

    def last_end(self, hashes: list[bytes], num_blocks: int, step: int) -> int:
        """Return the last end within the first `num_blocks` of these hashes, a multiple of `step` blocks; 0: none."""
        last = min(self.begin + len(self.hashes) - 1, num_blocks) // step * step
        for end in range(last, self.begin - 1, -step):
            if hashes[end - 1] == self.hashes[end - self.begin]:
                return end
        return 0


class Windows:
    """The KV windows of a deployment.

    count: the number of windows; 0: the model needs none, and no request is refused one.
    spare_tokens: cells of a window beyond what a layer sees. A window has ends up to so many tokens before its last.
    keeps: whether windows are kept for other prompts.
    memory: allocates windows on demand, in order; None: all are allocated.
    snapshot_tokens: decoded tokens between two snapshots, if windows are states; None: they are not.
    num_host_states: places for states in host memory.
    owners: rank conversations and fronts for eviction; None: all count the same.
    """

    def __init__(self, count: int, spare_tokens: int, page_tokens: int, keeps: bool,
                 memory: Memory | None = None, snapshot_tokens: int | None = None,
                 num_host_states: int = 0, owners: Owners | None = None) -> None:  # fmt: skip
        self.count = count
        self.snapshot_tokens = snapshot_tokens
        self._memory = memory
        self._num_committed = count if memory is None else 0
        self._spare_tokens = spare_tokens
        self._page_tokens = page_tokens
        self._keeps = keeps
        self._free = list(range(self._num_committed - 1, -1, -1))
        self._kept: dict[int, _Kept] = {}
        self._order: EvictionOrder[int] = EvictionOrder(owners)  # of the kept ones
        self._host = HostSnapshots(num_host_states, owners)
        self._written = [0] * count  # cells ever written to a window, or to the one that it was copied from
        self._roots: dict[int, bytes] = {}  # of held windows: the hash of the prefix's first block, or b""
        self._writes: list[WindowWrite | StateMove] = []
        self._coming: dict[bytes, _Kept | None] = {}  # branches being computed, by the hash of the last block before

    @property
    def num_free(self) -> int:
        """Count the windows that no sequence holds, kept ones among them."""
        return len(self._free) + len(self._kept)

    @property
    def num_kept(self) -> int:
        """Count the kept windows."""
        return len(self._kept)

    def lacks(self) -> bool:
        """Return whether no window can be had for another sequence."""
        self._reach()
        return bool(self.count) and not self.num_free

    def last_end(self, hashes: list[bytes], num_blocks: int, step: int) -> int:
        """Return the most of these blocks after which a prompt can start, a multiple of `step`."""
        if not self.count:
            return num_blocks // step * step
        ends = (kept.last_end(hashes, num_blocks, step) for kept in self._kept.values())
        return max(self._host.last_end(hashes, num_blocks, step), *ends, 0)

    def first_end(self, sequence: Sequence) -> int:
        """Return the fewest blocks after which a later prompt can start from this sequence's windows; 0: none."""
        if sequence.branches:
            return min(branch.end for branch in sequence.branches) // self._page_tokens
        num_tokens = sequence.num_tokens
        kept = self._ends_of(sequence, num_tokens, (num_tokens - 1) // self._page_tokens) if self._keeps else None
        return 0 if kept is None else kept.begin

    def find_kept(self, hashes: list[bytes], num_blocks: int) -> "list[tuple[int, _Kept, int]]":
        """Return the kept windows with an end within the first `num_blocks` of these hashes.

        Each is `(window, kept, last end in blocks)`; the first two are the arguments of `has_kept`.
        """
        found = [(window, kept, kept.last_end(hashes, num_blocks, 1)) for window, kept in self._kept.items()]
        return [one for one in found if one[2]]

    def has_kept(self, window: int, kept: object) -> bool:
        """Return whether a window is still kept for these ends."""
        return self._kept.get(window) is kept

    def take(
        self, sequence: Sequence, num_blocks: int, num_seen_blocks: int, is_on_disk: bool = False
    ) -> None:  # fmt: skip
        """Give a sequence a window from the next plan on.

        num_blocks: blocks after which its prefill starts. num_seen_blocks: its first blocks that pages have.
        is_on_disk: the window's content at the start is read from disk.
        """
        if not self.count:
            return
        source = place = None
        if num_blocks and not is_on_disk:
            ending = (window for window, kept in reversed(self._kept.items())
                      if kept.last_end(sequence.hashes, num_blocks, 1) == num_blocks)  # fmt: skip
            source = next(ending, None)
            place = self._host.place_of(sequence.hashes[num_blocks - 1])
        if source is not None:
            self._order.touch(source)
        written = num_blocks * self._page_tokens if source is None else self._written[source]
        if is_on_disk and self.snapshot_tokens is None:  # cells beyond the record's end may have been overwritten
            written += self._spare_tokens
        self._give(sequence, source, place, written, sequence.hashes[0] if sequence.hashes else b"")
        ends, near = [] if is_on_disk and self.snapshot_tokens is None else [num_seen_blocks], 0
        if self.snapshot_tokens is not None:
            sequence.snapshot_cell = sequence.num_tokens
            last = (sequence.run_end or sequence.num_tokens - 1) // self._page_tokens  # offloaded, others find its run
            last = min(last, sequence.num_final_blocks, len(sequence.hashes))
            if num_blocks and num_seen_blocks - num_blocks < _LONG_BRANCH_BLOCKS:
                ends = []  # a short answer, computed again if the client replaces a turn
            front = 0 if sequence.front is None else sequence.front.num_blocks
            ends += [last, front if front <= last else 0]  # if windows are short, the front goes without
            step = self.snapshot_tokens // self._page_tokens
            near = last - step if last - num_blocks > _MANY_STEPS * step else 0
        for end in dict.fromkeys(ends):
            if end > num_blocks and self._keeps:
                self._branch(sequence, source, num_blocks, end)
        if near > num_blocks and self._keeps and self._has_spare(False):  # nothing is evicted for it
            self._branch(sequence, source, num_blocks, near)

    def _give(self, sequence: Sequence, source: int | None, place: int | None, written: int, root: bytes) -> None:
        """Give a sequence a window: a copy of `source`, or else of the host memory's `place`, or with any content."""
        sequence.window = self._take_one()
        self._written[sequence.window], self._roots[sequence.window] = written, root
        self._writes.append(WindowWrite(sequence.window, source, sequence.slot))
        if source is None and place is not None:
            self._writes.append(StateMove(sequence.window, place, is_up=True))

    def _branch(self, sequence: Sequence, source: int | None, num_blocks: int, num_seen_blocks: int) -> None:
        """Plan a branch at the end of this prefix, if none is planned there, a window is free and it saves enough."""
        end, is_long = num_seen_blocks * self._page_tokens, num_seen_blocks - num_blocks >= _LONG_BRANCH_BLOCKS
        written = max(end, 0 if source is None else self._written[source])
        kept = self._kept_ends(sequence, written, num_seen_blocks)
        self._reach()
        is_coming = sequence.hashes[num_seen_blocks - 1] in self._coming
        if kept is None or is_coming or not self._has_spare(is_long):
            return
        window = self._take_one()
        self._written[window] = written
        self._writes.append(WindowWrite(window, source if self.snapshot_tokens is None else None, None))
        sequence.branches = (*sequence.branches, WindowBranch(window, end))
        self._coming[sequence.hashes[num_seen_blocks - 1]] = kept

    def _end_branches(self, sequence: Sequence, is_kept: bool) -> None:
        """Keep the branches of a finished prefill, or free those of a dropped one."""
        branches, sequence.branches = sequence.branches, ()
        for branch in branches:
            kept = self._coming.pop(sequence.hashes[branch.end // self._page_tokens - 1])
            if is_kept and kept is not None:
                self._keep(branch.window, kept, sequence)
            else:
                self._free.append(branch.window)

    def wants_snapshot(self, sequence: Sequence) -> bool:
        """Return whether a snapshot is due: the next token begins a block, and enough were drawn since the last one."""
        if self.snapshot_tokens is None or sequence.window is None or not self._keeps:
            return False
        cell = sequence.next_position
        return cell % self._page_tokens == 0 and cell - sequence.snapshot_cell >= self.snapshot_tokens

    def snapshot(self, sequence: Sequence) -> None:
        """Keep a copy of the state of a sequence that `wants_snapshot`, if there is room. Its hashes must be known.

        A kept state may be evicted for it, but not the last one.
        """
        assert sequence.window is not None, "a sequence that wants one holds a state"
        cell = sequence.next_position
        kept = self._kept_ends(sequence, max(cell, self._written[sequence.window]), cell // self._page_tokens)
        self._reach()
        if kept is not None and self._has_spare(True):
            window = self._take_one()
            self._written[window] = cell
            self._writes.append(WindowWrite(window, sequence.window, None))
            self._keep(window, kept, sequence)
            sequence.snapshot_cell = cell

    def note_written(self, sequence: Sequence, num_cells: int) -> None:
        """Note that a step may write the first `num_cells` cells, also for drafted tokens that may be rejected."""
        if sequence.window is not None:
            self._written[sequence.window] = max(self._written[sequence.window], num_cells)

    def note_accepted(self, sequence: Sequence) -> None:
        """Note that a state has taken in only the accepted tokens of a draft."""
        if self.snapshot_tokens is not None and sequence.window is not None:
            self._written[sequence.window] = sequence.next_position

    def most_behind(self, sequence: Sequence, most: int) -> int:
        """Return how many tokens may follow the next draw's in its step, at most `most`.

        A state is copied at the end of a step, so a step must end where a snapshot is due.
        """
        if self.snapshot_tokens is None or sequence.window is None or not self._keeps:
            return most
        cell, page = sequence.next_position, self._page_tokens
        due = max(sequence.snapshot_cell + self.snapshot_tokens, cell + 1)
        return min(most, -(-due // page) * page - cell - 1)

    def keep_prompt(self, sequence: Sequence) -> None:
        """Keep a copy of the window at the end of the prompt that the current plan computes, if one is free."""
        self._end_branches(sequence, True)
        self.note_written(sequence, sequence.num_tokens)
        if sequence.window is None or not self._keeps:
            return
        self._reach()
        if not self.num_free:
            return
        num_tokens = sequence.num_tokens
        kept = self._ends_of(sequence, num_tokens, (num_tokens - 1) // self._page_tokens)
        if kept is not None:
            window = self._take_one()
            self._written[window] = max(self._written[sequence.window], sequence.num_tokens)
            self._writes.append(WindowWrite(window, sequence.window, None))
            self._keep(window, kept, sequence)

    def give_back(self, sequence: Sequence, is_kept: bool) -> None:
        """Take the window back from a sequence that leaves its slot. is_kept: keep it for other prompts."""
        self._end_branches(sequence, False)
        if sequence.window is None:
            return
        end = sequence.next_position
        num_blocks = max(end, sequence.num_tokens - 1) // self._page_tokens
        kept = self._ends_of(sequence, end, num_blocks) if is_kept and self._keeps else None
        if kept is None and sequence.live:
            kept = _Kept(self._roots[sequence.window], 1, [sequence.live[0]], _owner_of(sequence, 1 << 62))
        del self._roots[sequence.window]
        if kept is None:
            self._free.append(sequence.window)
        else:
            self._written[sequence.window] = max(self._written[sequence.window], sequence.next_position)
            self._keep(sequence.window, kept, sequence)
        sequence.window = None

    def has_live(self, sequence: Sequence) -> bool:
        """Return whether the state that a preempted sequence left for itself still exists."""
        return self._find_live(sequence) is not None or self._host.has(sequence.live[0])

    def take_live(self, sequence: Sequence) -> None:
        """Give a preempted sequence its state back from the next plan on."""
        source, place = self._find_live(sequence), self._host.place_of(sequence.live[0])
        if source is not None:
            self._forget(source)  # it is now the first free one, so `_give` takes it
        self._give(sequence, source, place, sequence.num_live_tokens, sequence.hashes[0] if sequence.hashes else b"")

    def forget_live(self, sequence: Sequence) -> None:
        """Free the state that a preempted sequence left for itself, if it still exists."""
        window = self._find_live(sequence)
        if window is not None:
            self._forget(window)
        self._host.drop(sequence.live[0])

    def _find_live(self, sequence: Sequence) -> int | None:
        return next((window for window, kept in self._kept.items() if kept.hashes == sequence.live[:1]), None)

    def forget(self, owner: int, hashes: list[bytes], kept: set[bytes]) -> None:
        """Free windows that this owner left or that end with one of these blocks, unless one of `kept` ends there."""
        own = set(hashes)
        for window, one in list(self._kept.items()):
            if (one.owner == owner or not own.isdisjoint(one.hashes)) and kept.isdisjoint(one.hashes):
                self._forget(window)
        self._host.forget(owner, own, kept)

    def retract(self, sequence: Sequence) -> None:
        """Make unusable every window with the same first block as the sequence, kept or still held."""
        if sequence.hashes:
            for window in [window for window, kept in self._kept.items() if kept.root == sequence.hashes[0]]:
                self._forget(window)
            self._host.retract(sequence.hashes[0])
            for window, root in self._roots.items():
                if root == sequence.hashes[0]:
                    self._written[window] = _SPOILT
            for end, coming in self._coming.items():
                if coming is not None and coming.root == sequence.hashes[0]:
                    self._coming[end] = None

    def take_writes(self) -> list[WindowWrite | StateMove]:
        """Return the copies of windows and states to make since the last call, in order."""
        writes, self._writes = self._writes, []
        return writes

    def _reach(self) -> None:
        """Allocate a window if none is free and the host has memory for it."""
        if self._memory is not None and not self._free:
            before = self._num_committed
            self._num_committed = commit_more(self._memory, before, self.count, (1,))
            self._free += range(before, self._num_committed)

    def _has_spare(self, is_long: bool) -> bool:
        """Return whether one more end of a prefix can have a window: a free one, or a kept one that is evicted.

        The last kept window is evicted only if host memory has it as well. is_long: the end saves enough to evict one.
        """
        if self._free or (is_long and len(self._kept) > 1):
            return True
        return any(self._host.has(kept.hashes[-1]) for kept in self._kept.values())

    def _take_one(self) -> int:
        if self._free:
            return self._free.pop()
        window = self._order.pop()
        del self._kept[window]
        return window

    def _forget(self, window: int) -> None:
        """Free a window that is kept."""
        del self._kept[window]
        self._order.remove(window)
        self._free.append(window)

    def _keep(self, window: int, kept: _Kept, sequence: Sequence) -> None:
        """Keep a window of a sequence, and free others with the same ends. A state is also copied to host memory."""
        for other in [other for other, had in self._kept.items() if had == kept]:
            self._forget(other)
        end, in_front = (kept.begin + len(kept.hashes) - 1) * self._page_tokens, kept.begin - 1
        if self.snapshot_tokens is not None:
            end = self._written[window]
            in_front = min(end - 1, sequence.num_tokens) // self._page_tokens
        in_front = min(in_front, len(sequence.hashes))
        cost = end - self._page_tokens * self.last_end(sequence.hashes, in_front, 1)  # tokens computed again without it
        if self.snapshot_tokens is not None:
            place = self._host.add(kept.hashes[-1], kept.root, kept.begin, cost, kept.owner)
            if place is not None:
                self._writes.append(StateMove(window, place, is_up=False))
        self._kept[window] = kept
        self._order.put(window, 0 if self._host.has(kept.hashes[-1]) else cost, kept.owner)

    def _ends_of(self, sequence: Sequence, num_written: int, num_blocks: int) -> _Kept | None:
        """Return the ends in a sequence's window, of which `num_written` cells are written, within `num_blocks`."""
        if sequence.window is not None:
            num_written = max(num_written, self._written[sequence.window])
        return self._kept_ends(sequence, num_written, num_blocks)

    def _kept_ends(self, sequence: Sequence, num_written: int, num_blocks: int) -> _Kept | None:
        """Return the ends in a window whose first `num_written` cells were written, within the first `num_blocks`."""
        last = min(num_blocks, sequence.num_final_blocks, len(sequence.hashes))
        begin = max(1, -(-(num_written - self._spare_tokens) // self._page_tokens))
        if self.snapshot_tokens is not None:
            if num_written % self._page_tokens:
                return None  # a state belongs to one token, and only ends of whole blocks are kept
            last = min(last, begin)
        if last < begin:
            return None
        return _Kept(sequence.hashes[0], begin, sequence.hashes[begin - 1 : last], _owner_of(sequence, begin))


def _owner_of(sequence: Sequence, num_blocks: int) -> int:
    """Return the number of the sequence's front if `num_blocks` are within it, else that of its conversation."""
    front, one = sequence.front, sequence.conversation
    if front is not None and num_blocks <= front.num_blocks:
        return front.number
    return NOBODY if one is None else one.number

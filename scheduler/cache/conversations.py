"""Track conversations, in which each prompt continues the one before, and order the eviction of what they leave.

What costs least to compute again is evicted first, by GreedyDual (Young, Algorithmica 11, 1994). A conversation's rank
is a clock plus the work of computing it again. The clock is the highest rank evicted so far. So a rarely used
conversation is evicted in the end, however long it is, and a few short ones do not replace a long one. If its last
answer called tools, a conversation is expected to continue, and its work counts several times. Requests of agents that
it has started, in the same session, do not evict it.

The front of its prompts, system message and tools, has a rank of its own (`Front`), since other conversations share it.
It is pinned while a named session, or a conversation of several turns, is alive: then it is evicted last. Pinned fronts
are at most half of all pages. Invariant: `take_lowered` returns each owner whose rank falls.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import count

from scheduler.cache.idle_pages import NOBODY
from scheduler.sequences.conversation import Conversation, Front
from scheduler.sequences.sequence import Sequence

_EXPECTED = 4.0  # factor of the work of a conversation that is expected to continue
_MOST_KNOWN = 1024  # idle conversations that are remembered; the least recently used ones are forgotten


class Conversations:
    """The conversations of an engine. num_pages: the engine's pages. alive_seconds: how long a session is alive after
    its last use.
    """

    def __init__(self, page_tokens: int, num_pages: int, alive_seconds: float) -> None:
        self._page_tokens = page_tokens
        self._most_pinned = num_pages // 2
        self._alive_seconds = alive_seconds
        self._clock = 0.0  # the highest evicted rank
        self._last_number = NOBODY
        self._known: OrderedDict[int, Conversation] = OrderedDict()  # the least recently used first
        self._ending: dict[tuple[str, bytes], Conversation] = {}  # by owner and last block of its last prompt
        self._by_request: dict[str, Conversation] = {}  # by the id of its last request
        self._awaited: dict[tuple[str, str], dict[int, Conversation]] = {}  # those in a session, by owner and session
        self._fronts: dict[bytes, Front] = {}
        self._most_fronts = _MOST_KNOWN  # with more, unused ones are forgotten
        self._pinned: OrderedDict[int, Front] = OrderedDict()  # the least recently used first
        self._num_pinned = 0  # blocks of pinned fronts
        self._numbered: dict[int, Conversation | Front] = {}
        self._lowered: list[int] = []

    def __iter__(self) -> Iterator[Conversation]:
        return iter(self._known.values())

    # --- turns --------------------------------------------------------------------------------------------------------

    def enter(self, sequence: Sequence, work_of: Callable[[int], float]) -> None:
        """Note that a sequence starts: the next turn of a conversation, or the first turn of a new one.

        work_of(n): the operations of a prompt of n tokens.
        """
        num_blocks = min(sequence.num_prompt_tokens // self._page_tokens, len(sequence.hashes))
        if not num_blocks:
            return
        request = sequence.request
        one = sequence.conversation or self._find(sequence.hashes, num_blocks, request.owner)
        if one is None:
            one = Conversation(self._number(), request.owner, request.session)
            one.slot = self._free_slot(one.owner)
        else:
            self._unlist(one)
        self._give_slot(one, request.slot)
        one.hashes, one.num_blocks, one.num_tokens = sequence.hashes, num_blocks, sequence.num_tokens
        one.work, one.request_id, one.is_awaited = work_of(sequence.num_tokens), request.request_id, False
        one.session = request.session or one.session
        self._ending[one.owner, one.hashes[num_blocks - 1]] = self._by_request[one.request_id] = one
        one.num_turns += sequence.conversation is None
        one.num_running += 1
        sequence.conversation = one
        num_front = min(request.front_tokens // self._page_tokens, num_blocks)
        if num_front:
            sequence.front = self._front(sequence.hashes[num_front - 1], num_front, work_of)
            sequence.front.num_running += 1
        self._use(one, sequence.front)

    def leave(self, sequence: Sequence) -> None:
        """Note that a sequence has left its slot, so that what it leaves is idle."""
        one = sequence.conversation
        if one is None:
            return
        one.num_running -= 1
        if sequence.front is not None:
            sequence.front.num_running -= 1
        one.num_tokens = sequence.num_tokens
        self._use(one, sequence.front)
        self._forget_some()

    def expect(self, request_ids: list[str]) -> None:
        """Note that the answers to these requests called tools, so that another turn is expected."""
        for request_id in request_ids:
            one = self._by_request.get(request_id)
            if one is not None:
                one.is_awaited = True
                self._rank(one)
                if one.session:
                    self._awaited.setdefault((one.owner, one.session), {})[one.number] = one

    # --- what stays ---------------------------------------------------------------------------------------------------

    def rank_of(self, owner: int) -> float:
        """Return the owner's eviction rank; the lowest goes first, unowned entries before all."""
        found = self._numbered.get(owner)
        if found is None:
            return -math.inf
        return math.inf if owner in self._pinned else found.rank

    def weight_of(self, owner: int) -> float:
        """Return the factor of the cost of the owner's windows and states; 0 for unowned ones."""
        found = self._numbered.get(owner)
        if found is None:
            return 0.0
        return math.inf if owner in self._pinned else _weight(found)

    def num_favours(self, owner: int) -> int:
        """Return how often other requests of its session renewed the rank of a conversation that awaits tools."""
        found = self._numbered.get(owner)
        return found.num_favours if isinstance(found, Conversation) else 0

    def note_evicted(self, owner: int) -> None:
        """Age all others: raise the clock to the evicted owner's rank."""
        found = self._numbered.get(owner)
        if found is not None:
            self._clock = max(self._clock, found.rank)

    def take_lowered(self) -> list[int]:
        """Return the owners whose rank has fallen since the last call, and unpin expired fronts."""
        self._unpin(time.monotonic())
        lowered, self._lowered = self._lowered, []
        return lowered

    def forget(self, one: Conversation) -> None:
        """Forget a conversation; its cached entries become unowned."""
        self._unlist(one)
        self._known.pop(one.number, None)
        self._numbered.pop(one.number, None)
        self._lowered.append(one.number)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _find(self, hashes: list[bytes], num_blocks: int, owner: str) -> Conversation | None:
        """Return the owner's longest conversation whose last prompt is a prefix of this one."""
        ends = (self._ending.get((owner, digest)) for digest in reversed(hashes[:num_blocks]))
        return next((one for one in ends if one is not None), None)

    def _free_slot(self, owner: str) -> int:
        """Return the lowest slot that no conversation of the owner has."""
        taken = {one.slot for one in self._known.values() if one.owner == owner}
        return next(slot for slot in count() if slot not in taken)

    def _give_slot(self, one: Conversation, slot: int) -> None:
        """Give a conversation the slot its request asks for, and its holder another. Below 0: none asked."""
        if slot < 0 or one.slot == slot:
            return
        for other in self._known.values():
            if other.owner == one.owner and other.slot == slot:
                other.slot = self._free_slot(one.owner)
        one.slot = slot

    def _unlist(self, one: Conversation) -> None:
        """Remove a conversation from the indexes by last prompt, by last request and by awaited session."""
        if self._ending.get(end := (one.owner, one.hashes[one.num_blocks - 1])) is one:
            del self._ending[end]
        self._by_request.pop(one.request_id, None)
        session = self._awaited.get(key := (one.owner, one.session), {})
        session.pop(one.number, None)
        if not session:
            self._awaited.pop(key, None)

    def _front(self, digest: bytes, num_blocks: int, work_of: Callable[[int], float]) -> Front:
        front = self._fronts.get(digest)
        if front is None:
            work = work_of(num_blocks * self._page_tokens)
            front = self._fronts[digest] = Front(self._number(), num_blocks, work)
            self._numbered[front.number] = front
        return front

    def _number(self) -> int:
        self._last_number += 1
        return self._last_number

    def _use(self, one: Conversation, front: Front | None) -> None:
        """Note the use of a conversation; renew also the ranks of those in its session that await tools."""
        one.used_s = time.monotonic()
        self._known[one.number] = one
        self._known.move_to_end(one.number)
        self._numbered[one.number] = one
        self._rank(one)
        for other in self._awaited.get((one.owner, one.session), {}).values():
            self._rank(other)
            other.num_favours += other is not one
        if front is not None:
            front.rank = self._clock + front.work
            if one.session or one.num_turns > 1:
                self._pin(front, one.used_s)

    def _rank(self, one: Conversation) -> None:
        before, one.rank = one.rank, self._clock + one.work * _weight(one)
        if one.rank < before:
            self._lowered.append(one.number)

    def _pin(self, front: Front, now: float) -> None:
        self._num_pinned += 0 if front.number in self._pinned else front.num_blocks
        self._pinned[front.number] = front
        self._pinned.move_to_end(front.number)
        front.until_s = now + self._alive_seconds
        self._unpin(now)

    def _unpin(self, now: float) -> None:
        """Unpin fronts, the least recently used first: expired ones, and more while pinned ones take too many pages."""
        while self._pinned:
            number, front = next(iter(self._pinned.items()))
            if front.until_s > now and self._num_pinned <= self._most_pinned:
                return
            del self._pinned[number]
            self._num_pinned -= front.num_blocks
            self._lowered.append(number)

    def _forget_some(self) -> None:
        """Forget the least recently used conversations beyond `_MOST_KNOWN`, and unused fronts if there are many."""
        while len(self._known) > _MOST_KNOWN:
            one = next((one for one in self._known.values() if not one.num_running), None)
            if one is None:
                break
            self.forget(one)
        if len(self._fronts) > self._most_fronts:
            for digest, front in list(self._fronts.items()):
                if front.number not in self._pinned and not front.num_running:
                    del self._fronts[digest], self._numbered[front.number]
                    self._lowered.append(front.number)
            self._most_fronts = max(_MOST_KNOWN, 2 * len(self._fronts))


def _weight(one: Conversation | Front) -> float:
    return _EXPECTED if isinstance(one, Conversation) and one.is_awaited else 1.0

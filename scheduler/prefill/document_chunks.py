"""Document chunks of requests: which are there, which to compute before a request begins, and which to store.

Invariants: a request that waits for a chunk holds it in the library, so it is there when the prompt begins. A chunk
that cannot be kept is computed as plain text. Chunks to store are overtaken by a bounded number of requests. Any
thread may name chunks.
"""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from gpu.fusion.fusion_plan import VANILLA, FusionSettings, UnknownPolicyError, chooses_tokens, plan_fused
from gpu.profiles import FULL_ATTENTION
from gpu.sampling_params import SamplingParams
from gpu.step import DENSE, NO_SLOT, FusionPlan, PlacedChunk, PrefillJob, PrefillPrompt
from scheduler.messages import ChunksStored, ChunkStats, DropChunks, EngineRequest, StoreChunks
from scheduler.prefill.job_in_progress import JobInProgress
from scheduler.sequences.capacity import TooLargeError
from scheduler.sequences.sequence import MOST_OVERTAKEN, Sequence
from transfer.chunks.chunk_format import ChunkKey, name_chunk, name_digest
from transfer.chunks.chunk_library import ChunkLibrary

_NOT_STORED = "the disk has no room or refused (documents.folder, documents.disk_limit_gib), see the server's log"
_NOT_KEPT = "keys and values could not be kept (in 8 bits, those that are not finite cannot), see the server's log"
_DROPPED = "the document was deleted meanwhile"
_MOST_LOOKED_FOR = 64  # chunks at a turn of the loop, on the disk


@dataclass(eq=False, slots=True)
class _Storing:
    """A `StoreChunks` that is not answered yet. `left`: chunks that it waits for."""

    request_id: str
    left: int
    num_stored: int = 0
    num_known: int = 0
    reason: str = ""


@dataclass(eq=False, slots=True)
class _ToStore:
    key: ChunkKey
    token_ids: np.ndarray
    storing: _Storing


@dataclass(slots=True)
class _Computing:
    """A chunk in a job, and who is told what becomes of it."""

    entry: JobInProgress
    num_bytes: int
    storing: list[_Storing] = field(default_factory=list)
    is_dropped: bool = False  # since it was planned; it is deleted once it is written


class Documents:
    """The document chunks of an engine: those to compute, to store and to read. kv_key: all that chunks depend on
    beside weights, tokens and salt. windows: of the model's layers. is_loaded: whether a unit of (job, layer) waits for
    no disk.
    """

    def __init__(
        self, library: ChunkLibrary, kv_key: str, windows: tuple[int | None, ...], most_tokens: int,
        is_loaded: Callable[[int, int], bool],
    ) -> None:  # fmt: skip
        self.is_loaded = is_loaded
        self._library = library
        self._kv_key = kv_key
        self._windows = windows
        self._most_tokens = most_tokens  # of a job, and so of a chunk
        self._computing: dict[str, _Computing] = {}
        self._to_store: deque[_ToStore] = deque()
        self._num_overtaken = 0  # requests that began before what is to be stored
        self._writing: list[tuple[Future[bool], _Storing]] = []
        self._stored: list[ChunksStored] = []
        self._dropping: dict[str, Future[None]] = {}  # what is still found, and will not be

    def stats(self) -> ChunkStats:
        store = self._library.store
        counts = store.counts()
        return ChunkStats(
            memory_bytes=store.bytes_in_memory,
            written=counts["stored"],
            refused=counts["refused"],
            evicted=counts["evicted"],
            set_aside=counts["set_aside"],
            lost=counts["lost"],
        )

    # --- requests -----------------------------------------------------------------------------------------------------

    def check(self, request: EngineRequest) -> None:
        """Raise TooLargeError for what cannot be served, by name."""
        fusion = request.fusion
        if fusion is None:
            return
        try:
            chooses = chooses_tokens(fusion.policy)
        except UnknownPolicyError as error:
            raise TooLargeError(str(error)) from None
        num_layers = len(self._windows)
        if chooses and fusion.select_layer >= num_layers:
            raise TooLargeError(
                f"fusion.select_layer: asked {fusion.select_layer}, the model has layers 0 to {num_layers - 1}; name "
                "one of them"
            )

    def name_chunks(self, sequence: Sequence) -> None:
        """Name the chunks of a prompt. One that is scored is computed whole, and has none."""
        request = sequence.request
        fusion = request.fusion
        if fusion is None or fusion.policy == VANILLA or sequence.needs_every_token:
            return
        end = 0
        for span in request.chunks:
            if not end <= span.begin < span.end <= len(sequence.prompt) or span.end - span.begin > self._most_tokens:
                continue  # what is no chunk, or none that a job has room for, is text
            end = span.end
            key = self._name(sequence.prompt[span.begin : span.end], span.salt)
            sequence.chunks.append(PlacedChunk(span.begin, span.end, key))

    def hold(self, sequence: Sequence) -> None:
        """Hold the chunks that a sequence will read."""
        if sequence.holds_chunks or not sequence.chunks:
            return
        sequence.holds_chunks = True
        sequence.missing = [chunk for chunk in sequence.chunks if not self._library.hold(chunk.key)]
        if sequence.num_found_tokens is None:  # later it finds what was computed for itself
            found = (chunk.end - chunk.begin for chunk in sequence.chunks if chunk not in sequence.missing)
            sequence.num_found_tokens = sum(found)

    def release(self, sequence: Sequence) -> None:
        """Release the chunks that a sequence has read, or will not."""
        if sequence.holds_chunks:
            sequence.holds_chunks = False
            for chunk in sequence.chunks:
                self._library.release(chunk.key)

    def retract(self, sequence: Sequence) -> None:
        """Withdraw the chunks of a sequence that gave no finite logits, so that they are computed anew."""
        for chunk in sequence.chunks:
            self._library.store.delete(chunk.key)

    def is_ready(self, sequence: Sequence) -> bool:
        """Return whether all of its chunks are there; those that cannot be kept are taken out."""
        if not sequence.missing:
            return True
        sequence.missing = [chunk for chunk in sequence.missing if not self._library.is_there(chunk.key)]
        for chunk in [one for one in sequence.missing if self._library.is_refused(one.key)]:
            sequence.missing.remove(chunk)
            sequence.chunks.remove(chunk)
            self._library.release(chunk.key)
        return not sequence.missing

    def plan(self, sequence: Sequence, begin: int) -> FusionPlan | None:
        """Return how its prompt is computed from `begin` on, which no chunk begins before."""
        fusion = sequence.request.fusion
        if fusion is None or not sequence.chunks:
            return None
        settings = FusionSettings(fusion.policy, fusion.ratio, fusion.select_layer, fusion.seam_tokens)
        plan = plan_fused(
            settings, sequence.chunks, begin, sequence.num_tokens, sequence.num_prompt_tokens, self._windows
        )
        if plan is not None and not sequence.output:  # one that gave way has been told of
            num_left = len(sequence.prompt) - begin - plan.num_computed  # of chunks, as they were computed alone
            num_found = sequence.num_found_tokens or 0
            num_reused = max(0, min(num_found - plan.num_chosen, num_left))
            sequence.figures |= {"reused_tokens": num_reused, "recomputed_tokens": plan.num_chosen}
        return plan

    # --- chunks to compute --------------------------------------------------------------------------------------------

    def next_job(
        self, job_id: int, waiting: Iterable[Sequence], room_tokens: int, is_idle: bool
    ) -> JobInProgress | None:
        """Return the next chunks to compute, of what fits, or None.

        Chunks that the first waiting requests need come first. Chunks to be stored come when the engine is idle, or
        after they were overtaken often enough. Only the first request's chunks may exceed the library's room.
        """
        prompts: list[PrefillPrompt] = []
        most, room_bytes, is_due = min(self._most_tokens, room_tokens), self._room_bytes, self.is_due
        entry = JobInProgress(
            PrefillJob(job_id, ()), [], DENSE, 1, len(self._windows), is_background=is_idle and not is_due
        )
        num_to_store = len(self._to_store)
        while (is_idle or is_due) and room_bytes > 0 and (found := self._next_to_store(most)) is not None:
            most -= found.key.num_tokens
            room_bytes -= self._add(found.key, entry, [found.storing])
            prompts.append(_prompt_of(found.key, found.token_ids))
        if len(self._to_store) < num_to_store:
            self._num_overtaken = 0
        for number, sequence in enumerate(one for one in waiting if one.chunks):
            self.is_ready(
                sequence
            )  # nobody else looks while no slot is free, and what is there would be computed again
            for chunk in sequence.missing:
                known = self._computing.get(chunk.key.name)
                if known is not None:
                    known.entry.is_background = False
                elif chunk.key.num_tokens <= most and (number == 0 or room_bytes > 0):
                    most -= chunk.key.num_tokens
                    room_bytes -= self._add(chunk.key, entry, [])
                    prompts.append(_prompt_of(chunk.key, sequence.prompt[chunk.begin : chunk.end]))
        entry.job = PrefillJob(job_id, tuple(prompts))
        return entry if prompts else None

    def count_begun(self) -> None:
        """Count a request that begins: chunks to store wait for a bounded number of them."""
        background = [one.entry for one in self._computing.values() if one.entry.is_background]
        self._num_overtaken += bool(self._to_store or background)
        if self._num_overtaken >= MOST_OVERTAKEN:
            for entry in background:
                entry.is_background = False

    @property
    def is_due(self) -> bool:
        """Return whether no request begins before chunks that are to be stored: there is room for them."""
        return bool(self._to_store) and self._num_overtaken >= MOST_OVERTAKEN and self._room_bytes > 0

    @property
    def _room_bytes(self) -> int:
        """Return the room for chunks that are computed from now on."""
        return self._library.room_bytes - sum(one.num_bytes for one in self._computing.values())

    def _add(self, key: ChunkKey, entry: JobInProgress, storing: list[_Storing]) -> int:
        """Add a chunk that is computed in that job; return how many bytes it is."""
        num_bytes = self._library.store.folder.shape.chunk_bytes(key.num_tokens)
        self._computing[key.name] = _Computing(entry, num_bytes, storing)
        return num_bytes

    def _next_to_store(self, most_tokens: int) -> _ToStore | None:
        """Return the first that is not known by now, if it is no longer than that; those before it are counted."""
        for _ in range(min(_MOST_LOOKED_FOR, len(self._to_store))):
            if self._to_store[0].key.num_tokens > most_tokens:
                return None
            one = self._to_store.popleft()
            known = self._computing.get(one.key.name)
            if known is not None:
                known.storing.append(one.storing)
                known.is_dropped = False
            elif self._is_dropping(one.key):
                return one
            elif (written := self._library.find_written(one.key)) is not None:
                self._writing.append((written, one.storing))
            elif self._library.has(one.key):
                one.storing.num_known += 1
                self._end_chunk(one.storing)
            else:
                return one
        return None

    def _is_dropping(self, key: ChunkKey) -> bool:
        self._dropping = {name: gone for name, gone in self._dropping.items() if not gone.done()}
        return key.name in self._dropping

    # --- chunks to store ----------------------------------------------------------------------------------------------

    def store(self, message: StoreChunks) -> None:
        """Store chunks; one of `take_stored` is the answer."""
        storing = _Storing(message.request_id, len(message.chunks) + 1)
        for packed in message.chunks:
            token_ids = np.frombuffer(packed, np.int32)
            if 0 < len(token_ids) <= self._most_tokens:
                self._to_store.append(_ToStore(self._name(token_ids, message.salt), token_ids, storing))
                continue
            storing.reason = f"a chunk of {len(token_ids)} tokens; wanted 1 to {self._most_tokens}"
            self._end_chunk(storing)
        self._end_chunk(storing)

    def drop(self, message: DropChunks) -> None:
        """Drop chunks that no document has: they are not stored any more, and those that are leave the store."""
        names = set()
        for chunk in message.chunks:
            kv_key = self._salted(chunk.salt)
            key = name_digest(chunk.tokens, chunk.num_tokens, self._library.store.folder.shape, kv_key)
            names.add(key.name)
            if key.name in self._computing:
                self._computing[key.name].is_dropped = True
            self._dropping[key.name] = self._library.store.delete(key)
        dropped = [one for one in self._to_store if one.key.name in names]
        self._to_store = deque(one for one in self._to_store if one.key.name not in names)
        for one in dropped:
            one.storing.reason = _DROPPED
            self._end_chunk(one.storing)

    def take_stored(self) -> list[ChunksStored]:
        """Return the answers since the last call."""
        stored, self._stored = self._stored, []
        return stored

    def look(self) -> None:
        """See what has become of chunks that were computed, and of those that were written."""
        for key, written in self._library.take_done():
            known = self._computing.pop(key.name, None)
            if known is not None and known.is_dropped:
                self._dropping[key.name] = self._library.store.delete(key)
            for storing in known.storing if known is not None else ():
                if written is None:
                    storing.reason = _NOT_KEPT
                    self._end_chunk(storing)
                else:
                    self._writing.append((written, storing))
        for written, storing in [one for one in self._writing if one[0].done()]:
            self._writing.remove((written, storing))
            storing.num_stored += written.result()
            storing.reason = storing.reason if written.result() else _NOT_STORED
            self._end_chunk(storing)

    @property
    def has_work(self) -> bool:
        """Return whether something is to be computed or written, or told of."""
        return bool(self._to_store or self._computing or self._writing or self._stored)

    def _end_chunk(self, storing: _Storing) -> None:
        storing.left -= 1
        if not storing.left:
            self._stored.append(
                ChunksStored(storing.request_id, storing.num_stored, storing.num_known, storing.reason)
            )  # fmt: skip

    def _name(self, token_ids: np.ndarray, salt: str) -> ChunkKey:
        return name_chunk(token_ids, self._library.store.folder.shape, self._salted(salt))

    def _salted(self, salt: str) -> str:
        return f"{self._kv_key}:{salt}"


def _prompt_of(key: ChunkKey, token_ids: np.ndarray) -> PrefillPrompt:
    greedy = SamplingParams(temperature=0.0)
    return PrefillPrompt(NO_SLOT, token_ids, 0, len(token_ids), greedy, FULL_ATTENTION, capture=key)

"""Find the document chunks of requests in the library, and choose which to compute before a request and to store.

Invariants: a request that waits for a chunk holds it in the library, so the chunk is there when its prefill starts. A
chunk that cannot be kept is computed as plain text. Chunks to store are overtaken by a bounded number of requests.
`name_chunks` may be called by any thread.
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
_MOST_LOOKED_FOR = 64  # chunks that one turn of the loop looks up on disk


@dataclass(eq=False, slots=True)
class _Storing:
    """A `StoreChunks` message that is not answered yet. left: chunks that it waits for."""

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
    """A chunk in a job, and the `StoreChunks` that wait for it."""

    entry: JobInProgress
    num_bytes: int
    storing: list[_Storing] = field(default_factory=list)
    is_dropped: bool = False  # dropped since it was planned: it is deleted once it is written


class Documents:
    """The document chunks of an engine: those to compute, to store and to read.

    kv_key: names what chunks depend on besides weights, tokens and salt. windows: the window of each layer, or None.
    most_tokens: of a job, and so of a chunk. is_loaded(job, layer): whether the chunks of a unit are in memory.
    """

    def __init__(
        self, library: ChunkLibrary, kv_key: str, windows: tuple[int | None, ...], most_tokens: int,
        is_loaded: Callable[[int, int], bool],
    ) -> None:  # fmt: skip
        self.is_loaded = is_loaded
        self._library = library
        self._kv_key = kv_key
        self._windows = windows
        self._most_tokens = most_tokens
        self._computing: dict[str, _Computing] = {}
        self._to_store: deque[_ToStore] = deque()
        self._num_overtaken = 0  # requests that started before the chunks to be stored
        self._writing: list[tuple[Future[bool], _Storing]] = []
        self._stored: list[ChunksStored] = []
        self._dropping: dict[str, Future[None]] = {}  # chunks that are being deleted but can still be found

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
        """Raise TooLargeError for an unknown policy or a layer that the model lacks."""
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
        """Name the chunks of a prompt. A scored prompt is computed whole, so its chunks are ignored."""
        request = sequence.request
        fusion = request.fusion
        if fusion is None or fusion.policy == VANILLA or sequence.needs_every_token:
            return
        end = 0
        for span in request.chunks:
            if not end <= span.begin < span.end <= len(sequence.prompt) or span.end - span.begin > self._most_tokens:
                continue  # invalid spans, and chunks that are too long for a job, are computed as text
            end = span.end
            key = self._name(sequence.prompt[span.begin : span.end], span.salt)
            sequence.chunks.append(PlacedChunk(span.begin, span.end, key))

    def hold(self, sequence: Sequence) -> None:
        """Hold the chunks that a sequence will read."""
        if sequence.holds_chunks or not sequence.chunks:
            return
        sequence.holds_chunks = True
        sequence.missing = [chunk for chunk in sequence.chunks if not self._library.hold(chunk.key)]
        if sequence.num_found_tokens is None:  # later calls also find chunks that were computed for this sequence
            found = (chunk.end - chunk.begin for chunk in sequence.chunks if chunk not in sequence.missing)
            sequence.num_found_tokens = sum(found)

    def release(self, sequence: Sequence) -> None:
        """Release the chunks of a sequence that has read them or will not do so."""
        if sequence.holds_chunks:
            sequence.holds_chunks = False
            for chunk in sequence.chunks:
                self._library.release(chunk.key)

    def retract(self, sequence: Sequence) -> None:
        """Delete the chunks of a sequence that gave no finite logits, so that they are computed again."""
        for chunk in sequence.chunks:
            self._library.store.delete(chunk.key)

    def is_ready(self, sequence: Sequence) -> bool:
        """Return whether all of a sequence's chunks are in the library; those that cannot be kept become text."""
        if not sequence.missing:
            return True
        sequence.missing = [chunk for chunk in sequence.missing if not self._library.is_there(chunk.key)]
        for chunk in [one for one in sequence.missing if self._library.is_refused(one.key)]:
            sequence.missing.remove(chunk)
            sequence.chunks.remove(chunk)
            self._library.release(chunk.key)
        return not sequence.missing

    def plan(self, sequence: Sequence, begin: int) -> FusionPlan | None:
        """Plan how a prompt with chunks is computed from token `begin` on; no chunk begins before it. None: plainly."""
        fusion = sequence.request.fusion
        if fusion is None or not sequence.chunks:
            return None
        settings = FusionSettings(fusion.policy, fusion.ratio, fusion.select_layer, fusion.seam_tokens)
        plan = plan_fused(
            settings, sequence.chunks, begin, sequence.num_tokens, sequence.num_prompt_tokens, self._windows
        )
        if plan is not None and not sequence.output:  # else it was preempted, and its figures were reported
            num_left = len(sequence.prompt) - begin - plan.num_computed  # tokens reused as they were stored
            num_found = sequence.num_found_tokens or 0
            num_reused = max(0, min(num_found - plan.num_chosen, num_left))
            sequence.figures |= {"reused_tokens": num_reused, "recomputed_tokens": plan.num_chosen}
        return plan

    # --- chunks to compute --------------------------------------------------------------------------------------------

    def next_job(
        self, job_id: int, waiting: Iterable[Sequence], room_tokens: int, is_idle: bool
    ) -> JobInProgress | None:
        """Return a job of the next chunks to compute, as many as fit; None: there are none.

        They are chunks that the first waiting requests need. Chunks to be stored are added if the engine is idle, or
        once they were overtaken often enough. Only the first request's chunks may exceed the library's room.
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
            self.is_ready(sequence)  # admission does not ask while no slot is free; chunks in the library are skipped
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
        """Count a request that starts; after enough of them, chunks to store no longer run in the background."""
        background = [one.entry for one in self._computing.values() if one.entry.is_background]
        self._num_overtaken += bool(self._to_store or background)
        if self._num_overtaken >= MOST_OVERTAKEN:
            for entry in background:
                entry.is_background = False

    @property
    def is_due(self) -> bool:
        """Return whether chunks to be stored come before the next request: they were overtaken enough and have room."""
        return bool(self._to_store) and self._num_overtaken >= MOST_OVERTAKEN and self._room_bytes > 0

    @property
    def _room_bytes(self) -> int:
        """Return the library's room for further chunks, apart from those being computed."""
        return self._library.room_bytes - sum(one.num_bytes for one in self._computing.values())

    def _add(self, key: ChunkKey, entry: JobInProgress, storing: list[_Storing]) -> int:
        """Note a chunk that this job computes, and return its bytes."""
        num_bytes = self._library.store.folder.shape.chunk_bytes(key.num_tokens)
        self._computing[key.name] = _Computing(entry, num_bytes, storing)
        return num_bytes

    def _next_to_store(self, most_tokens: int) -> _ToStore | None:
        """Return the first chunk to store that must be computed; None: there is none, or it has more tokens than that.

        Chunks before it that are already stored, or being computed or written, are taken off the queue and counted.
        """
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
        """Queue chunks to be stored; `take_stored` returns the answer."""
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
        """Drop chunks that no document contains: take them off the queue, and delete those that are stored."""
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
        """Return the answers to `store` since the last call."""
        stored, self._stored = self._stored, []
        return stored

    def look(self) -> None:
        """Handle chunks whose computation or writing has finished since the last call."""
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
        """Return whether chunks are to be computed or written, or answers to be sent."""
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

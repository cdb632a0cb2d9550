"""Keep all segments: allocate them from slabs, fill them, build their tables, copy them, and wait for them.

A layer's tables are built once, after all its rows have landed and while no copy needs its codes. A build that fails is
logged and counted, and that layer is read exactly. Called from one thread. A thread of its own waits for fills to land,
in the order of their announcement; jobs run in the builder's threads.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import Condition, Thread

from cpu.builder import PIECE_TOKENS, Builder, BuildJob, Pace
from cpu.segment import Centre, Fill, Segment, TableState
from cpu.segment_jobs import Source, build_layer, copy_layer
from transfer.host_memory import bytes_of_centre, lay_out_layer
from transfer.host_tier import Filled
from transfer.slabs import SlabPool
from transfer.tier_shape import TierShape

POLL_S = 0.05  # how often a copy that waits for rows to land lets its thread do other work

_FINAL = (TableState.BUILT, TableState.FAILED)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoreCounts:
    """The store's counts. segments: alive. tables_built, tables_failed: layers of segments. leases: see `cpu.lease`."""

    segments: int
    tables_built: int
    tables_failed: int
    leases: int


class SegmentStore:
    """All segments of a tier. `changed` guards what background threads change, and is notified then."""

    def __init__(self, pool: SlabPool, builder: Builder) -> None:
        self.changed = Condition()
        self._pool, self._builder = pool, builder
        self._segments: list[Segment] = []
        self._tables_built = self._tables_failed = 0
        self.num_leases = 0
        self._announced: SimpleQueue[tuple[Fill, Filled] | None] = SimpleQueue()
        self._lander = Thread(target=self._land, name="lander", daemon=True)
        self._lander.start()

    @property
    def counts(self) -> StoreCounts:
        with self.changed:
            return StoreCounts(len(self._alive()), self._tables_built, self._tables_failed, self.num_leases)

    def new_segments(self, shape: TierShape, rooms: Sequence[tuple[int, Centre | None]]) -> list[Segment]:
        """Return new segments, each held once by the caller. rooms: their capacities, and a centre or None for a new
        one.

        Their memory is allocated in the background, layer by layer. Raises HostMemoryError without making any.
        """
        fresh = sum(centre is None for _, centre in rooms)
        layer_sizes = [lay_out_layer(shape, capacity).num_bytes for capacity, _ in rooms]
        slabs = self._pool.claim([bytes_of_centre(shape)] * fresh + layer_sizes * len(shape.layers))
        centres, layers = iter(slabs[:fresh]), slabs[fresh:]
        segments = []
        with self.changed:
            for index, (capacity, centre) in enumerate(rooms):
                centre = Centre(shape, next(centres), self._pool) if centre is None else centre
                own = layers[index :: len(rooms)]
                segments.append(Segment(shape, capacity, centre, own, self._pool, self.changed))
                segments[-1].want()
            self._segments = [*self._alive(), *segments]
        return segments

    def prepare(self, shape: TierShape, capacity: int, count: int) -> None:
        """Allocate memory ahead for `count` more segments, as far as there is room. Any context may get it."""
        self._pool.prepare([lay_out_layer(shape, capacity).num_bytes] * (count * len(shape.layers)))

    def wait_for_doomed(self) -> None:
        """Wait until unwanted segments have released their memory: their copies have landed, and the steps that read
        them are answered. The caller must hold none of them.
        """
        self._builder.drop_unwanted()
        with self.changed:
            self.changed.wait_for(
                lambda: not any(segment.is_alive and not segment.is_wanted() for segment in self._segments)
            )

    def fill(self, segment: Segment, layers: Sequence[int], begin: int, end: int, done: Filled) -> None:
        """Announce rows that are being copied. They have landed once `done` is reached."""
        fill = Fill(segment, tuple(layers), begin, end)
        self._announce(fill)
        self._announced.put((fill, done))

    def seal(self, segment: Segment) -> None:
        """Seal a segment: it no longer grows, and its tables are built as soon as its rows have landed."""
        with self.changed:
            if segment.is_open:
                segment.seal()
                for layer in range(len(segment.shape.layers)):
                    self._build_if_due(segment, layer)

    def copy(self, sources: Sequence[Source], target: Segment) -> None:
        """Copy rows and codes of other segments into a new one, from its first token on, in the background."""
        end = sum(source.end - source.begin for source in sources)
        for layer in range(len(target.shape.layers)):
            fill = Fill(target, (layer,), 0, end)
            self._announce(fill)
            with self.changed:
                for source in sources:
                    source.segment.hold()
                    source.segment.copies[layer] += 1
            pieces = self._copy_landed(sources, target, layer)
            self._builder.submit(
                BuildJob(
                    urgency=(int(target.is_background), 0),
                    name=f"copy layer {layer} of {end} tokens",
                    pieces=pieces,
                    pace=Pace(PIECE_TOKENS),
                    is_wanted=target.is_wanted,
                    finish=partial(self._copied, sources, fill, None),
                    fail=partial(self._copied, sources, fill),
                )
            )

    def wait_for_rows(self, segment: Segment, layers: Sequence[int], tokens: int) -> None:
        """Wait until the first `tokens` tokens have landed. Raises the error of a copy that failed."""
        for layer in layers:
            assert segment.announced[layer] >= tokens, "rows: reserved, but no fill was announced for them"
        with self.changed:
            self.changed.wait_for(lambda: segment.error is not None or _have_landed(segment, layers, tokens))
            if segment.error is not None:
                raise segment.error

    def is_ready(self, segment: Segment, tokens: int, with_tables: bool) -> bool:
        """Return whether the first `tokens` tokens of all layers have landed and, with `with_tables`, whether all
        tables are built or have failed. Also True if waiting would raise.
        """
        layers = range(len(segment.shape.layers))
        with self.changed:
            if segment.error is not None:
                return True
            is_there = all(announced >= tokens for announced in segment.announced)
            is_there = is_there and _have_landed(segment, layers, tokens)
            return is_there and (not with_tables or all(state in _FINAL for state in segment.tables))

    def wait_for_tables(self, segment: Segment) -> None:
        """Wait until each layer of a whole segment has tables or has failed to build them, or its rows are lost."""
        assert segment.is_whole, "tables: of a segment whose fills were all announced"
        with self.changed:
            self.changed.wait_for(lambda: segment.error is not None or all(state in _FINAL for state in segment.tables))

    def shutdown(self) -> None:
        """Stop the thread once all announced fills have landed."""
        self._announced.put(None)
        self._lander.join()

    def _alive(self) -> list[Segment]:
        return [segment for segment in self._segments if segment.is_alive]

    def _announce(self, fill: Fill) -> None:
        with self.changed:
            fill.segment.hold()
            for layer in fill.layers:
                fill.segment.announced[layer] += fill.end - fill.begin
                fill.segment.fills[layer].append(fill)

    def _land(self) -> None:
        while (announced := self._announced.get()) is not None:
            fill, done = announced
            try:
                done.synchronize()
            except Exception as error:  # the outermost handler of this thread; readers of the rows get the error
                log.exception("fill_failed layers=%s", fill.layers)
                self._landed(fill, error)
            else:
                self._landed(fill, None)

    def _landed(self, fill: Fill, error: Exception | None) -> None:
        segment = fill.segment
        with self.changed:
            segment.error = segment.error or error
            for layer in fill.layers:
                segment.fills[layer].remove(fill)
                self._build_if_due(segment, layer)
            segment.let_go()

    def _build_if_due(self, segment: Segment, layer: int) -> None:
        """Submit the build of a layer's tables, if it is due. Called with the condition held."""
        is_due = (
            segment.has_codes
            and segment.announced[layer] == segment.sealed_tokens
            and not segment.fills[layer]
            and not segment.copies[layer]
            and segment.tables[layer] is TableState.CODES
            and segment.error is None
            and segment.is_wanted()
        )
        if not is_due:
            return
        segment.tables[layer] = TableState.BUILDING
        segment.hold()
        pace = Pace(PIECE_TOKENS)
        self._builder.submit(
            BuildJob(
                urgency=(int(segment.is_background), segment.used),
                name=f"tables layer {layer} of {segment.used} tokens",
                pieces=build_layer(segment, layer, pace),
                pace=pace,
                is_wanted=segment.is_wanted,
                finish=partial(self._built, segment, layer, TableState.BUILT),
                fail=lambda _: self._built(segment, layer, TableState.FAILED),
            )
        )

    def _built(self, segment: Segment, layer: int, state: TableState) -> None:
        with self.changed:
            segment.tables[layer] = state
            self._tables_built += state is TableState.BUILT
            self._tables_failed += state is TableState.FAILED
            segment.let_go()

    def _copy_landed(self, sources: Sequence[Source], target: Segment, layer: int) -> Iterator[None]:
        for source in sources:
            while not self._is_readable(source, layer):
                yield
        yield from copy_layer(sources, target, layer)

    def _is_readable(self, source: Source, layer: int) -> bool:
        with self.changed:
            self.changed.wait_for(lambda: _have_landed(source.segment, (layer,), source.end), POLL_S)
            if source.segment.error is not None:
                raise source.segment.error
            return _have_landed(source.segment, (layer,), source.end)

    def _copied(self, sources: Sequence[Source], fill: Fill, error: Exception | None) -> None:
        (layer,) = fill.layers
        with self.changed:
            for source in sources:
                source.segment.copies[layer] -= 1
                self._build_if_due(source.segment, layer)
                source.segment.let_go()
        self._landed(fill, error)


def _have_landed(segment: Segment, layers: Sequence[int], tokens: int) -> bool:
    return all(fill.begin >= tokens for layer in layers for fill in segment.fills[layer])

"""Hold a host context: its pieces in order, each the first tokens of a segment, and how each piece is read.

A piece holds its segment. Whether a piece is sampled changes only when the context grows.
"""

from dataclasses import dataclass, field
from itertools import count

import numpy as np

from cpu.segment import Segment, TableState
from transfer.host_memory import SEGMENT_TOKENS
from transfer.reading import Reading

MERGE_DUE_SHARE = 16  # a merge is due once the context has grown by 1/16 of it: the copy has ended long before

_new_version = count().__next__


@dataclass(eq=False, slots=True)
class ContextPiece:
    """The first `tokens` of a segment. reading: SAMPLE uses its tables, once they are built."""

    segment: Segment
    tokens: int
    reading: Reading


@dataclass(frozen=True, slots=True)
class Merge:
    """Pieces `[first, last)` of a context that are being copied into one segment, to take effect at `due_tokens`."""

    first: int
    last: int
    target: Segment
    due_tokens: int


@dataclass(eq=False, slots=True)
class Context:
    """A host context.

    version: changes with the pieces; no two contexts or states share one.
    steps: answered steps with estimated errors.
    noted: float32 `[layers, heads]`, the error that each head's last full read found.
    in_full: bool `[layers, heads]`, the heads that read all keys (`cpu.audits`).
    """

    context_id: int
    reading: Reading
    pieces: list[ContextPiece] = field(default_factory=list)
    merge: Merge | None = None
    version: int = field(default_factory=_new_version)
    steps: int = 0
    noted: np.ndarray | None = None
    in_full: np.ndarray | None = None

    @property
    def tokens(self) -> int:
        return sum(piece.tokens for piece in self.pieces)

    def touch(self) -> None:
        self.version = _new_version()

    def first_pieces(self, num_tokens: int) -> list[ContextPiece]:
        """Return the pieces of the first `num_tokens`, the last one cut."""
        assert 0 <= num_tokens <= self.tokens, "context: no more tokens are asked for than it has"
        cut, left = [], num_tokens
        for piece in self.pieces:
            if left == 0:
                break
            cut.append(ContextPiece(piece.segment, min(piece.tokens, left), piece.reading))
            left -= cut[-1].tokens
        return cut

    def take_readings(self, source: "Context") -> None:
        """Copy the results of full reads, and the step count, from the context that this one was forked from.

        The contexts may differ by now, but until a head's next full read the source's result is better than none. Later
        results are each context's own.
        """
        self.steps, self.in_full = source.steps, source.in_full
        self.noted = None if source.noted is None else source.noted.copy()

    def sample_sealed(self) -> None:
        """From now on, sample the pieces whose segments are whole."""
        for piece in self.pieces:
            if piece.segment.has_codes and piece.segment.is_whole:
                piece.reading = self.reading

    def find_merge(self) -> tuple[int, int] | None:
        """Return the range of pieces to merge, from the end of the context, or None. All are sampled and share one
        centre, and the sum of those behind a piece is at least half of it.

        So a token is copied only a few times, and few small segments remain. These would cost as many offsets as large
        ones.
        """
        last = len(self.pieces)
        while last > 0 and not self.pieces[last - 1].reading.has_tables:
            last -= 1
        if last == 0 or not self.pieces[last - 1].segment.is_whole:
            return None
        first, tokens = last - 1, self.pieces[last - 1].tokens
        centre = self.pieces[last - 1].segment.centre
        while first > 0:
            piece = self.pieces[first - 1]
            if not (piece.reading.has_tables and piece.segment.is_whole and piece.segment.centre is centre):
                break
            if piece.tokens > 2 * tokens or piece.tokens + tokens > SEGMENT_TOKENS:
                break
            first, tokens = first - 1, tokens + piece.tokens
        return (first, last) if last - first > 1 else None

    def can_merge(self, first: int, last: int) -> bool:
        """Return whether all tables of these pieces are built: if one failed, its codes are lost."""
        states = [state for piece in self.pieces[first:last] for state in piece.segment.tables]
        return all(state is TableState.BUILT for state in states)

"""Windows of a runner without a model: rings of token ids, which must be the last tokens of who holds them."""

import numpy as np

from gpu.step import StateMove, WindowBranch, WindowWrite


class TokenWindows:
    """`count` rings of `num_cells` token ids, of a layer that sees `window_tokens`."""

    def __init__(self, count: int, num_cells: int, window_tokens: int) -> None:
        self.rings: list[list[int | None]] = [[None] * num_cells for _ in range(count)]
        self.window_tokens = window_tokens
        self.of_slot: dict[int, int] = {}

    def write(self, writes: list[WindowWrite]) -> None:
        for write in writes:
            if write.source is not None:
                self.rings[write.window] = list(self.rings[write.source])
            elif write.slot is not None:
                self.rings[write.window] = [None] * len(self.rings[write.window])
            self.of_slot = {slot: window for slot, window in self.of_slot.items() if window != write.window}
            if write.slot is not None:
                self.of_slot[write.slot] = write.window

    def put(self, slot: int, position: int, token: int) -> None:
        window = self.of_slot.get(slot)
        if window is not None:  # None: it was given to another, and nobody listens to what is drawn here
            self.rings[window][position % len(self.rings[window])] = token

    def settle(self, slot: int, num_cells: int) -> None:
        """The first so many cells are of tokens that were drawn; others of a draft."""

    def leave(self, branch: WindowBranch, begin: int, tokens: np.ndarray) -> None:
        """What a prompt computes in front of a branch, `[begin, branch.end)`, is in the branch's ring."""
        assert branch.window not in self.of_slot.values()
        for position in range(begin, branch.end):
            self.rings[branch.window][position % len(self.rings[branch.window])] = int(tokens[position])

    def check_row(self, slot: int, tokens: list[int | None]) -> None:
        """What a row of a step sees, which has others behind it."""
        self.check(slot, tokens)

    def check(self, slot: int, tokens: list[int | None]) -> None:
        """What a layer sees behind the last of these tokens, all in front of the next one, is there."""
        if slot in self.of_slot:
            ring, end = self.rings[self.of_slot[slot]], len(tokens)
            seen = range(max(0, end - self.window_tokens + 1), end)
            assert [ring[position % len(ring)] for position in seen] == [tokens[position] for position in seen]


class TokenStates(TokenWindows):
    """`count` states: all tokens so far, in order, of who holds one. A state of another position or text is seen.
    num_places: for copies in host memory.
    """

    def __init__(self, count: int, num_places: int = 0) -> None:
        super().__init__(count, 0, 1 << 30)
        self.states: list[list[int] | None] = [None] * count
        self.places: list[list[int] | None] = [None] * num_places
        self.num_moved_up = 0

    def write(self, writes: list[WindowWrite | StateMove]) -> None:
        for write in writes:
            if isinstance(write, StateMove):
                if write.is_up:
                    assert self.places[write.place] is not None, "nothing was left at that place"
                    self.states[write.state] = list(self.places[write.place])
                    self.num_moved_up += 1
                else:
                    assert write.state not in self.of_slot.values(), (
                        "a state that somebody writes to is copied to the host"
                    )
                    self.places[write.place] = list(self.states[write.state] or [])
                continue
            self.states[write.window] = None if write.source is None else list(self.states[write.source] or [])
            super().write([write])

    def put(self, slot: int, position: int, token: int) -> None:
        state = self.of_slot.get(slot)
        if state is not None:
            held = self.states[state] if position else []
            assert held is not None, "a state is read that nobody wrote"
            assert len(held) == position, "a state is behind another token"
            self.states[state] = [*held, token]

    def settle(self, slot: int, num_cells: int) -> None:
        if slot in self.of_slot:
            del self.states[self.of_slot[slot]][num_cells:]

    def leave(self, branch: WindowBranch, begin: int, tokens: np.ndarray) -> None:
        assert branch.window not in self.of_slot.values()
        assert begin < branch.end <= len(tokens)
        self.states[branch.window] = tokens[: branch.end].tolist()

    def check(self, slot: int, tokens: list[int | None]) -> None:
        if slot in self.of_slot and tokens:
            assert self.states[self.of_slot[slot]] == tokens, "a state is of another text"

    def check_row(self, slot: int, tokens: list[int | None]) -> None:
        if slot in self.of_slot:
            assert self.states[self.of_slot[slot]][: len(tokens)] == tokens, "a row's state is of another text"

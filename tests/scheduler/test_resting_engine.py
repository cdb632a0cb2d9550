"""An engine without work gives its heap back once, when it has rested, and again only behind more work."""

import pytest

from scheduler.engine import engine_loop
from scheduler.engine.engine_loop import Loop
from scheduler.messages import Shutdown


class Turns:
    """An engine, its connection and its pulse: of each turn whether there is work, and what comes."""

    def __init__(self, turns: list[tuple[bool, list[object]]]) -> None:
        self.turns = iter(turns)
        self.residence = None
        self.scheduler = self
        self.given: list[int] = []
        self.turn = -1

    def begin_turn(self) -> None:
        self.turn += 1
        self.has_work, self.messages = next(self.turns)

    def receive(self, wait_seconds: float) -> list[object]:
        assert (wait_seconds == 0.0) == self.has_work
        return self.messages

    def step(self) -> list[object]:
        return []

    take_stored = progress = step

    def stats(self) -> None:
        pass


def test_the_heap_is_given_back_at_rest_once_for_each_time_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = (False, [Shutdown()])
    turns = Turns([(False, []), (False, []), (True, []), (True, []), (False, []), (False, []), ends])
    monkeypatch.setattr(engine_loop, "SessionDesk", lambda residence: residence)
    monkeypatch.setattr(engine_loop, "give_back_heap", lambda: turns.given.append(turns.turn))
    loop = Loop(turns, turns, turns, None)
    loop._sessions = type("Desk", (), {"take_answers": lambda self: []})()
    loop.run()
    assert turns.given == [0, 4]

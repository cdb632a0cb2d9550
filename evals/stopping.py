"""Stop a run early, between two samples or batches: after a number of seconds, or at a signal.

Invariant: the first TERM or INT only asks for the end; a second one ends the process as usual.
"""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class RunCut(Exception):
    """Raised to end a run early; the message is the reason. Finished records are kept."""


class Stop:
    """Decides when a run ends; runners call `check`. seconds: the time limit from now on; None: none. reason: why the
    run was cut, or None.
    """

    def __init__(self, seconds: float | None) -> None:
        self.reason: str | None = None
        self._signal: str | None = None
        self._seconds, self._begin = seconds, time.monotonic()

    def ask(self, name: str) -> None:
        """Record that the signal `name` came; the next `check` raises RunCut."""
        self._signal = name

    def check(self) -> None:
        """Raise RunCut if it is time to end."""
        self.check_room(0.0)

    def check_room(self, seconds: float) -> None:
        """Raise RunCut if it is time to end, or will be within `seconds`."""
        if self._signal is not None:
            self.cut(f"signal {self._signal}")
        if self._seconds is not None and time.monotonic() - self._begin + seconds > self._seconds:
            self.cut(f"--seconds {self._seconds:g} are over")

    def cut(self, reason: str) -> None:
        """Raise RunCut with this reason."""
        self.reason = reason
        raise RunCut(reason)


@contextmanager
def stopping(seconds: float | None) -> Iterator[Stop]:
    """Yield a Stop that SIGTERM and SIGINT trigger inside the context.

    Outside the main thread only `seconds` counts, because signals do not arrive there.
    """
    stop = Stop(seconds)
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, _: FrameType | None) -> None:
        stop.ask(signal.Signals(number).name.removeprefix("SIG"))
        restore()

    for number in before:
        signal.signal(number, note)
    try:
        yield stop
    finally:
        restore()

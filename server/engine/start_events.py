"""Define the events of a server's start, which are shown to a person."""

from collections.abc import Callable
from dataclasses import dataclass

from scheduler.messages import Ready


@dataclass(frozen=True, slots=True)
class Listening:
    """The API listens; the model may still load.

    path: of a request that generates text.
    model: the model's name.
    needs_key: whether requests need a bearer key.
    has_page: whether there is a page at `/`.
    """

    url: str
    path: str
    model: str
    needs_key: bool
    has_page: bool


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of the engine's start, and its progress in [0, 1]."""

    name: str
    fraction: float


OnStart = Callable[[Listening | Stage | Ready], None]

"""Define the events of a start, for whoever shows them to a person."""

from collections.abc import Callable
from dataclasses import dataclass

from scheduler.messages import Ready


@dataclass(frozen=True, slots=True)
class Listening:
    """Announce that the API listens, though the model still loads.

    path: of a request that generates text.
    model: its name.
    needs_key: whether a request wants a bearer key.
    has_page: whether there is a page at `/`.
    """

    url: str
    path: str
    model: str
    needs_key: bool
    has_page: bool


@dataclass(frozen=True, slots=True)
class Stage:
    """Name a stage of the engine's start, and how far it is, in [0, 1]."""

    name: str
    fraction: float


OnStart = Callable[[Listening | Stage | Ready], None]

"""Run work that grows with a text in threads: tokenising, templates, long answers.

Their number does not grow with that of clients. A short text never waits for a long one, and no text waits for more
than `_MOST_WAITING` others. Long texts from which nothing is generated are processed one at a time, so that a thread is
left for prompts. No text waits for a grammar, which may take seconds, or for a chat template.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import ParamSpec, TypeVar

from server.api_error import queue_full

P = ParamSpec("P")
R = TypeVar("R")

INLINE_CHARS = 2000  # done in less time than a thread takes to wake
_SHORT_CHARS = 65536  # some 20 ms
_THREADS = 2  # of each lane; the tokenizer, and who waits for a grammar, leave the interpreter to others
_TEMPLATE_THREADS = 8  # they wait for child processes
_MOST_WAITING = 256


class TextPool:
    def __init__(self, retry_after_seconds: int) -> None:
        self._short = ThreadPoolExecutor(_THREADS, "short-text")
        self._long = ThreadPoolExecutor(_THREADS, "long-text")
        self._grammars = ThreadPoolExecutor(_THREADS, "grammar")
        self._templates = ThreadPoolExecutor(_TEMPLATE_THREADS, "template")
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        self._retry_after_seconds = retry_after_seconds

    async def run(self, size: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function, in a thread if by its `size` (characters or tokens) it may take long. Raises
        ApiError 429.
        """
        if size < INLINE_CHARS:
            return function(*args, **kwargs)
        lane = self._short if size <= _SHORT_CHARS else self._long
        with self._wait():
            return await asyncio.get_running_loop().run_in_executor(lane, lambda: function(*args, **kwargs))

    async def check(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function that checks a grammar, in a thread. Raises ApiError 429."""
        with self._wait():
            return await asyncio.get_running_loop().run_in_executor(self._grammars, lambda: function(*args, **kwargs))

    async def render(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function that renders a chat template, in a thread. Raises ApiError 429."""
        with self._wait():
            return await asyncio.get_running_loop().run_in_executor(self._templates, lambda: function(*args, **kwargs))

    @asynccontextmanager
    async def one_at_a_time(self, size: int) -> AsyncIterator[None]:
        """Wait for a turn to call `run` for a text from which nothing is generated; long texts take turns.

        Raises ApiError 429.
        """
        if size <= _SHORT_CHARS:
            yield
            return
        with self._wait():
            await self._turn.acquire()
        try:
            yield
        finally:
            self._turn.release()

    @contextmanager
    def _wait(self) -> Iterator[None]:
        if self._num_waiting >= _MOST_WAITING:
            raise queue_full(f"server: {self._num_waiting} texts wait to be tokenised", self._retry_after_seconds)
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1

    def shutdown(self) -> None:
        """Drop all work that has not begun, without waiting."""
        self._short.shutdown(wait=False, cancel_futures=True)
        self._long.shutdown(wait=False, cancel_futures=True)
        self._grammars.shutdown(wait=False, cancel_futures=True)
        self._templates.shutdown(wait=False, cancel_futures=True)

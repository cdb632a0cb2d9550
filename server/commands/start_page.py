"""Print what `tandem serve` does while it starts: a line for each stage with its seconds, and last a request to try.

On a terminal, the current stage has a line of its own that is updated. Elsewhere a line every few seconds reports its
progress.
"""

import json
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from scheduler.messages import Ready
from server.engine.start_events import Listening, Stage

STAGES = {  # the engine's words, and ours
    "starting": "starting the engine",
    "host_attention": "preparing attention in host memory",
    "draft_model": "loading the model that drafts",
    "documents": "reading the weights' digest for documents",
    "disk": "looking through contexts on disk",
    "weights": "loading the weights",
    "products": "preparing the library's products",
    "kernels": "preparing kernels",
    "graphs": "capturing graphs",
    "rehearsal": "timing prompts",
}
COMPILED = {"host_attention", "products", "kernels"}  # some of their fractions are of functions that are compiled
TOLD_AGAIN_SECONDS = 4.0
QUESTION = "What is the capital of France?"
QUESTION_TOKENS = 32
KEY = "KEY"  # where a reader puts a key of their own
_ANY_ADDRESS = {"://0.0.0.0:": "://127.0.0.1:", "://[::]:": "://[::1]:"}
_WIDTH = 44


class StartPage:
    """Prints the stages of a start. Use `stage` for work of the caller and `show` for events of the server. Leaving the
    context ends the line that is updated.
    """

    def __init__(self, console: Console, began_s: float) -> None:
        """Start the page. `began_s`: when the start began, by `time.monotonic`."""
        columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
        self._progress = Progress(
            *columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self._console = console
        self._task: TaskID | None = None
        self._stage = ""
        self._start_s = began_s
        self._began_s = self._told_s = time.monotonic()
        self._address: Listening | None = None

    def __enter__(self) -> "StartPage":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Show the stage while the block runs, and its line if the block ends well."""
        self._begin(name)
        yield
        self._end()

    def say(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)

    def show(self, event: Listening | Stage | Ready) -> None:
        """Show what the server reports."""
        match event:
            case Listening():
                self._address = event
                self.say(f"  the API listens at {event.url} (503 until the model is ready)")
            case Stage():
                self._show_stage(event)
            case Ready():
                self._end()
                self._show_ready(event)

    def _show_stage(self, event: Stage) -> None:
        name = STAGES.get(event.name, event.name)
        if self._stage != name:
            self._end()
            self._begin(name)
        if event.fraction >= 1:
            self._end()
            return
        what = name
        if event.fraction > 0:
            compiled = " (compiled once, later starts find them)" if event.name in COMPILED else ""
            what = f"{name}: {100 * event.fraction:.0f} %{compiled}"
        if self._task is not None:
            self._progress.update(self._task, description=what)
        elif time.monotonic() - self._told_s >= TOLD_AGAIN_SECONDS:
            self._told_s = time.monotonic()
            self.say(f"  {escape(what)}, {self._told_s - self._began_s:.0f} s so far")

    def _show_ready(self, ready: Ready) -> None:
        address = self._address
        assert address is not None, "what serves has an address before it is ready"
        url = address.url
        for any_address, own in _ANY_ADDRESS.items():
            url = url.replace(any_address, own)
        is_chat = address.path.endswith("/chat/completions")
        asked = {"messages": [{"role": "user", "content": QUESTION}]} if is_chat else {"prompt": QUESTION}
        body = json.dumps({"model": address.model, **asked, "max_tokens": QUESTION_TOKENS})
        headers = [f"authorization: Bearer {KEY}"] if address.needs_key else []
        words = [f"{url}{address.path}"]
        for header in [*headers, "content-type: application/json"]:
            words += ["-H", header]
        request = " ".join(shlex.quote(word) for word in ("curl", *words, "-d", body))
        seconds = time.monotonic() - self._start_s
        page = f", or {url} in a browser" if address.has_page else ""
        self.say(f"  talk to it: tandem chat --url {url}{page}")
        self.say(
            f"[bold]ready[/] in {seconds:.1f} s: {escape(address.model)}, contexts of {ready.max_context_tokens:,} "
            f"tokens, at {url}; try: {escape(request)}"
        )

    def _begin(self, name: str) -> None:
        self._stage = name
        self._began_s = self._told_s = time.monotonic()
        if self._console.is_terminal:
            self._progress.start()
            self._task = self._progress.add_task(name, total=None)

    def _end(self) -> None:
        if self._stage:
            seconds = time.monotonic() - self._began_s
            self._close()
            self.say(f"  {escape(self._stage):<{_WIDTH}} {seconds:5.1f} s")
            self._stage = ""

    def _close(self) -> None:
        if self._task is not None:
            self._progress.stop()
            self._progress.remove_task(self._task)
            self._task = None

"""Show a progress bar, from the first report of the work to its end. Only on a terminal."""

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class WorkBar:
    """A progress bar: `show` updates it and `close` removes it, both any number of times. unit: what is counted."""

    def __init__(self, unit: str, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f} of {task.total:,.0f} " + unit),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._shown = console.is_terminal
        self._task: TaskID | None = None

    def __enter__(self) -> "WorkBar":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def show(self, stage: str, done: float, total: float) -> None:
        if not self._shown:
            return
        if self._task is None:
            self._progress.start()
            self._task = self._progress.add_task(stage, total=total)
        self._progress.update(self._task, description=stage, completed=done, total=total)

    def close(self) -> None:
        if self._task is not None:
            self._progress.stop()
            self._progress.remove_task(self._task)
            self._task = None

"""Collect a test file when its turn comes, in the process that runs it, where several processes share the files.

xdist has each process collect everything first: 24 seconds each. Here its unit is a file, so a process imports what it
runs. Options that choose tests (`-m`, `-k`) apply once a file is collected. A test that is named by itself (`::`) is
collected as ever.
"""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.file_order import sort_items


class FileItem(pytest.Item):
    """All tests of one file, as one unit for the scheduler."""

    def runtest(self) -> None:
        """Never called: `_run_file` stands for it."""
        raise AssertionError("a file's tests run one by one")

    def reportinfo(self) -> tuple[Path, int, str]:
        """Return where it stands, for reports of a process that ends in it."""
        return self.path, 0, self.name


class LazyFile(pytest.File):
    """A test file that is not imported yet."""

    def collect(self) -> Iterator[FileItem]:
        """Yield the file as one item, which plugins' time limits leave alone: its tests have their own."""
        item = FileItem.from_parent(self, name=self.name, nodeid=self.nodeid)
        item.add_marker(pytest.mark.timeout(0))
        yield item


class FilesReported(set[str]):
    """Which files tests were reported of, where pytest counts tests: progress is then of files, as its items are."""

    def add(self, test: object) -> None:
        """Note the file of a test."""
        super().add(str(test).split("::")[0])


def is_lazy(config: pytest.Config) -> bool:
    """Return whether several processes run what is asked for, and that is whole files."""
    is_shared = hasattr(config, "workerinput") or bool(config.getoption("numprocesses", None))
    return is_shared and not any("::" in name for name in config.args)


def pytest_sessionstart(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and is_lazy(session.config):
        reporter._progress_nodeids_reported = FilesReported()


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> Iterator[None]:
    found = yield
    return [LazyFile.from_parent(parent, path=file_path)] if found and is_lazy(parent.config) else found


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around those that choose by marks and names, which files have none of
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    files = [item for item in items if isinstance(item, FileItem)]
    items[:] = [item for item in items if not isinstance(item, FileItem)]
    yield
    items += files
    if hasattr(config, "workerinput"):
        sort_items(items, config.rootpath)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if not isinstance(item, FileItem):
        return None
    _run_file(item, nextitem)
    return True


def _run_file(asked: FileItem, following: pytest.Item | None) -> None:
    """Collect the file's tests and run them. following: the item after it, for which shared fixtures are kept."""
    session, hook = asked.session, asked.config.hook
    place = session.items.index(asked)
    items = _collect(asked)
    for number, item in enumerate(items):
        session.items[place] = item  # xdist compares each report's name with that of the item at this place
        hook.pytest_runtest_protocol(item=item, nextitem=items[number + 1] if number + 1 < len(items) else following)
        if session.shouldfail or session.shouldstop:
            break
    session.items[place] = asked
    if not items:  # else its last test has done so
        session._setupstate.teardown_exact(following)


def _collect(asked: FileItem) -> list[pytest.Item]:
    session = asked.session
    gc.collect()
    gc.disable()  # it would look at the objects that imports make, again and again
    try:
        module = pytest.Module.from_parent(asked.parent.parent, path=asked.path)
        items = list(session.genitems(module))
        session.config.hook.pytest_collection_modifyitems(session=session, config=session.config, items=items)
    finally:
        gc.freeze()
        gc.enable()
    return items

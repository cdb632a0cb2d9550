"""Share the suite's hooks: tests that need a GPU are skipped without one, and memory is kept small."""

from tests.conftest import (
    _heap_is_frozen,
    _torch_begins_with_one_thread,
    pytest_collection,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_runtest_teardown,
    pytest_terminal_summary,
)

__all__ = [
    "_heap_is_frozen",
    "_torch_begins_with_one_thread",
    "pytest_collection",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_runtest_teardown",
    "pytest_terminal_summary",
]

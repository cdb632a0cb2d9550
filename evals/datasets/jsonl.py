"""Read rows of a JSONL file, and report rows that are not as published."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, row) of each line that is not blank.

    Raises ValueError at a line that is not a JSON object.
    """
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not JSON ({error}); wanted one object on each line") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}:{number}: got {type(row).__name__}, wanted an object on each line")
            yield number, row


def field(path: Path, number: int, row: dict[str, Any], *names: str) -> Any:
    """Return the first of the named fields that the row has. Raises ValueError if it has none of them."""
    for name in names:
        if name in row:
            return row[name]
    raise ValueError(f"{path}:{number}: no field {' or '.join(names)}; the row has {', '.join(row)}")


def texts(path: Path, number: int, row: dict[str, Any], name: str) -> list[str]:
    """Return a field that is a list of texts, one or more. Raises ValueError for anything else."""
    found = field(path, number, row, name)
    if not isinstance(found, list) or not found or not all(isinstance(text, str) for text in found):
        raise ValueError(f"{path}:{number}: {name} is {found!r}; wanted a list of texts, one or more")
    return found

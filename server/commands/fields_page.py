"""Write the tables of request fields in `docs/API.md`: `python -m server.commands.fields_page docs/API.md`.

They are made from `server/bodies/field_table.py` and stand between two marks. A test compares them.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from server.bodies.field_table import ROUTES
from server.bodies.fields import Each, Fate, Fields, Free, Neutral, Served

BEGIN = "<!-- Written by `make docs` from server/bodies/field_table.py. -->"
END = "<!-- The end of what `make docs` writes. -->"


def write_tables() -> str:
    """Return the tables in Markdown: plainly served fields, those with words of their own, without effect, refused."""
    rows = list(_all_rows())
    return "\n".join([*_write_plain(rows), *_write_own(rows), *_write_free(rows), *_write_refused(rows)])


def replace_tables(page: str) -> str:
    """Return the page with the tables as they are now. Raises ValueError if a mark is missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"wanted the marks {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{write_tables()}\n{END}{after}"


def _all_rows() -> Iterator[tuple[str, str, Fate]]:
    """Yield the route, the path (`messages[].content[].text`) and the fate of every field."""
    for route, fields in ROUTES.items():
        for path, fate in _walk(fields, ""):
            yield route, path, fate


def _walk(fields: Fields, above: str) -> Iterator[tuple[str, Fate]]:
    for name, fate in fields.fates.items():
        path = f"{above}{name}"
        if isinstance(fate, Fields | Each):
            yield path, Served()
            inside, mark = (fate.item, "[].") if isinstance(fate, Each) else (fate, ".")
            yield from _walk(inside, path + mark)
        else:
            yield path, fate


def _write_plain(rows: list[tuple[str, str, Fate]]) -> list[str]:
    lines = ["| route | fields that are served as their API describes them |", "|---|---|"]
    for route in ROUTES:
        plain = (path for at, path, fate in rows if at == route and isinstance(fate, Served) and not fate.what)
        names = [path for path in plain if "." not in path]
        lines.append(f"| `{route}` | {', '.join(f'`{name}`' for name in names)} |")
    return [*lines, ""]


def _write_own(rows: list[tuple[str, str, Fate]]) -> list[str]:
    found = [(path, fate.what, at) for at, path, fate in rows if isinstance(fate, Served) and fate.what]
    return _write_grouped("what a field does beyond its API", found)


def _write_free(rows: list[tuple[str, str, Fate]]) -> list[str]:
    found = [(path, fate.reason, at) for at, path, fate in rows if isinstance(fate, Free)]
    return _write_grouped("why a field has no effect", found)


def _write_refused(rows: list[tuple[str, str, Fate]]) -> list[str]:
    found = []
    for at, path, fate in rows:
        if isinstance(fate, Neutral):
            values = " or ".join(f"`{msgspec.json.encode(value).decode()}`" for value in fate.values)
            found.append((path, fate.reason + (f" (accepted: {values})" if values else ""), at))
    return _write_grouped("why a field is refused", found)


def _write_grouped(title: str, found: list[tuple[str, str, str]]) -> list[str]:
    """Return the lines of a table of (path, text, route), with one row for fields that share text and routes."""
    routes_of: dict[tuple[str, str], list[str]] = {}
    for path, text, route in found:
        routes_of.setdefault((path, text), []).append(route)
    paths_of: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (path, text), routes in routes_of.items():
        paths_of.setdefault((text, tuple(routes)), []).append(path)
    lines = [f"| field | {title} | routes |", "|---|---|---|"]
    for (text, where), paths in paths_of.items():
        names = ", ".join(f"`{path}`" for path in paths)
        lines.append(f"| {names} | {text} | {', '.join(f'`{_shorten(route)}`' for route in where)} |")
    return [*lines, ""]


def _shorten(route: str) -> str:
    return route.removeprefix("/v1").removeprefix("/")


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(replace_tables(page.read_text()))

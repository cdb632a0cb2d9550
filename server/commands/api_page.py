"""Write the tables of `docs/API.md` from the declared routes: `python -m server.commands.api_page docs/API.md`.

The tables stand between two marks; a test compares them with the page.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from server.bodies.fields import Each, Fields, NoEffect, Refused, Rule, Served
from server.routes.catalogue import find_routes, tables_by_path
from server.routes.route import Route

BEGIN = "<!-- Written by `make docs` from the routes in server/routes. -->"
END = "<!-- The end of what `make docs` writes. -->"


def write_tables(routes: Sequence[Route] | None = None) -> str:
    """Return the tables in Markdown: the routes, then the fields by what becomes of them."""
    routes = find_routes() if routes is None else routes
    tables = tables_by_path(routes)
    rows = [(path, name, rule) for path, table in tables.items() for name, rule in _walk(table, "")]
    lines = [*_write_routes(routes), *_write_plain(list(tables), rows), *_write_own(rows)]
    return "\n".join([*lines, *_write_without_effect(rows), *_write_refused(rows)])


def replace_tables(page: str) -> str:
    """Return the page with the tables as they are now. Raises ValueError if a mark is missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"page: a mark is missing; wanted {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{write_tables()}\n{END}{after}"


def _walk(table: Fields[Any], above: str) -> Iterator[tuple[str, Rule]]:
    """Yield the name (`messages[].content[].text`) and the rule of every field."""
    for name, rule in table.rules.items():
        path = f"{above}{name}"
        if isinstance(rule, Fields | Each):
            yield path, Served()
            inside, mark = (rule.item, "[].") if isinstance(rule, Each) else (rule, ".")
            yield from _walk(inside, path + mark)
        else:
            yield path, rule


def _write_routes(routes: Sequence[Route]) -> list[str]:
    lines = ["| route | what it does | body | answer | errors |", "|---|---|---|---|---|"]
    for route in routes:
        if route.summary:
            body = f"`{route.body.struct.__name__}`" if route.body is not None else ""
            answers = [f"`{kind.__name__}`" for kind in (route.answer, route.event) if kind is not None]
            errors = ", ".join(map(str, sorted(route.errors)))
            name = f"`{route.method.upper()} {route.path}`"
            lines.append(f"| {name} | {route.summary} | {body} | {', '.join(answers) or 'text'} | {errors} |")
    return [*lines, ""]


def _write_plain(paths: list[str], rows: list[tuple[str, str, Rule]]) -> list[str]:
    lines = ["| route | fields that are served as their API describes them |", "|---|---|"]
    for route in paths:
        plain = (path for at, path, rule in rows if at == route and isinstance(rule, Served) and not rule.what)
        names = [path for path in plain if "." not in path]
        lines.append(f"| `{route}` | {', '.join(f'`{name}`' for name in names)} |")
    return [*lines, ""]


def _write_own(rows: list[tuple[str, str, Rule]]) -> list[str]:
    found = [(path, rule.what, at) for at, path, rule in rows if isinstance(rule, Served) and rule.what]
    return _write_grouped("what a field does beyond its API", found)


def _write_without_effect(rows: list[tuple[str, str, Rule]]) -> list[str]:
    found = [(path, rule.reason, at) for at, path, rule in rows if isinstance(rule, NoEffect)]
    return _write_grouped("why a field has no effect", found)


def _write_refused(rows: list[tuple[str, str, Rule]]) -> list[str]:
    found = []
    for at, path, rule in rows:
        if isinstance(rule, Refused):
            values = " or ".join(f"`{msgspec.json.encode(value).decode()}`" for value in rule.values)
            found.append((path, rule.reason + (f" (accepted: {values})" if values else ""), at))
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

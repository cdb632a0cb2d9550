"""Find the routes: every module of this package whose name ends in `_routes` has them as `ROUTES`."""

from collections.abc import Iterable, Sequence
from importlib import import_module
from pkgutil import walk_packages
from typing import Any

from fastapi import FastAPI

from server import routes
from server.bodies.fields import Fields
from server.routes.route import Route


def find_routes() -> tuple[Route, ...]:
    """Import the modules of routes, and return what they declare, in the order of their names."""
    found: list[Route] = []
    for module in walk_packages(routes.__path__, f"{routes.__name__}."):
        if module.name.endswith("_routes"):
            found += import_module(module.name).ROUTES
    return tuple(found)


def add_routes(app: FastAPI, routes: Iterable[Route]) -> None:
    for route in routes:
        app.add_api_route(route.path, route.answer_request, methods=[route.method.upper()], include_in_schema=False)


def tables_by_path(routes: Sequence[Route]) -> dict[str, Fields[Any]]:
    """Return the tables of the bodies by path; a body that several paths take stands under the first one."""
    found: dict[str, Fields[Any]] = {}
    for route in routes:
        if route.body is not None and route.body not in found.values():
            found[route.path] = route.body
    return found


def nested_tables(routes: Iterable[Route]) -> list[Fields[Any]]:
    """Return the tables of the routes' bodies and of everything nested in them, each once."""
    tables = [table for route in routes if route.body is not None for table in route.body.walk()]
    return list(dict.fromkeys(tables))

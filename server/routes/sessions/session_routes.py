"""Serve `/v1/sessions`: what is kept of the asking key's conversations, where, and by name; and forget a session."""

from typing import Any

import msgspec

from scheduler.messages import SavedContext
from server.api_error import ApiError
from server.bodies.schema_limits import Tree
from server.routes.route import OF_MODEL, Call, Route, path_parameter
from server.routes.sessions.session_answers import DeletedSession, SessionList


async def list_sessions(call: Call[Any]) -> Tree:
    """Return the sessions, those used last first; of a model that is unloaded, what is on disk. Raises ApiError 503
    while it loads, or if it was not loaded since the server's start.
    """
    kept = await call.service.supervisor.ask_sessions(call.owner)
    sessions: dict[str, list[Tree]] = {}
    for one in kept.conversations:
        tree = msgspec.to_builtins(one)
        sessions.setdefault(tree.pop("session"), []).append(tree)
    for name in kept.disk_bytes:  # of which nothing else is known, as after a restart
        sessions.setdefault(name, [])
    data = [
        {"id": name, "object": "session", "conversations": ones, "disk_bytes": kept.disk_bytes.get(name, 0)}
        for name, ones in sessions.items()
    ]
    return {"object": "list", "data": data, "saved": [_describe_saved(one) for one in kept.saved]}


def _describe_saved(one: SavedContext) -> Tree:
    sizes = {"tokens": one.tokens, "disk_tokens": one.disk_tokens, "disk_bytes": one.disk_bytes}
    return {"id": one.name, "object": "saved_context", "session": one.session, **sizes, "created": one.created_s}


async def delete_session(call: Call[Any]) -> Tree:
    """Forget what is kept of a session. Raises ApiError 404 for one of which nothing is known."""
    supervisor, session_id = call.service.supervisor, call.path_value("session_id")
    kept = await supervisor.ask_sessions(call.owner)
    if session_id not in {one.session for one in kept.conversations} | kept.disk_bytes.keys():
        what = f"session_id: no stored session {session_id[:80]!r}; GET /v1/sessions lists them"
        raise ApiError(404, what, param="session_id", code="session_not_found")
    gone = await supervisor.ask_sessions(call.owner, session_id)
    told = {"id": session_id, "object": "session", "deleted": True}
    return told | {"forgotten_tokens": gone.forgotten_tokens}


ROUTES = (
    Route(
        "get",
        "/v1/sessions",
        list_sessions,
        "What is kept of conversations, and where",
        SessionList,
        parameters=OF_MODEL,
    ),
    Route(
        "delete",
        "/v1/sessions/{session_id:path}",
        delete_session,
        "Forget a session",
        DeletedSession,
        parameters=(path_parameter("session_id", {"type": "string", "minLength": 1}), *OF_MODEL),
    ),
)

"""`/v1/sessions`: what is kept of the conversations of the key that asks, and where; and forget a session."""

from typing import Any

import msgspec

from server.api_error import ApiError
from server.bodies.schema_limits import Tree
from server.routes.route import Call, Route, path_parameter
from server.routes.sessions.session_answers import DeletedSession, SessionList


async def list_sessions(call: Call[Any]) -> Tree:
    """Return the sessions, those used last first. Raises ApiError 503 unless the engine serves."""
    kept = await call.service.supervisor.ask_sessions(call.owner)
    sessions: dict[str, list[Tree]] = {}
    for one in kept.conversations:
        tree = msgspec.to_builtins(one)
        sessions.setdefault(tree.pop("session"), []).append(tree)
    data = [{"id": name, "object": "session", "conversations": ones} for name, ones in sessions.items()]
    return {"object": "list", "data": data}


async def delete_session(call: Call[Any]) -> Tree:
    """Forget what is kept of a session. Raises ApiError 404 for one of which nothing is known."""
    supervisor, session_id = call.service.supervisor, call.path_value("session_id")
    known = {one.session for one in (await supervisor.ask_sessions(call.owner)).conversations}
    if session_id not in known:
        what = f"session_id: nothing is kept of {session_id[:80]!r}; GET /v1/sessions lists what is"
        raise ApiError(404, what, param="session_id", code="session_not_found")
    gone = await supervisor.ask_sessions(call.owner, session_id)
    told = {"id": session_id, "object": "session", "deleted": True}
    return told | {"forgotten_tokens": gone.forgotten_tokens}


ROUTES = (
    Route("get", "/v1/sessions", list_sessions, "What is kept of conversations, and where", SessionList),
    Route(
        "delete",
        "/v1/sessions/{session_id:path}",
        delete_session,
        "Forget a session",
        DeletedSession,
        parameters=(path_parameter("session_id", {"type": "string", "minLength": 1}),),
    ),
)

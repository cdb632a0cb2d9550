"""Serve `/v1/saved_contexts`: list and delete contexts saved by name: a key's own, or all with an admin's key."""

from typing import Any

from server.api_error import ApiError, forbidden
from server.bodies.schema_limits import Tree
from server.routes.route import OF_MODEL, Call, Route, path_parameter, query_parameter
from server.routes.sessions.session_answers import DeletedContext, SavedContextList
from server.routes.sessions.slot_bodies import NAME

_OWNER = query_parameter(
    "owner", {"type": "string", "description": "as the list has it; default: of the key that asks"}
)


async def list_saved(call: Call[Any]) -> Tree:
    """Return what the key that asks has saved; for an administrator's, what all keys have."""
    kept = await call.service.supervisor.ask_sessions(call.owner, of_all=call.is_administrator)
    data = [
        {
            "id": one.name,
            "object": "saved_context",
            "owner": one.owner,
            "key_is_known": one.owner in call.service.keys.owners,
            **{name: getattr(one, name) for name in ("session", "tokens", "disk_tokens", "disk_bytes")},
            "created": one.created_s,
        }
        for one in kept.saved
    ]
    return {"object": "list", "data": data}


async def delete_saved(call: Call[Any]) -> Tree:
    """Delete a saved context. Raises ApiError 403 for another key's, and 404 for one that is not there."""
    name, owner = call.path_value("filename"), call.request.query_params.get("owner", call.owner)
    if owner != call.owner and not call.is_administrator:
        raise forbidden("owner: another key's; wanted a key of server.admin_keys_file", "not_administrator")
    gone = await call.service.supervisor.ask_sessions(owner, forget_saved=name)
    if not gone.deleted:
        raise unknown_name(name)
    return {"id": name, "object": "saved_context", "deleted": True}


def unknown_name(name: str) -> ApiError:
    """Return the error for a name that nothing is saved by."""
    what = f"filename: no context is saved as {name[:80]!r}; GET /v1/saved_contexts lists them"
    return ApiError(404, what, param="filename", code="context_not_found")


ROUTES = (
    Route(
        "get",
        "/v1/saved_contexts",
        list_saved,
        "Contexts that were saved by name",
        SavedContextList,
        parameters=OF_MODEL,
    ),
    Route(
        "delete",
        "/v1/saved_contexts/{filename}",
        delete_saved,
        "Delete a saved context",
        DeletedContext,
        parameters=(path_parameter("filename", NAME), _OWNER, *OF_MODEL),
    ),
)

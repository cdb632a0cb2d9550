"""Serve `/slots`, as llama.cpp's server has it: conversations by number, and their contexts on disk by name."""

import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.responses import Response

from scheduler.messages import ContextSaved, ReadSaved, SaveContext, SavedTokens
from server.api_error import ApiError, invalid
from server.bodies.generation_bodies import CompletionBody
from server.bodies.schema_limits import Tree
from server.generation.event_stream import CLIENT_GONE, watched
from server.generation.generation import Disconnected, Job, collect
from server.generation.prompt_tokens import Prompt, check_room, context_of
from server.generation.session_name import MOST_CHARS
from server.routes.generate import start_generation
from server.routes.route import ENGINE_ERRORS, OF_MODEL, Call, Route, path_parameter
from server.routes.sessions.saved_routes import unknown_name
from server.routes.sessions.session_answers import Slot, SlotDone
from server.routes.sessions.slot_bodies import SLOT, SlotBody, check_name

_TOKEN_BYTES = 4
_NO_DISK = "slots: this deployment keeps no contexts on disk; add a section `disk` to save and restore by name"


async def list_slots(call: Call[Any]) -> Response | Tree:
    """Return the conversations of the key that asks, by number; of a model that is unloaded there are none."""
    kept = await call.service.supervisor.ask_sessions(call.owner)
    context = 0 if call.service.supervisor.limits is None else call.service.supervisor.limits.max_context_tokens
    slots = [
        {
            "id": one.slot,
            "n_ctx": context,
            "is_processing": one.running > 0,
            "session": one.session,
            **{name: getattr(one, name) for name in ("tokens", "device_tokens", "host_tokens", "disk_tokens")},
        }
        for one in kept.conversations
    ]
    found: Any = sorted(slots, key=lambda slot: int(str(slot["id"])))
    return Response(msgspec.json.encode(found), media_type="application/json")


async def change_slot(call: Call[SlotBody]) -> Response | Tree:
    """Save, restore or erase a conversation, as the query's `action` says. Raises ApiError."""
    given = call.request.query_params.get("action")
    actions: dict[str, Callable[[Call[SlotBody]], Awaitable[Response | Tree]]] = {
        "save": _save,
        "restore": _restore,
        "erase": _erase,
    }
    if given not in actions:
        raise invalid("action", f"got {str(given)[:80]!r}, wanted one of {', '.join(actions)}")
    return await actions[given](call)


async def _save(call: Call[SlotBody]) -> Tree:
    began, name, (slot, session) = time.monotonic(), check_name(call.body.filename), _slot_of(call)
    told = await call.service.supervisor.ask(
        lambda request_id: SaveContext(request_id, call.owner, name, slot, session), ContextSaved
    )
    if told.code == "no_disk":
        raise ApiError(501, _NO_DISK, code="disk_not_configured")
    if told.code == "unknown":
        raise _unknown_slot(call)
    if told.code == "running":
        what = "id_slot: the conversation runs; save it once its answer is complete"
        raise ApiError(409, what, param="id_slot", code="slot_is_processing")
    if told.code == "no_share":
        what = (
            "filename: nothing is saved: with what this key has saved it is more than a key may save "
            "(disk.saved_gib_a_key); delete what is not needed, DELETE /v1/saved_contexts/{filename}"
        )
        raise ApiError(507, what, param="filename", code="not_saved")
    if told.code:
        what = (
            "filename: nothing is saved: the context is shorter than a block (disk.block_tokens), or nothing of it is "
            "in memory any more, or there was no room on the disk (disk.limit_gib, disk.written_gib_a_day)"
        )
        raise ApiError(507, what, param="filename", code="not_saved")
    timings = {"save_ms": 1000 * (time.monotonic() - began)}
    counts = {"n_saved": told.num_tokens, "n_written": told.num_bytes}
    return {"id_slot": told.slot, "filename": name, **counts, "timings": timings}


async def _restore(call: Call[SlotBody]) -> Response | Tree:
    """Have the engine take the tokens of a saved context as a prompt that nothing is drawn from: it reads what is on
    disk of them.
    """
    began, name, (slot, session) = time.monotonic(), check_name(call.body.filename), _slot_of(call)
    saved = await call.service.supervisor.ask(lambda request_id: ReadSaved(request_id, call.owner, name), SavedTokens)
    if saved.code == "no_disk":
        raise ApiError(501, _NO_DISK, code="disk_not_configured")
    if saved.code:
        raise unknown_name(name)
    token_ids = list(memoryview(saved.tokens).cast("i"))
    prompt, limits = Prompt(token_ids, "", 0), call.service.supervisor.ready()
    body = CompletionBody(
        model=call.body.model, prompt=[], max_tokens=0, attention_profile=saved.profile,
        cache_salt=call.body.cache_salt, session_id=session or saved.session or None,
    )  # fmt: skip
    check_room("filename", prompt, context_of(body, limits))
    generation = start_generation(call, "slot", body, [Job(prompt, 0)], limits)
    generation.slot = slot
    await generation.submit(None, None, "filename")
    try:
        async with watched(call.request.receive, generation):
            await collect(generation)
    except Disconnected:
        return Response(status_code=CLIENT_GONE)
    where = generation.cached_from()
    return {
        "id_slot": max(slot, 0),
        "filename": name,
        "n_restored": len(token_ids),
        "n_read": math.ceil(where["disk"] / saved.block_tokens) * saved.block_bytes,
        **generation.cache_usage(),
        "timings": {"restore_ms": 1000 * (time.monotonic() - began)},
    }


async def _erase(call: Call[SlotBody]) -> Tree:
    slot, session = _slot_of(call)
    known = (await call.service.supervisor.ask_sessions(call.owner)).conversations
    found = next((one for one in known if one.slot == slot or (session and one.session == session)), None)
    if found is None:
        raise _unknown_slot(call)
    gone = await call.service.supervisor.ask_sessions(call.owner, forget_slot=found.slot)
    return {"id_slot": found.slot, "n_erased": gone.forgotten_tokens}


def _slot_of(call: Call[Any]) -> tuple[int, str]:
    """Return the number of a conversation, or -1 and the session that it is the last one of."""
    given = call.path_value("id_slot")
    if given.isascii() and given.isdigit() and len(given) < 10:
        return int(given), ""
    return -1, given[:MOST_CHARS]


def _unknown_slot(call: Call[Any]) -> ApiError:
    what = f"id_slot: no conversation is {call.path_value('id_slot')[:80]!r}; GET /slots lists those that are known"
    return ApiError(404, what, param="id_slot", code="slot_not_found")


_ACTION = {"name": "action", "in": "query", "required": True, "schema": {"enum": ["save", "restore", "erase"]}}
ROUTES = (
    Route(
        "get",
        "/slots",
        list_slots,
        "Conversations by number, as llama.cpp's server has them",
        list[Slot],
        parameters=OF_MODEL,
    ),
    Route(
        "post",
        "/slots/{id_slot}",
        change_slot,
        "Save a conversation's context on disk by name, restore it, or erase it",
        SlotDone,
        SLOT,
        {"filename": "notes.bin"},
        errors=(*ENGINE_ERRORS, 409, 501, 507),
        parameters=(path_parameter("id_slot", {"type": "string", "minLength": 1}), _ACTION, *OF_MODEL),
        is_body_optional=True,
    ),
)

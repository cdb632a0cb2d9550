"""Find out which session a request belongs to. Clients name it in several ways; none of them changes the answer.

A session is one piece of work of a person or an agent: its conversation, and those of the agents that it starts. The
cache of a waiting conversation is not evicted for others of the same session.
"""

import json
import re
from collections.abc import Mapping

from server.bodies.generation_bodies import GenerationBody

MOST_CHARS = 128
HEADERS = ("x-session-id", "x-claude-code-session-id", "session-id", "session_id", "x-session-affinity")
_IN_USER_ID = re.compile(r"_session_([0-9a-zA-Z-]+)$")  # Claude Code's, before it wrote JSON


def find_session(headers: Mapping[str, str], body: GenerationBody) -> str:
    """Return the name of a request's session, from a header or the body's fields; "" if it has none."""
    named = [headers.get(name) for name in HEADERS]
    found = next(filter(None, [*named, body.prompt_cache_key, body.session_id]), "")
    return found[:MOST_CHARS]


def session_in_user_id(user_id: str) -> str:
    """Return the session in the `metadata.user_id` of a request to `/v1/messages`; the whole id if none is marked."""
    try:
        tree = json.loads(user_id)
    except (ValueError, RecursionError):
        tree = None
    if isinstance(tree, dict) and isinstance(tree.get("session_id"), str):
        return str(tree["session_id"])
    marked = _IN_USER_ID.search(user_id)
    return user_id if marked is None else marked[1]

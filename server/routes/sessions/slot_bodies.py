"""Define the body of `POST /slots/{id_slot}`, and check the names that contexts may be saved by."""

import msgspec

from server.api_error import invalid
from server.bodies.fields import Fields, served
from server.bodies.generation_bodies import CacheSalt
from server.bodies.schema_limits import SchemaLimits

MOST_NAME_BYTES = 255
NAME = {"type": "string", "minLength": 1, "maxLength": MOST_NAME_BYTES}


class SlotBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    filename: str | None = None
    cache_salt: CacheSalt | None = None


SLOT = Fields(SlotBody, served("model", "filename", "cache_salt"), SchemaLimits(lambda limits: {"filename": NAME}))


def check_name(name: str | None) -> str:
    """Return the name that a context is saved by, which is no path. Raises ApiError 400."""
    if name is None:
        raise invalid("filename", "missing; wanted the name to save the context by, or to restore it from")
    is_text = all(char.isprintable() and char not in "/\\" for char in name)
    if not is_text or name.strip(" .") != name or not 1 <= len(name.encode("utf-8", "replace")) <= MOST_NAME_BYTES:
        what = (
            f"got {name[:80]!r}, wanted a name of at most {MOST_NAME_BYTES} bytes, and no path: printable, without / "
        )
        raise invalid("filename", f"{what}or \\, and no blank or dot at its ends")
    return name

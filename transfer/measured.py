"""Keep what engines measured of the machine when they started, for `tandem doctor` to print. No torch.

The file is in the user's cache folder, with one entry for each measurement and what it depends on. Engines measure
again at every start and never read it, so it may be deleted. If it cannot be written, a warning is logged.
"""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

MOST_ENTRIES = 64


def measured_path() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem" / "measured.json"


def read_measured(path: Path) -> list[dict[str, Any]]:
    """Return the entries, the latest last; empty if there is no file, or not one of this program."""
    try:
        entries = json.loads(path.read_text())
    except (OSError, ValueError):
        return []
    return [entry for entry in entries if _is_entry(entry)] if isinstance(entries, list) else []


def keep_measured(path: Path, what: str, of: Mapping[str, Any], result: Mapping[str, Any]) -> None:
    """Write the measurement `what` of the machine `of`, in place of an older one."""
    entry = json.loads(json.dumps({"what": what, "of": of, "result": result}))
    others = [one for one in read_measured(path) if (one["what"], one["of"]) != (entry["what"], entry["of"])]
    written = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        written.write_text(json.dumps([*others, entry][-MOST_ENTRIES:], indent=1) + "\n")
        written.replace(path)
    except OSError as error:
        log.warning("measurements event=not_saved path=%s reason=%s", path, error)


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and entry.keys() == {"what", "of", "result"} and isinstance(entry["of"], dict)

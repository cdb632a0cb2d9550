"""Make the reference tokenizer encode each capital letter as one token, like each digit.

Otherwise a name of random capitals is cut into other pieces at the start of an answer than in the document, and a small
model must learn to spell before it can copy. The invariant: ids and vocabulary stay; only merges that join two capitals
are removed.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

TWO_CAPITALS = re.compile("[A-Z]{2}")
TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"


def pair_of(merge: Any) -> tuple[str, str]:
    """Return the two sides of a merge, stored as a list of two or as one string."""
    first, second = merge.split(" ") if isinstance(merge, str) else merge
    return first, second


def split_capitals(stored: dict[str, Any]) -> dict[str, Any]:
    """Return the stored tokenizer without merges that give two capitals side by side."""
    model = stored["model"]
    kept = [merge for merge in model["merges"] if not TWO_CAPITALS.search("".join(pair_of(merge)))]
    return {**stored, "model": {**model, "merges": kept}}


def write_tokenizer(source: Path, folder: Path) -> Path:
    """Write one folder's tokenizer, with capitals split, to another folder, and return that folder."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = json.loads((source / TOKENIZER).read_text(encoding="utf-8"))
    (folder / TOKENIZER).write_text(json.dumps(split_capitals(stored), ensure_ascii=False), encoding="utf-8")
    shutil.copyfile(source / SETTINGS, folder / SETTINGS)
    return folder

"""Read the keys of a `config.json` that the transformers library knows, from JSON files.

`python -m gpu.model.library_key_search` writes these files: one here, and one in the folder of each family that
transformers has.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import gpu.model.families

FILE = Path(__file__).with_name("library_keys.json")


@cache
def read_library_keys() -> dict[str, Any]:
    """Return the kept keys: `transformers`, its version; `own`, keys that any configuration may have, for generation,
    training and other heads; `named`, by model type what its configuration and modeling code name.
    """
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    kept = (file for folder in gpu.model.families.__path__ for file in Path(folder).glob(f"*/{FILE.name}"))
    named = (json.loads(file.read_text(encoding="utf-8")).items() for file in sorted(kept))
    return found | {"named": dict(sorted(item for items in named for item in items))}

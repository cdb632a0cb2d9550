"""Read objects from the JSON files of a model's folder."""

import json
from pathlib import Path
from typing import Any

from gpu.model.spec import ModelError


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the object of a JSON file; None: there is no file. Raises ModelError for anything else."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:  # a number may be too long to read, and an object too deep
        raise ModelError(f"model: {path} is not valid JSON ({error})") from None
    except OSError as error:
        raise ModelError(f"model: {path} cannot be read ({error.strerror}); wanted a JSON object") from None
    if not isinstance(tree, dict):
        raise ModelError(f"model: {path} holds {type(tree).__name__}; wanted a JSON object")
    return tree

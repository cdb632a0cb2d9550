"""Read the settings of a folder's tokenizer: `tokenizer_config.json`, and the tokens that another file adds."""

from pathlib import Path
from typing import Any

from gpu.model.json_files import read_object


def read_tokenizer_settings(folder: Path) -> dict[str, Any]:
    """Return what `tokenizer_config.json` says, its missing tokens (`bos_token` and the like) filled in from
    `special_tokens_map.json`. Raises ModelError for a file that is no JSON object.
    """
    settings = dict(read_object(folder / "tokenizer_config.json") or {})
    for name, token in (read_object(folder / "special_tokens_map.json") or {}).items():
        if name.endswith("_token") and settings.get(name) is None:
            settings[name] = token
    return settings

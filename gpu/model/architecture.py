"""An Architecture from the `config.json` of a Hugging Face folder, or of a named shape. No torch.

It refuses to know what any family's keys mean: `gpu.model.families` does. Invariant: a key that is not understood is
refused by name, unless `ignore_config_keys` says that nothing hangs on it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu.model.family import parse_config
from gpu.model.shapes import NAMED_SHAPES, named_shape
from gpu.model.spec import ROPE_TYPES, Architecture, LayerSpec, ModelError, RopeScaling

__all__ = [
    "NAMED_SHAPES", "ROPE_TYPES", "Architecture", "LayerSpec", "ModelError", "RopeScaling", "named_shape",
    "parse_architecture", "read_architecture",
]  # fmt: skip


def read_architecture(
    folder: Path, rope: Mapping[str, Any] | None = None, ignored_keys: Sequence[str] = ()
) -> Architecture:
    """Read `folder/config.json`, and the end tokens of `generation_config.json` beside it.

    rope: `model.rope`, in place of the file's scaling; ignored_keys: `model.ignore_config_keys`. Raises ModelError for
    a missing or broken file, a missing key, or a model that the decoder does not compute.
    """
    path = folder / "config.json"
    config = _read_object(path)
    if config is None:
        raise ModelError(f"model: {path} is missing; give a Hugging Face folder with config.json")
    shape = parse_architecture(config, folder.resolve().name, str(path), rope, ignored_keys)
    more = (_read_object(folder / "generation_config.json") or {}).get("eos_token_id")
    eos = {*shape.eos_token_ids, *(more if isinstance(more, list) else [] if more is None else [more])}
    return replace(shape, eos_token_ids=tuple(sorted(eos)))


def parse_architecture(
    config: dict[str, Any], name: str, source: str, rope: Mapping[str, Any] | None = None,
    ignored_keys: Sequence[str] = (),
) -> Architecture:  # fmt: skip
    """An Architecture from the keys of a Hugging Face config; `source` names it in errors. See `read_architecture`."""
    return parse_config(config, name, source, ignored_keys, rope)


def _read_object(path: Path) -> dict[str, Any] | None:
    """None where there is no such file."""
    try:
        tree = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"model: {path} is not valid JSON ({error})") from None
    if not isinstance(tree, dict):
        raise ModelError(f"model: {path} holds {type(tree).__name__}; wanted a JSON object")
    return tree

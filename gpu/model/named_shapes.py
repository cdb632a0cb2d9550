"""Name shapes for random weights: the published sizes that each family's folder lists."""

from typing import Any

from gpu.model.family import family_folders, parse_config
from gpu.model.spec import Architecture, ModelError

_CONFIGS = {name: config for family in family_folders().values() for name, config in family.shapes.items()}
NAMED_SHAPES = {name: parse_config(config, name, name, ()) for name, config in _CONFIGS.items()}


def named_config(name: str) -> dict[str, Any]:
    """Return the `config.json` of a named shape. Raises ModelError with the list for an unknown name."""
    return dict(_CONFIGS[named_shape(name).name])


def named_shape(name: str) -> Architecture:
    """Return a shape for random weights. Raises ModelError with the list for an unknown name."""
    if name not in NAMED_SHAPES:
        raise ModelError(f"model.random_weights: unknown shape {name!r}; known: {', '.join(NAMED_SHAPES)}")
    return NAMED_SHAPES[name]

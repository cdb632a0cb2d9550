"""Read a file with several models: each becomes a deployment, with the file's other sections as its defaults."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from server.deployment import (
    SEVERAL,
    ConfigError,
    Deployment,
    build_deployment,
    check_filled,
    load_deployment,
    read_tree,
)

OWN = ("model", "adapters")  # sections of one model, which others cannot share
SHARED = "server"


def load_deployments(path: Path) -> tuple[Deployment, ...]:
    """Load the deployments of a file: one, or one for each of its `models`, all with the same server.

    Raises ConfigError with one line.
    """
    if path.is_dir() or path.suffix == ".gguf":
        return (load_deployment(path),)
    tree, text = read_tree(path)
    if SEVERAL not in tree:
        return (load_deployment(path),)
    models = tree[SEVERAL]
    if not isinstance(models, list) or not models:
        raise ConfigError(f"config: {path}: {SEVERAL}: got {_kind(models)}, wanted a list of mappings with `model`")
    for key in OWN:
        if key in tree:
            raise ConfigError(f"config: {path}: {key}: stands beside `{SEVERAL}`; move it into one of them")
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    check_filled(path, node)
    defaults = {key: value for key, value in tree.items() if key not in (SEVERAL, SHARED)}
    deployments = []
    for i, (entry, its_node) in enumerate(zip(models, _items_of(node), strict=True)):
        inside = f"{SEVERAL}[{i}]."
        if not isinstance(entry, dict):
            raise ConfigError(f"config: {path}: {SEVERAL}[{i}]: got {_kind(entry)}, wanted a mapping with `model`")
        if SHARED in entry:
            raise ConfigError(f"config: {path}: {inside}{SHARED}: one is shared by all; move it to the top")
        check_filled(path, its_node, inside)
        merged = _merge(defaults, entry) | ({SHARED: tree[SHARED]} if SHARED in tree else {})
        deployments.append(build_deployment(path, merged, text, i))
    return tuple(deployments)


def check_together(deployments: Iterable[tuple[Deployment, str]]) -> None:
    """Check that one server can serve these deployments, each given with its model's name. Raises ConfigError."""
    taken: dict[str, str] = {}
    folders: dict[Path, str] = {}
    for deployment, name in deployments:
        names = [name, *deployment.model.aliases]
        for one in (*names, *(f"{model}:{adapter}" for model in names for adapter in deployment.adapters)):
            if one in taken:
                raise ConfigError(f"{SEVERAL}: {taken[one]} and {name} are both called {one!r}; set `model.name`")
            taken[one] = name
        disk = deployment.disk
        if disk is not None and deployment.server.models_at_once != "one":
            other = folders.setdefault(disk.resolved_folder, name)
            if other != name:
                raise ConfigError(
                    f"{SEVERAL}: {other} and {name} have one disk.folder, {disk.resolved_folder}, and may run at once; "
                    "give each its own, or set server.models_at_once: one"
                )


def _merge(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults, overridden by the given values, key by key in mappings that both have."""
    merged = dict(defaults)
    for key, value in given.items():
        before = merged.get(key)
        merged[key] = _merge(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return merged


def _items_of(node: yaml.Node | None) -> list[yaml.Node]:
    """Return the nodes of the list of models."""
    assert isinstance(node, yaml.MappingNode)
    return next(list(value.value) for key, value in node.value if key.value == SEVERAL)


def _kind(value: object) -> str:
    return f"an empty {type(value).__name__}" if value in ([], {}) else type(value).__name__

"""Find the keys of a `config.json` that the transformers library knows in its source, and write them to JSON files.

`python -m gpu.model.library_key_search` writes the files that `gpu.model.library_keys` reads anew, from the source of
the transformers that is installed. A key that neither a model type's configuration class nor its modeling code names
changes nothing that transformers computes.
"""

import ast
import json
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gpu.model.families
from gpu.model.family import families, family_folders
from gpu.model.library_keys import FILE

# Code that every model type runs and that asks its configuration what to compute.
_SHARED = (
    "masking_utils.py",
    "modeling_rope_utils.py",
    "cache_utils.py",
    "integrations/heterogeneity/configuration_utils.py",
)
_LOOKUPS = ("getattr", "hasattr", "setattr", "get", "pop", "setdefault")


def find_library_keys(model_types: list[str]) -> dict[str, Any]:
    """Find the keys that `read_library_keys` should return, in the source of the installed transformers. Model types
    that it lacks are left out.
    """
    spec = find_spec("transformers")
    assert spec is not None, "transformers is one of the packages for tests"
    root = Path((spec.submodule_search_locations or [""])[0])
    shared = {key for file in _SHARED for key in _named(root / file)}
    own = _own(root / "configuration_utils.py") | _popped(root / "generation/configuration_utils.py")
    return {
        "transformers": version("transformers"),
        "own": sorted(own - shared),
        "named": {
            name: sorted(shared | _of_model(root, name))
            for name in sorted(model_types)
            if _files_of(root, name)[0].exists()
        },
    }


def _of_model(root: Path, model_type: str) -> set[str]:
    configuration, modeling = _files_of(root, model_type)
    return {*_fields(ast.parse(configuration.read_text())), *_named(configuration), *_named(modeling)}


def _files_of(root: Path, model_type: str) -> tuple[Path, Path]:
    module = model_type.removesuffix("_text")
    folder = root / "models" / module
    return folder / f"configuration_{module}.py", folder / f"modeling_{module}.py"


def _fields(tree: ast.AST) -> Iterator[str]:
    """Yield the fields of the classes of a configuration file, attributes that these set, and their aliases."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign):
            yield from _field(node)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            yield node.attr
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "attribute_map":
            for key, value in ast.literal_eval(node.value).items():
                yield from (key, value)


def _field(node: ast.AnnAssign) -> Iterator[str]:
    if isinstance(node.target, ast.Name) and not ast.unparse(node.annotation).startswith("ClassVar"):
        yield node.target.id


def _named(path: Path) -> Iterator[str]:
    """Yield the keys that code reads of a configuration: `config.key`, and names that are looked up."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("config"):
            yield node.attr
        elif isinstance(node, ast.Call):
            yield from _looked_up(node, _LOOKUPS)


def _looked_up(call: ast.Call, lookups: tuple[str, ...]) -> Iterator[str]:
    function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if function in lookups:
        for argument in call.args[:2]:
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str) and argument.value.isidentifier():
                yield argument.value


def _own(path: Path) -> set[str]:
    """Return the fields of `PreTrainedConfig`, and its further arguments."""
    tree = ast.parse(path.read_text())
    (cls,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "PreTrainedConfig")
    fields = {key for node in cls.body if isinstance(node, ast.AnnAssign) for key in _field(node)}
    start = next(node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == "__post_init__")
    taken = {key for node in ast.walk(start) if isinstance(node, ast.Call) for key in _looked_up(node, ("get", "pop"))}
    return fields | taken


def _popped(path: Path) -> set[str]:
    """Return the settings of `GenerationConfig`."""
    calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    return {key for call in calls for key in _looked_up(call, ("pop",))}


def write_library_keys() -> None:
    """Write all files again, for all families."""
    found = find_library_keys(list(families()))
    named = found.pop("named")
    _write(FILE, found)
    for folder, family in family_folders().items():
        keys = {name: named[name] for name in family.model_types if name in named}
        if keys:
            _write(Path(next(iter(gpu.model.families.__path__)), folder, FILE.name), keys)


def _write(path: Path, tree: dict[str, Any]) -> None:
    path.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_library_keys()

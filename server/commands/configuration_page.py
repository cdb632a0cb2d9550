"""Write the reference page of the configuration from the models: `python -m server.commands.configuration_page`.

The page in `docs/` is exactly what this module writes; a test compares them.
"""

import sys
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gpu.config import MethodChoice
from gpu.methods.method import Method
from gpu.methods.registry import list_methods
from gpu.model.declared_formats import call_formats, reasoning_formats
from gpu.model.family import family_folders
from server.deployment import Deployment
from transfer.settings_model import Settings

OPENING = """# Configuration

One YAML file describes a deployment. Unknown keys are errors. Relative paths are relative to the file. What is left out
is derived from the machine: `tandem plan CONFIG` prints the resolved tree. `make docs` writes this page from the
settings in the code.
"""
METHODS = """
## Methods

What a profile may name, and the settings that it may give with it.
"""
FORMATS = """
## Formats of answers

What `model.tool_parser` and `model.reasoning_parser` may name, beside auto and none, and the families whose models
write them.
"""
TYPE_NAMES = {
    str: "text", int: "integer", float: "number", bool: "true or false", Path: "path", MethodChoice: "method",
}  # fmt: skip
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def write_page() -> str:
    sections = "".join(write_section(model, name) for name, model in list_sections(Deployment, ""))
    own = "\n".join(["", *_tabulate(Deployment), ""])
    methods = "".join(write_method(method) for method in list_methods().values())
    return OPENING + own + sections + METHODS + methods + write_formats()


def write_formats() -> str:
    lines = [FORMATS, "| key | format | families |", "|---|---|---|"]
    families = family_folders().values()
    for name in call_formats():
        users = (family.name for family in families if name in (one.name for one in family.calls))
        lines.append(f"| `tool_parser` | {name} | {', '.join(users)} |")
    for name in reasoning_formats():
        users = (family.name for family in families if name in (one.name for one in family.reasoning))
        lines.append(f"| `reasoning_parser` | {name} | {', '.join(users)} |")
    return "\n".join(lines) + "\n"


def list_sections(model: type[BaseModel], prefix: str) -> list[tuple[str, type[BaseModel]]]:
    """Return every settings model under `model` with its dotted key, outermost first, in the order of the fields."""
    sections = []
    for name, field in model.model_fields.items():
        nested = find_section(field)
        if nested is not None:
            sections.append((prefix + name, nested))
            sections += list_sections(nested, f"{prefix}{name}.")
    return sections


def find_section(field: FieldInfo) -> type[BaseModel] | None:
    """Return the settings model that a field holds or may hold."""
    kinds = get_args(field.annotation) or (field.annotation,)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Settings)), None)


def write_section(model: type[BaseModel], name: str) -> str:
    opening = (model.__doc__ or "").strip()
    lines = [f"\n## `{name}`", ""]
    if opening and not opening.startswith("!!!"):
        lines += [" ".join(opening.split()), ""]
    return "\n".join([*lines, *_tabulate(model)]) + "\n"


def write_method(method: Method) -> str:
    lines = [f"\n### `{method.name}`", "", f"Fills the slot `{method.slot}`. {method.summary}"]
    if method.shared_key is not None:
        shared = f"All profiles of a deployment share what stands in `host.{method.shared_key}`"
        lines += ["", f"{shared}: one may repeat it, and one that asks for something else is refused."]
    elif method.settings.model_fields:
        lines += ["", *_tabulate(method.settings)]
        for name, nested in list_sections(method.settings, ""):
            lines += _tabulate(nested, f"{name}.")[2:]
    return "\n".join(lines) + "\n"


def _tabulate(model: type[BaseModel], prefix: str = "") -> list[str]:
    lines = ["| key | value | default | |", "|---|---|---|---|"]
    for key, field in model.model_fields.items():
        if find_section(field) is not None:
            continue
        cells = (f"`{prefix}{key}`", describe_type(field), describe_default(field), field.description or "")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


def describe_type(field: FieldInfo) -> str:
    bounds = [
        f"{words} {getattr(item, bound):g}"
        for item in field.metadata
        for bound, words in BOUNDS.items()
        if hasattr(item, bound)
    ]
    patterns = [item.pattern for item in field.metadata if getattr(item, "pattern", None)]
    text = ", ".join([name_type(field.annotation), *bounds])
    return f"one of {patterns[0].strip('^$()').replace('|', ', ')}" if patterns else text


def name_type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        words = ", ".join(str(value) for value in arguments)
        return f"one of {words}" if len(arguments) > 1 else words
    if origin is Annotated:
        return name_type(arguments[0])
    if origin in (Union, types.UnionType):
        return " or ".join(name_type(kind) for kind in arguments if kind is not type(None))
    if origin is tuple:
        return f"list of {name_type(arguments[0])}s"
    if origin is dict:
        return f"mapping of {name_type(arguments[0])} to {name_type(arguments[1])}"
    return TYPE_NAMES.get(annotation, getattr(annotation, "__name__", str(annotation)))


def describe_default(field: FieldInfo) -> str:
    if field.is_required():
        return "(needed)"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(f"`{item}`" if isinstance(item, str) else str(item) for item in value) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.stdout.write(write_page())

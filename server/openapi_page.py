"""`/docs`: the API's document for people, in one page that needs nothing from elsewhere.

Knows no route and no field. FastAPI's own page loads scripts from elsewhere; this one is for machines without it.
"""

import json
from collections.abc import Iterator
from html import escape

from server.body_schemas import Tree

_STYLE = (
    "body{font:16px/1.5 system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem}td,th{text-align:left;"
    "padding:.1rem .8rem .1rem 0;vertical-align:top}code{font-size:.95em}"
)


def write_page(document: Tree) -> str:
    schemas = document["components"]["schemas"]
    parts, bodies = [], []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation['summary'])}</p>")
            if "requestBody" in operation:
                body = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                bodies.append(body)
                parts.append(_table(schemas[body]))
            codes = ", ".join(sorted(operation["responses"]))
            parts.append(f"<p>Answers: {codes}</p>")
    for name in _nested(schemas, bodies):
        parts.append(f'<h3 id="{name}">{name}</h3>{_table(schemas[name])}')
    title = f"{document['info']['title']} {document['info']['version']}"
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    opening = f"<h1>{title}</h1><p>{escape(document['info']['description'])} "
    opening += 'As a document: <a href="openapi.json">openapi.json</a>.</p>'
    head += f"<style>{_STYLE}</style>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{opening}{"".join(parts)}</body></html>'


def _nested(schemas: Tree, bodies: list[str]) -> list[str]:
    """The schemas that fields of bodies name, and theirs, each once."""
    found = list(bodies)
    for name in found:  # which grows
        found += [one for one in dict.fromkeys(_refs(schemas[name])) if one not in found]
    return found[len(bodies) :]


def _refs(tree: object) -> Iterator[str]:
    if isinstance(tree, dict):
        if "$ref" in tree:
            yield tree["$ref"].rpartition("/")[2]
        for value in tree.values():
            yield from _refs(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _refs(value)


def _table(schema: Tree) -> str:
    rows = []
    for name, field in schema["properties"].items():
        bounds = [f"{key} {field[key]:g}" for key in ("minimum", "exclusiveMinimum", "maximum") if key in field]
        is_needed = "needed" if name in schema.get("required", ()) else ""
        note = escape(field.get("description", ""))
        cells = (f"<code>{escape(name)}</code>", _kind(field), ", ".join(bounds), is_needed, note)
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f"<table>{''.join(rows)}</table>"


def _kind(field: Tree) -> str:
    """A schema's type or values in a word or two of HTML."""
    if "enum" in field:
        return " or ".join(f"<code>{escape(json.dumps(value))}</code>" for value in field["enum"])
    if "anyOf" in field:
        kinds = [_kind(one) for one in field["anyOf"]]
        return " or ".join(dict.fromkeys(kind for kind in kinds if kind != "null")) or "null"
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        return f'<a href="#{name}">{name}</a>'
    kind = field.get("type", "anything")
    return f"list of {_kind(field.get('items', {}))}" if kind == "array" else escape(kind)

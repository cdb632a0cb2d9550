"""Write `/openapi.json` from the declared routes, the tables of their bodies and the types of their answers."""

from collections.abc import Iterable, Sequence

import msgspec

from server.bodies.body_schemas import complete_schemas
from server.bodies.schema_limits import BodyLimits, Tree, refer_to
from server.generation.event_stream import LINES
from server.release import release
from server.routes.answer import Error
from server.routes.catalogue import nested_tables
from server.routes.route import ENGINE_ERRORS, TIME_PARAMETER, Route

ERRORS = {
    400: "a field, or the whole body, cannot be served: `param` names it",
    401: "no key, or an unknown one",
    403: "the header `host` or `origin` is another site's",
    404: "no such model, or no such document or response of this key",
    409: "the conversation runs",
    408: "headers or body were not complete in time, or nothing was generated in `max_seconds`",
    413: "the body is larger than `server.max_body_mib`",
    415: "not JSON, or compressed",
    429: "the queue is full; `retry-after` says when to come again",
    431: "too many headers, or too large ones",
    500: "the request failed in the engine",
    501: "the deployment lacks the section that this needs",
    507: "no room on the disk",
    503: "loading, draining, hung or dead; `retry-after` says when to come again",
}
_DESCRIPTION = (
    "OpenAI's completions, chats, responses and embeddings, Anthropic's messages, Ollama's routes, ranking, documents, "
    "and what a server says about itself."
)


def build_document(routes: Sequence[Route], limits: BodyLimits, has_keys: bool) -> Tree:
    """Return the OpenAPI 3.1 document of this server."""
    routes = [route for route in routes if route.summary]
    tables = nested_tables(routes)
    structs = [*(table.struct for table in tables), *_answer_types(routes)]
    _, components = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    complete_schemas(components, tables, limits)
    paths: Tree = {}
    for route in routes:
        if route.is_offered is None or route.is_offered(limits):
            operation = _describe(route, limits)
            if has_keys and route.is_open:
                operation["security"] = []
            paths.setdefault(route.path.replace(":path}", "}"), {})[route.method] = operation
    document: Tree = {
        "openapi": "3.1.0",
        "info": {"title": "Tandem", "version": release(), "description": _DESCRIPTION},
        "paths": paths,
        "components": {"schemas": components},
    }
    if has_keys:
        components = document["components"]
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _answer_types(routes: Iterable[Route]) -> list[type]:
    """Return the types of all answers, each once."""
    types = [one for route in routes for one in (route.answer, route.event, route.error, route.unavailable)]
    return list(dict.fromkeys([Error, *(one for one in types if one is not None)]))


def _describe(route: Route, limits: BodyLimits) -> Tree:
    content = {"text/plain": {"schema": {"type": "string"}}} if route.answer is None else _content(route.answer)
    if route.event is not None:
        content |= {"text/event-stream": {"schema": _event(route.event)}}
    if route.line is not None:
        content |= {LINES: {"schema": {"type": "string"}}}
    responses: Tree = {"200": {"description": "done", "content": content}}
    for status in sorted(route.errors):
        error = route.unavailable if status == 503 and route.unavailable is not None else route.error
        responses[str(status)] = {"description": ERRORS[status], "content": _content(error)}
    parameters = [_fill_models(parameter, limits) for parameter in route.parameters]
    if route.errors == ENGINE_ERRORS:
        parameters.append(TIME_PARAMETER)
    operation: Tree = {"summary": route.summary, "parameters": parameters, "responses": responses}
    if route.body is not None:
        name = route.body.struct.__name__.removesuffix("Body").lower()
        operation["operationId"] = route.operation_id or name
        body = {"schema": refer_to(route.body.struct), "example": route.example}
        operation["requestBody"] = {"required": not route.is_body_optional, "content": {"application/json": body}}
    return operation


def _fill_models(parameter: Tree, limits: BodyLimits) -> Tree:
    """Return the parameter; one named `model_id` takes the names of the served model alone."""
    return parameter | {"schema": {"enum": list(limits.model_ids)}} if parameter["name"] == "model_id" else parameter


def _event(event: type) -> Tree:
    """Return the schema of an event: JSON of this type or of an error that ends a stream, or `[DONE]`."""
    either = [refer_to(kind) for kind in (event, Error)]
    tree = {"contentMediaType": "application/json", "contentSchema": {"anyOf": either}}
    data = {"type": "string", "if": {"const": "[DONE]"}, "else": tree}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _content(kind: type) -> Tree:
    return {"application/json": {"schema": refer_to(kind)}}

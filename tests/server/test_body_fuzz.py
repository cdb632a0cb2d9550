"""Bodies that are wrong in some places: every answer is a 200, or a 4xx that names a field.

They begin as bodies that are served. Some fields of the table get values of other types, other fields and variants are
added, and some are taken away. The draws are the same in every run.
"""

import json
import random
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import httpx
import pytest

from server.bodies.fields import Each, Fields
from server.routes.catalogue import find_routes, tables_by_path
from tests.server.live_server import Running, fake_command, make_deployment, running_server

Tree = dict[str, Any]
SEED = 20260

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CALLED = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    {"role": "assistant", "content": "", "tool_calls": [CALLED]},
    {"role": "tool", "content": "so", "tool_call_id": "a"},
]
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
    {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": "so"},
]
TURNS = [
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "so"}]},
]
TURNS_TOOL = {"name": "f", "input_schema": {"type": "object"}}
BODIES: dict[str, Tree] = {
    "/v1/completions": {"prompt": "a b c", "max_tokens": 2},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 2, "tools": [TOOL], "tool_choice": "auto"},
    "/v1/responses": {
        "input": ITEMS,
        "max_output_tokens": 2,
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
    },
    "/v1/messages": {"messages": TURNS, "max_tokens": 2, "tools": [TURNS_TOOL]},
    "/v1/messages/count_tokens": {"messages": TURNS, "tools": [TURNS_TOOL]},
    "/tokenize": {"prompt": "a b c"},
    "/detokenize": {"tokens": [1, 2, 3]},
}
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 3, 2**31, -(2**63), 10**30, 0.5, 1.5, -0.0, 1e300, "", "x", "auto", "none", "any",
    "\u6771\u4eac\0", "x" * 5000, [], [1], ["a"], [None], [[1]], [{}], {}, {"a": 1}, {"type": "new_thing"},
    {"type": "function"}, {"type": "json_schema"}, {"type": "text", "text": 5}, {"name": "f"}, {"a": {"b": {"c": []}}},
]  # fmt: skip
NAMES = ["no_such_field", "num_ctx", "Temperature", "", "\u6771", "a.b", "x" * 300, "messages ", "__class__"]
TABLES = tables_by_path(find_routes())
VARIANT = {"type": "new_thing", "data": "x"}


def mutate(draw: random.Random, route: str, body: Tree) -> None:
    """Change the body in one place."""
    kind = draw.choice(["field", "field", "field", "nested", "nested", "extra", "variant", "missing"])
    if kind == "field":
        body[draw.choice(list(TABLES[route].rules))] = deepcopy(draw.choice(VALUES))
    elif kind == "nested":
        objects = list(find_objects(body, TABLES[route]))
        if objects:
            tree, fields = draw.choice(objects)
            tree[draw.choice(list(fields.rules) if fields is not None else list(tree) or ["type"])] = draw.choice(
                VALUES
            )
    elif kind == "extra":
        trees = [body, *(tree for tree, _ in find_objects(body, TABLES[route]))]
        draw.choice(trees)[draw.choice(NAMES)] = deepcopy(draw.choice(VALUES))
    elif kind == "variant":
        lists = [value for value in find_lists(body) if value and isinstance(value[0], dict)]
        if lists:
            chosen = draw.choice(lists)
            chosen.insert(draw.randrange(len(chosen) + 1), dict(VARIANT))
    elif body:
        del body[draw.choice(list(body))]


def find_objects(tree: Any, fields: Fields | None) -> Iterator[tuple[Tree, Fields | None]]:
    """Yield every object inside another one, with its table where it has one."""
    for name, value in list(tree.items()):
        rule = fields.rules.get(name) if fields is not None else None
        inside = rule.item if isinstance(rule, Each) else rule if isinstance(rule, Fields) else None
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, dict):
                yield one, inside
                yield from find_objects(one, inside)


def find_lists(tree: Any) -> Iterator[list[Any]]:
    if isinstance(tree, list):
        yield tree
    for value in tree if isinstance(tree, list) else tree.values() if isinstance(tree, dict) else ():
        yield from find_lists(value)


def draw_bodies(seed: int, count: int) -> Iterator[tuple[str, Tree]]:
    draw = random.Random(seed)
    for _ in range(count):
        route = draw.choice(list(BODIES))
        body = deepcopy(BODIES[route])
        for _ in range(draw.randint(1, 3)):
            mutate(draw, route, body)
        yield route, body


def check_answer(route: str, body: Tree, answer: httpx.Response) -> str:
    """Return what kind of an answer it is. Fails for one that no client could act on."""
    told = f"{answer.status_code} {answer.text[:500]} for {route} {json.dumps(body)[:2000]}"
    if answer.status_code == 200:
        assert '"error":{' not in answer.text, told
        return "served"
    assert 400 <= answer.status_code < 500, told
    error = answer.json()["error"]
    named, colon, what = error["message"].partition(": ")
    is_sentence = "exceed context limit" in error["message"] or "does not exist" in error["message"]
    assert is_sentence or (colon and what and "\n" not in error["message"]), told
    if not is_sentence and "param" in error:
        assert error["param"], told
        assert named.startswith(error["param"].partition(".")[0].partition("[")[0][:64]), told
    return "refused"


async def send_all(live: Running, bodies: Iterator[tuple[str, Tree]]) -> Counter[tuple[str, str]]:
    kinds: Counter[tuple[str, str]] = Counter()
    for route, body in bodies:
        answer = await live.http.post(route, content=json.dumps(body), headers={"content-type": "application/json"})
        kinds[route, check_answer(route, body, answer)] += 1
    return kinds


@pytest.mark.parametrize("num_bodies", [800, pytest.param(4_000, marks=pytest.mark.long)])
async def test_a_body_that_is_wrong_somewhere_is_served_or_its_field_is_named(num_bodies: int) -> None:
    async with running_server(make_deployment(), fake_command()) as live:
        for route, body in BODIES.items():
            assert (await live.http.post(route, json=body)).status_code == 200, route
        kinds = await send_all(live, draw_bodies(SEED, num_bodies))
        assert (await live.http.get("/health")).status_code == 200
    assert sum(kinds.values()) == num_bodies
    for route in BODIES:
        assert min(kinds[route, "served"], kinds[route, "refused"]) > num_bodies / len(BODIES) / 20, kinds


def test_an_answer_that_names_nothing_would_be_noticed() -> None:
    for status, error in (
        (500, {"message": "n: no", "param": "n"}),
        (400, {"message": "no", "param": None}),
        (400, {"message": "n: no", "param": None}),
        (400, {"message": "top_p: no", "param": "n"}),
    ):
        with pytest.raises(AssertionError):
            check_answer("/v1/completions", {}, httpx.Response(status, json={"error": error}))

"""The page's files: what they come with, that they stay on this server, and that they are part of the package."""

import re
import tomllib
from html.parser import HTMLParser

import pytest

from server.routes.page.page_routes import INDEX, MEDIA_TYPES, list_files, read_file
from tests.server.live_server import ROOT, Running, fake_command, make_deployment, running_server

pytestmark = pytest.mark.asyncio(loop_scope="module")

STATIC = ROOT / "server" / "routes" / "page" / "static"
MOST_BYTES = 160 * 1024  # of all files together: no framework
POLICY = {
    "default-src": ["'none'"],
    "script-src": ["'self'"],
    "style-src": ["'self'"],
    "img-src": ["'self'"],
    "connect-src": ["'self'"],
    "base-uri": ["'none'"],
    "form-action": ["'none'"],
    "frame-ancestors": ["'none'"],
    "require-trusted-types-for": ["'script'"],
    "trusted-types": ["'none'"],
}


class Tags(HTMLParser):
    """Collect the tags of a page with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))


async def test_every_file_comes_under_the_strict_policy_and_is_asked_for_once(shared_live: Running) -> None:
    for path in ("", *(f"page/{name}" for name in list_files())):
        answer = await shared_live.http.get(f"/{path}")
        assert answer.status_code == 200
        policy = [part.split() for part in answer.headers["content-security-policy"].split(";")]
        assert {name: sources for name, *sources in policy} == POLICY
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        assert answer.headers["content-type"].split(";")[0] == MEDIA_TYPES[(path or INDEX).rsplit(".", 1)[1]]
        again = await shared_live.http.get(f"/{path}", headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["content-security-policy"] == answer.headers["content-security-policy"]


async def test_the_page_has_no_inline_script_or_style_and_names_files_of_its_own_alone() -> None:
    tags = Tags(read_file(INDEX)[0].decode()).found
    assert not [tag for tag, _ in tags if tag in ("style", "iframe", "object", "base")]
    scripts = [attributes for tag, attributes in tags if tag == "script"]
    assert [(one["type"], one["src"]) for one in scripts] == [("module", "page/main.js")]
    assert not [name for _, attributes in tags for name in attributes if name.startswith("on") or name == "style"]
    named = {one for _, attributes in tags for name, one in attributes.items() if name in ("src", "href") and one}
    files = {one for one in named if not one.startswith("#")} - {"docs", "metrics"}
    assert files <= {f"page/{name}" for name in list_files()}
    for name in list_files():
        text = read_file(name)[0].decode()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text), name
        imported = set(re.findall(r"from \"\./([\w.]+)\"", text))
        assert imported <= set(list_files()), name
        addresses = set(re.findall(r"https?://[\w.]+", text)) - {"http://www.w3.org"}
        assert not addresses, name
    assert sum(len(read_file(name)[0]) for name in (INDEX, *list_files())) < MOST_BYTES


async def test_every_file_of_the_page_is_used() -> None:
    texts = {name: read_file(name)[0].decode() for name in (INDEX, *list_files())}
    unused = [name for name in list_files() if not any(name in text for other, text in texts.items() if other != name)]
    assert unused == []


async def test_the_page_is_open_with_keys_and_what_it_shows_is_not() -> None:
    async with running_server(make_deployment(api_keys=["secret"]), fake_command()) as live:
        assert (await live.http.get("/")).status_code == 200
        assert (await live.http.get("/page/main.js")).status_code == 200
        assert (await live.http.get("/v1/activity")).status_code == 401
        headers = {"authorization": "Bearer secret"}
        assert (await live.http.get("/v1/activity", headers=headers)).status_code == 200


async def test_a_name_that_another_site_rebound_to_this_server_gets_no_page(shared_live: Running) -> None:
    answer = await shared_live.http.get("/", headers={"host": "evil.test"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "unknown_host")


async def test_a_deployment_may_have_no_page() -> None:
    async with running_server(make_deployment(page=False), fake_command(), wait=False) as live:
        for path in ("/", "/page/main.js"):
            answer = await live.http.get(path)
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "page_off"
        assert (await live.http.get("/docs")).status_code == 200


async def test_the_package_holds_the_page() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["server"]
    packed = {path.name for pattern in patterns for path in (ROOT / "server").glob(pattern)}
    assert packed == {path.name for path in STATIC.iterdir()} == {INDEX, *list_files()}


async def test_activity_tells_of_limits_memory_and_tokens(shared_live: Running) -> None:
    body = {"prompt": "one two three", "max_tokens": 5, "ignore_eos": True}
    before = (await shared_live.http.get("/v1/activity")).json()
    assert (await shared_live.http.post("/v1/completions", json=body)).status_code == 200
    after = (await shared_live.http.get("/v1/activity")).json()
    assert sum(after["generated"]["tokens"]) - sum(before["generated"]["tokens"]) == 5
    assert len(after["generated"]["tokens"]) * after["generated"]["step_seconds"] == 600
    assert (after["status"], after["model"], after["default_profile"]) == ("ready", "reference", "exact")
    assert after["profiles"]["narrow"] == 100
    plan = shared_live.service.memory
    told = {(place["place"], item["name"]): item["bytes"] for place in after["memory"] for item in place["items"]}
    assert told == {(item.place, item.name): item.bytes for item in plan.items}
    assert {place["place"]: place["limit_bytes"] for place in after["memory"]} == plan.limit_bytes


async def test_activity_is_told_while_the_engine_loads() -> None:
    async with running_server(make_deployment(), fake_command(load_s=5.0), wait=False) as live:

        async def loads() -> bool:
            told = (await live.http.get("/v1/activity")).json()
            return told["status"] == "loading" and told["stage"] == "weights"

        await live.until(loads)
        told = (await live.http.get("/v1/activity")).json()
        assert (told["fraction"], told["profiles"], told["device"]) == (0.5, {}, None)

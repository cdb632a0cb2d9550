"""Pages of other sites get nothing of a server without keys: neither under their own name nor from afar."""

import httpx
import pytest

from server.routes.catalogue import find_routes
from tests.server.live_server import fake_command, make_app, make_deployment

GOOD_HOSTS = (
    "127.0.0.1:8000", "localhost", "LOCALHOST:8000", "[::1]:8000", "192.168.1.7", "tandem:8000", "box.local",
    "a.localhost:1", "gpu.lan", "nas.home.arpa", "box.local.", "",  # no browser sends the last
)  # fmt: skip
FOREIGN_HOSTS = (
    "evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example:8000", "evil.example.",
    "EVIL.example", "local.evil", "x@evil.example", "evil.example:x", "[evil.example]",
)  # fmt: skip
GOOD_ORIGINS = (
    "http://localhost:3000", "https://127.0.0.1", "http://[::1]:5173", "http://box.local:8000", "app://obsidian.md",
    "vscode-webview://1abc", "chrome-extension://abcd", "file://", "http://0.0.0.0:8000",
)  # fmt: skip
FOREIGN_ORIGINS = (
    "https://evil.example", "http://evil.example:8000", "null", "http://localhost.evil.example", "http://box.local",
    "http://box.local:8001", "http://127.0.0.1.evil.example", "http://", "evil", "https://10.0.0.9",
)  # fmt: skip


def client(**server: object) -> httpx.AsyncClient:
    app = make_app(make_deployment(**server), fake_command())
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://box.local:8000")


async def test_a_page_whose_name_was_rebound_to_this_server_reads_nothing_on_any_route(subtests) -> None:
    async with client() as asking:
        for route in find_routes():
            with subtests.test(route=route.path):
                answer = await asking.request(route.method, route.path, headers={"host": "evil.example:8000"})
                assert answer.status_code == 403
                told = answer.json()["error"]
                told = told if isinstance(told, str) else told["message"]
                assert "server.allowed_hosts" in told
                assert "evil.example" in told


async def test_a_foreign_page_that_sends_requests_is_refused_on_any_route(subtests) -> None:
    async with client() as asking:
        for route in find_routes():
            with subtests.test(route=route.path):
                answer = await asking.request(route.method, route.path, headers={"origin": "https://evil.example"})
                assert answer.status_code == 403


async def test_hosts_and_origins_are_told_apart(subtests) -> None:
    async with client() as asking:
        for header, values, status in (
            ("host", GOOD_HOSTS, 200),
            ("host", FOREIGN_HOSTS, 403),
            ("origin", GOOD_ORIGINS, 200),
            ("origin", FOREIGN_ORIGINS, 403),
        ):
            for value in values:
                with subtests.test(header=header, value=value):
                    assert (await asking.get("/version", headers={header: value})).status_code == status
        both = [("host", "box.local"), ("host", "evil.example")]
        assert (await asking.get("/version", headers=both)).status_code == 403


async def test_what_the_deployment_names_is_its_own() -> None:
    own = {"allowed_hosts": ["llm.example"], "cors_origins": ["https://chat.example", "null"]}
    async with client(**own) as asking:
        for headers, status in (
            ({"host": "llm.example:8000"}, 200),
            ({"host": "x.llm.example"}, 403),
            ({"origin": "https://chat.example"}, 200),
            ({"origin": "null"}, 200),
            ({"origin": "http://chat.example"}, 403),
        ):
            assert (await asking.get("/version", headers=headers)).status_code == status, headers
    async with client(allowed_hosts=["*"], cors_origins=["*"]) as asking:
        headers = {"host": "any.example", "origin": "https://evil.example"}
        assert (await asking.get("/version", headers=headers)).status_code == 200


@pytest.mark.parametrize("headers", [{"host": "llm.example"}, {"origin": "https://chat.example"}])
async def test_with_keys_a_proxy_may_name_the_server_as_it_likes_and_a_page_without_one_gets_nothing(headers) -> None:
    async with client(api_keys=["k"]) as asking:
        assert (await asking.get("/v1/models", headers=headers)).status_code == 401
        known = headers | {"authorization": "Bearer k"}
        assert (await asking.get("/v1/models", headers=known)).status_code == 200

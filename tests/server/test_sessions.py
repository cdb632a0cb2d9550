"""Sessions: how clients name them, what is told of them, and who may see and forget them."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from server.generation.session_name import MOST_CHARS, session_in_user_id
from server.routes.sessions.session_answers import SavedContextList
from server.service.service import Keys
from tests.server.live_server import Running, fake_command, make_deployment, running_server
from tests.server.scripted_model import Script

HI = [{"role": "user", "content": "Hi there, you."}]
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
UUID = "c2deb283-803c-4222-86ed-60059889d1f3"
CLAUDE = json.dumps({"device_id": "7166", "account_uuid": "", "session_id": UUID})


async def sessions(live: Running, **headers: str) -> list[dict[str, Any]]:
    answer = await live.http.get("/v1/sessions", headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


NAMED: list[tuple[str, dict[str, str], dict[str, Any], str]] = [
    (CHAT, {"X-Session-Id": "ses_1"}, {"prompt_cache_key": "other"}, "ses_1"),
    (CHAT, {"x-session-affinity": "ses_2"}, {}, "ses_2"),
    (CHAT, {}, {"prompt_cache_key": "key"}, "key"),
    (CHAT, {}, {"session_id": "body"}, "body"),
    (CHAT, {}, {"prompt_cache_key": "k" * 1000}, "k" * MOST_CHARS),
    (MESSAGES, {"X-Claude-Code-Session-Id": UUID}, {}, UUID),
    (MESSAGES, {}, {"metadata": {"user_id": CLAUDE}}, UUID),
    (MESSAGES, {}, {"metadata": {"user_id": f"user_19f2_account_a9_session_{UUID}"}}, UUID),
    (MESSAGES, {}, {"metadata": {"user_id": "somebody"}}, "somebody"),
    (RESPONSES, {"session-id": UUID}, {}, UUID),
    (RESPONSES, {}, {"prompt_cache_key": "key"}, "key"),
    ("/v1/completions", {"x-session-id": "text"}, {}, "text"),
    (CHAT, {}, {"metadata": {"a": "b"}}, "conversation-1"),
    (MESSAGES, {}, {"metadata": {}}, "conversation-2"),
]


async def test_clients_name_their_session_each_in_its_own_way(live: Running, subtests: pytest.Subtests) -> None:
    for path, headers, fields, name in NAMED:
        with subtests.test(path=path, headers=headers, fields=fields):
            body: dict[str, Any] = {"messages": HI, "max_tokens": 4}
            if path == RESPONSES:
                body = {"input": "Hi"}
            if path == "/v1/completions":
                body = {"prompt": "Hi"}
            before = [one["id"] for one in await sessions(live)]
            answer = await live.http.post(path, json=body | fields, headers=headers)
            assert answer.status_code == 200, answer.text
            assert [one["id"] for one in await sessions(live) if one["id"] not in before] == [name]
            await live.http.delete(f"/v1/sessions/{name}")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"session_id": 3}', "[" * 100_000])
def test_a_user_id_of_any_text_is_a_name(text: str) -> None:
    assert session_in_user_id(text) == text


async def test_a_response_that_follows_another_is_of_its_session(live: Running) -> None:
    first = (await live.http.post(RESPONSES, json={"input": "Hi", "prompt_cache_key": "mine"})).json()
    asked = {"input": "And?", "previous_response_id": first["id"]}
    second = (await live.http.post(RESPONSES, json=asked)).json()
    await live.http.post(RESPONSES, json=asked | {"previous_response_id": second["id"]})
    (mine,) = [one for one in await sessions(live) if one["id"] == "mine"]
    assert len(mine["conversations"]) == 3


async def test_what_is_kept_is_told_and_a_session_is_forgotten(own_live: Running) -> None:
    live = own_live
    for name, content in (("a", "One"), ("b", "Two"), ("a", "Three")):
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "prompt_cache_key": name}
        await live.http.post(CHAT, json=body)
    first, second = await sessions(live)
    assert (first["id"], first["object"], second["id"]) == ("a", "session", "b")
    one = first["conversations"][0]
    assert (one["turns"], one["running"], one["is_awaited"], one["host_tokens"]) == (1, 0, False, 0)
    assert one["tokens"] > 0
    gone = (await live.http.delete("/v1/sessions/a")).json()
    wanted = sum(one["tokens"] for one in first["conversations"])
    assert gone == {"id": "a", "object": "session", "deleted": True, "forgotten_tokens": wanted}
    assert [one["id"] for one in await sessions(live)] == ["b"]
    unknown = await live.http.delete("/v1/sessions/a")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "session_not_found")


async def test_a_key_sees_and_forgets_its_own_sessions_alone(tmp_path: Path) -> None:
    async with running_server(make_deployment(api_keys=["one", "two"]), fake_command()) as live:
        mine, yours = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        await live.http.post(CHAT, json={"messages": HI, "max_tokens": 4, "prompt_cache_key": "s"}, headers=mine)
        assert [one["id"] for one in await sessions(live, **mine)] == ["s"]
        assert await sessions(live, **yours) == []
        assert (await live.http.delete("/v1/sessions/s", headers=yours)).status_code == 404
        assert (await live.http.get("/v1/sessions")).status_code == 401


async def front_of(live: Running, **fields: Any) -> int:
    """Return the tokens of a chat's front, which this engine tells as those on its device."""
    await live.http.post(CHAT, json={"max_tokens": 4, "prompt_cache_key": "front"} | fields)
    one = (await sessions(live))[0]["conversations"][0]
    await live.http.delete("/v1/sessions/front")
    return int(one["device_tokens"])


async def test_the_front_of_a_prompt_is_what_the_system_says_and_the_tools(hermes: tuple[Running, Script]) -> None:
    live, script = hermes
    script.add(*["So."] * 8)
    tool = {"type": "function", "function": {"name": "weather", "description": "Tells the weather of a city."}}
    system = {"role": "system", "content": "You are brief. " * 20}
    assert await front_of(live, messages=HI) == 0
    alone = await front_of(live, messages=[system, *HI])
    both = await front_of(live, messages=[system, *HI], tools=[tool])
    assert 60 < alone < both
    grown = [system, *HI, {"role": "assistant", "content": "So."}, {"role": "user", "content": "And?"}]
    assert await front_of(live, messages=grown, tools=[tool]) == both
    assert await front_of(live, messages=[system | {"content": "Be."}, *HI]) < alone


async def test_the_engine_is_told_of_answers_that_call_tools(hermes: tuple[Running, Script]) -> None:
    live, script = hermes
    tool = {"type": "function", "function": {"name": "weather"}}
    script.add('<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>', "It is fine.")
    for is_awaited in (True, False):
        body = {"messages": HI, "tools": [tool], "prompt_cache_key": str(is_awaited)}
        assert (await live.http.post(CHAT, json=body)).status_code == 200
        assert (await sessions(live))[0]["conversations"][0]["is_awaited"] is is_awaited


async def slot(live: Running, number: int | str, action: str, **fields: Any) -> Any:
    given = {"json": fields} if fields else {}
    answer = await live.http.post(f"/slots/{number}?action={action}", **given)
    return answer.json() if answer.status_code == 200 else (answer.status_code, answer.json()["error"]["code"])


async def test_a_conversation_is_saved_listed_restored_erased_and_deleted_by_name(tmp_path: Path) -> None:
    async with running_server(make_deployment(), fake_command(disk=1)) as live:
        for name in "ab":
            body = {"messages": [{"role": "user", "content": f"{name} " * 40}], "max_tokens": 4, "session_id": name}
            await live.http.post(CHAT, json=body)
        slots = (await live.http.get("/slots")).json()
        found = [(one["id"], one["session"], one["is_processing"]) for one in slots]
        assert found == [(0, "a", False), (1, "b", False)]
        done = await slot(live, 1, "save", filename="notes.bin")
        assert done["timings"].pop("save_ms") >= 0
        assert done.pop("n_saved") > 40
        assert done == {"id_slot": 1, "filename": "notes.bin", "n_written": 4096, "timings": {}}
        assert (await slot(live, "a", "save", filename="first"))["id_slot"] == 0, "by its session"
        assert (await slot(live, 0, "erase"))["n_erased"] > 40
        assert await slot(live, 7, "erase") == await slot(live, "c", "save", filename="x") == (404, "slot_not_found")
        told = (await live.http.get("/v1/sessions")).json()
        assert [one["id"] for one in told["data"]] == ["b"]
        saved = [(one["id"], one["object"], one["session"]) for one in told["saved"]]
        assert saved == [("notes.bin", "saved_context", "b"), ("first", "saved_context", "a")]
        done = await slot(live, 0, "restore", filename="first")
        assert done["timings"]["restore_ms"] >= 0
        assert (done["filename"], done["n_read"], done["cached_tokens_from"]["card"]) == ("first", 0, 7)
        again = (await sessions(live))[0]
        assert (again["id"], again["conversations"][0]["tokens"]) == ("a", done["n_restored"])
        assert (await live.http.delete("/v1/saved_contexts/first")).json()["deleted"] is True
        assert (await live.http.delete("/v1/saved_contexts/first")).status_code == 404
        assert await slot(live, 0, "restore", filename="first") == (404, "context_not_found")


NO_NAMES = ("", ".", "..", "../x", "a/b", "a\\b", "/etc/passwd", "a\0b", "a\n", " a", "a.", "x" * 256, "é" * 128, None)


async def test_names_that_are_paths_or_cannot_be_read_are_refused(live: Running, subtests: pytest.Subtests) -> None:
    for name in NO_NAMES:
        for action in ("save", "restore"):
            with subtests.test(name=name, action=action):
                answer = await live.http.post(f"/slots/0?action={action}", json={"filename": name})
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, "filename")


async def test_without_a_disk_saving_says_which_section_to_add(live: Running) -> None:
    for action in ("save", "restore"):
        assert await slot(live, 0, action, filename="x") == (501, "disk_not_configured")
    answer = await live.http.post("/slots/0?action=dance", json={})
    assert answer.json()["error"]["param"] == "action"
    assert (await live.http.post("/slots/0")).status_code == 400


async def test_saved_contexts_are_of_the_key_that_saved_them() -> None:
    async with running_server(make_deployment(api_keys=["one", "two"]), fake_command(disk=1)) as live:
        mine, yours = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        body = {"messages": [{"role": "user", "content": "so " * 40}], "max_tokens": 4}
        await live.http.post(CHAT, json=body, headers=mine)
        save, restore = ("/slots/0?action=save", "/slots/0?action=restore")
        assert (await live.http.post(save, json={"filename": "x"}, headers=mine)).status_code == 200
        assert (await live.http.post(restore, json={"filename": "x"}, headers=yours)).status_code == 404
        assert (await live.http.delete("/v1/saved_contexts/x", headers=yours)).status_code == 404
        assert (await live.http.post(restore, json={"filename": "x"}, headers=mine)).status_code == 200


async def test_an_administrator_sees_and_deletes_what_other_keys_and_keys_that_are_gone_have_saved(
    tmp_path: Path,
) -> None:
    (tmp_path / "admins").write_text("root")
    deployment = make_deployment(api_keys=["one", "two"], admin_keys_file=tmp_path / "admins")
    async with running_server(deployment, fake_command(disk=1)) as live:
        one, two, root = ({"authorization": f"Bearer {key}"} for key in ("one", "two", "root"))
        for key in (one, two):
            body = {"messages": [{"role": "user", "content": "so " * 40}], "max_tokens": 4}
            assert (await live.http.post(CHAT, json=body, headers=key)).status_code == 200
            done = await live.http.post("/slots/0?action=save", json={"filename": "x"}, headers=key)
            assert done.status_code == 200
        live.service.keys = Keys(["one", "root"], ["root"])  # as after a restart without the other one
        (mine,) = (await live.http.get("/v1/saved_contexts", headers=one)).json()["data"]
        first, second = msgspec.convert(
            (await live.http.get("/v1/saved_contexts", headers=root)).json(), SavedContextList
        ).data
        assert (first.owner, first.key_is_known, second.key_is_known) == (mine["owner"], True, False)
        refused = await live.http.delete(f"/v1/saved_contexts/x?owner={second.owner}", headers=one)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_administrator")
        gone = f"/v1/saved_contexts/x?owner={second.owner}"
        assert (await live.http.delete(gone, headers=root)).json()["deleted"] is True
        assert (await live.http.delete(gone, headers=root)).status_code == 404
        (left,) = (await live.http.get("/v1/saved_contexts", headers=root)).json()["data"]
        assert left == mine


async def test_without_keys_everybody_sees_what_keys_that_are_gone_have_saved() -> None:
    assert Keys([], []).is_administrator("")
    assert not Keys(["one"], []).is_administrator("one")

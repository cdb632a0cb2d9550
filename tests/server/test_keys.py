"""API keys: what one may be, that no error repeats one, and that they meet nothing of each other."""

import pytest

from scheduler.messages import EngineRequest
from server.deployment import ConfigError, Deployment, load_deployment
from tests.server.live_server import fake_command, make_app, make_deployment, running_server

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]


async def test_a_key_that_cannot_come_in_a_header_is_refused_at_start_and_not_repeated(tmp_path):
    for i, key in enumerate(["two words", "", "schlüssel", "new\nline", "tab\tkey", "sk-1\x00"]):
        with pytest.raises(ConfigError) as refused:
            make_app(make_deployment(api_keys=["fine", key]), [])
        assert str(refused.value).startswith("server.api_keys[1]: cannot come in a header"), i
        assert not key or key not in str(refused.value)
    (tmp_path / "keys").write_text("fine\ngeheim-schlüssel\n")
    with pytest.raises(ConfigError, match=r"key 2 of .*/keys: cannot come") as refused:
        make_app(make_deployment(api_keys_file=tmp_path / "keys"), [])
    assert "geheim" not in str(refused.value)
    for name in ("sk-secret", "sk-secret\0"):
        with pytest.raises(ConfigError, match="the file that it names cannot be read") as refused:
            make_app(make_deployment(api_keys_file=tmp_path / name), [])
        assert "sk-secret" not in str(refused.value)
    with pytest.raises(ConfigError, match="there are no keys"):
        make_app(make_deployment(cache_isolation="key"), [])


def test_an_error_in_a_configuration_never_repeats_a_key(tmp_path):
    path = tmp_path / "server.yaml"
    for server in (
        "api_keys: sk-secret",
        "api_keys: {sk-secret: 1}",
        "api_keys: [[sk-secret]]",
        "api_keys: [1, sk-secret]",
        "[api_keys, sk-secret]",
        "sk-secret",
        "api_key: sk-secret",
        "api_keys: [sk-secret, ]]",
        "api_keys: ['sk-secret]",
        "api_keys: [sk-secret]: 1",
        "{api_keys: [sk-secret], port: -1, drain_seconds: x}",
        "api_keys: *sk-secret",
        "api_keys: !sk-secret x",
        "api_keys: !sk-secret!x y",
        "api_keys: !!python/name:sk-secret x",
        "api_keys: [&sk-secret a, &sk-secret b]: 1",
        "api_keys: !!int sk-secret",
        "api_keys: !!bool sk-secret",
        "api_keys: !!timestamp sk-secret",
        "sk-secret: 1",
        "api_keys sk-secret: [1]",
        "port: 1\napi_keys sk-secret: [1]",
        "cors_origins: sk-secret",
        "port: sk-secret",
        "cache_isolation: sk-secret",
    ):
        path.write_text(f"model:\n  path: /m\nserver:\n  {server}\n")
        with pytest.raises(ConfigError) as refused:
            load_deployment(path)
        assert "sk-secret" not in str(refused.value), server
    path.write_text("model:\n  path: /m\nserver:\n  api_keys: [7777]\n")
    with pytest.raises(ConfigError) as refused:
        load_deployment(path)
    assert "7777" not in str(refused.value)
    path.write_text("model:\n  path: /m\nserver:\n  drain_second: 1\n")
    with pytest.raises(ConfigError, match="server: unknown key at line 4; the nearest known one is 'drain_seconds'"):
        load_deployment(path)
    path.write_text("model:\n  path: /m\nserver:\n  port: -1\n")
    with pytest.raises(ConfigError, match="got -1"):
        load_deployment(path)


async def salts_of(deployment: Deployment) -> list[set[str]]:
    """Return the salts of the engine's requests: two calls with the key `one`, one with the key `two`."""
    salts = []
    async with running_server(deployment, fake_command()) as live:
        submit = live.service.supervisor.submit

        async def note(requests: list[EngineRequest], *rest: object) -> None:
            salts.append({request.cache_salt for request in requests})
            await submit(requests, *rest)

        live.service.supervisor.submit = note
        for key, path, body in (
            ("one", COMPLETION, {"prompt": ["a", "b"], "n": 2}),
            ("one", CHAT, {"messages": HI}),
            ("two", COMPLETION, {"prompt": "a"}),
        ):
            answer = await live.http.post(path, json=body, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 200
    return salts


async def test_keys_are_kept_apart_by_the_salt_of_their_prefixes():
    first, chat, second = await salts_of(make_deployment(api_keys=["one", "two"], cache_isolation="key"))
    assert len(first) == len(second) == 1
    assert first == chat != second
    assert not {"", "one", "two"} & (first | second)
    assert await salts_of(make_deployment(api_keys=["one", "two"])) == [{""}] * 3


async def test_requests_with_a_salt_meet_the_prefixes_of_their_own_salt_and_key_alone():
    async with running_server(make_deployment(api_keys=["one", "two"], cache_isolation="key"), fake_command()) as live:
        submit, salts = live.service.supervisor.submit, []

        async def note(requests: list[EngineRequest], *rest: object) -> None:
            salts.append(requests[0].cache_salt)
            await submit(requests, *rest)

        live.service.supervisor.submit = note
        for key, own in (("one", {}), ("one", "a"), ("one", "a"), ("one", "b"), ("two", "a"), ("one", "")):
            body = {"prompt": "a"} | ({"cache_salt": own} if isinstance(own, str) else {})
            answer = await live.http.post(COMPLETION, json=body, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == (400 if own == "" else 200)
    without, first, again, other, of_another_key = salts
    assert first == again
    assert len({without, first, other, of_another_key, "", "a", "b"}) == 7

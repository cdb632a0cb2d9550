"""Documents over HTTP, on the fake engine: stored once, named in chats, their owners' alone, and told of in usage."""

import asyncio
import hashlib
from pathlib import Path

import openai
import pytest

from scheduler.engine_config import PrefillConfig
from scheduler.messages import EngineRequest
from server.commands.servable import require_settings
from server.deployment import ConfigError, load_deployment
from server.stores.document_texts import check_documents, open_documents
from server.text.chunker import Chunker
from tests.server.live_server import Running, fake_command, make_deployment, running_server, with_documents

DOCUMENTS, CHAT = "/v1/documents", "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
TEXT = " ".join(f"There are {i} boats in the bay, and 4 in the harbour." for i in range(40))
OTHER = " ".join(f"The mayor has {i} keys." for i in range(50))


@pytest.fixture
async def docs(tmp_path: Path):
    async with running_server(with_documents(make_deployment(), tmp_path, chunk_tokens=64), fake_command()) as running:
        yield running


def note_requests(live: Running) -> list[EngineRequest]:
    """Note what goes to the engine from now on."""
    submit, noted = live.service.supervisor.submit, []

    async def note(requests, *rest) -> None:
        noted.extend(requests)
        await submit(requests, *rest)

    live.service.supervisor.submit = note
    return noted


async def add(live: Running, key: str = "k", **body) -> dict:
    answer = await live.http.post(DOCUMENTS, json=body, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def chat(live: Running, documents: list, key: str = "k", **body):
    tree = {"messages": HI, "documents": documents, "max_tokens": 4, "temperature": 0} | body
    return await live.http.post(CHAT, json=tree, headers={"authorization": f"Bearer {key}"})


def details(answer) -> dict[str, int]:
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]


async def test_a_document_is_stored_with_its_chunks_and_found_listed_and_deleted(docs, tokenizer) -> None:
    made = await add(docs, text=TEXT, title="Boats")
    num_tokens = len(tokenizer.encode_plain(TEXT))
    assert made["content_hash"] == hashlib.sha256(TEXT.encode()).hexdigest()
    assert (made["num_tokens"], made["title"], made["num_bytes"]) == (num_tokens, "Boats", len(TEXT))
    assert made["num_chunks"] == made["num_stored"] >= num_tokens / 64
    assert (made["num_known"], made["reason"]) == (0, None)
    again = await add(docs, text=TEXT, title="Boats")
    assert (again["id"], again["num_stored"], again["num_known"]) == (made["id"], 0, made["num_chunks"])
    shown = (await docs.http.get(f"{DOCUMENTS}/{made['id']}")).json()
    assert (shown["text"], shown["created"]) == (TEXT, made["created"])
    other = await add(docs, text=OTHER)
    listed = (await docs.http.get(DOCUMENTS)).json()
    assert ([entry["id"] for entry in listed["data"]], listed["has_more"]) == ([made["id"], other["id"]], False)
    first = (await docs.http.get(DOCUMENTS, params={"limit": 1})).json()
    second = (await docs.http.get(DOCUMENTS, params={"after": first["data"][0]["id"]})).json()
    assert (first["has_more"], [entry["id"] for entry in second["data"]]) == (True, [other["id"]])
    assert await docs.metric("tandem_documents") == 2
    gone = await docs.http.delete(f"{DOCUMENTS}/{made['id']}")
    assert gone.json() == {"id": made["id"], "object": "document.deleted", "deleted": True}
    for answer in (
        await docs.http.get(f"{DOCUMENTS}/{made['id']}"),
        await docs.http.delete(f"{DOCUMENTS}/{made['id']}"),
        await chat(docs, [made["id"]]),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "document_not_found")
    assert await docs.metric("tandem_documents") == 1


async def test_deleting_drops_the_chunks_that_no_other_document_has(docs) -> None:
    made = await add(docs, text=TEXT)
    same = await add(docs, text=TEXT, title="of another name")
    salted = await add(docs, text=TEXT, cache_salt="s")
    await chat(docs, [{"text": OTHER}, made["id"]], cache_salt="of the chat")
    assert (same["num_known"], salted["num_stored"]) == (made["num_chunks"], made["num_chunks"])
    await docs.http.delete(f"{DOCUMENTS}/{made['id']}")
    assert (await add(docs, text=TEXT, title="third"))["num_stored"] == 0, "another document has them"
    listed = (await docs.http.get(DOCUMENTS)).json()["data"]
    for entry in listed:
        await docs.http.delete(f"{DOCUMENTS}/{entry['id']}")
    for body in ({"text": TEXT}, {"text": TEXT, "cache_salt": "s"}, {"text": TEXT, "cache_salt": "of the chat"}):
        again = await add(docs, **body)
        assert (again["num_stored"], again["num_known"]) == (made["num_chunks"], 0)
    assert (await add(docs, text=OTHER, cache_salt="of the chat"))["num_known"] == 0


async def test_a_chat_carries_the_ids_of_its_documents_chunks_and_where_they_stand(docs, tokenizer) -> None:
    noted = note_requests(docs)
    made = await add(docs, text=TEXT, title="Boats")
    answer = await chat(docs, [{"text": OTHER}, made["id"]])
    (request,) = noted
    prompt = request.prompt_token_ids
    cut = Chunker(tokenizer, 64).cut
    wanted = [list(chunk) for text in (OTHER, TEXT) for chunk in cut(text, 9999)]
    assert [prompt[chunk.begin : chunk.end] for chunk in request.chunks] == wanted
    assert {chunk.salt for chunk in request.chunks} == {""}
    assert (request.fusion.policy, request.fusion.ratio, request.fusion.select_layer) == ("a3", 0.15, 5)
    assert answer.json()["usage"]["prompt_tokens"] == len(prompt)
    for layer in (1, 11):  # the paper's, and the last one
        await chat(docs, [made["id"]], fusion={"select_layer": layer})
        assert (noted[-1].fusion.policy, noted[-1].fusion.select_layer) == ("a3", layer)
    assert request.fusion.seam_tokens == 1
    for seam_tokens in (0, 4):
        await chat(docs, [made["id"]], fusion={"seam_tokens": seam_tokens})
        assert noted[-1].fusion.seam_tokens == seam_tokens
    text = tokenizer.decode(prompt, False)
    assert text.startswith("<|begin_of_text|><|user|>\nDocument 1\nThe mayor")
    assert f"\n\nDocument 2: Boats\n{TEXT}\n\nHi<|end|>" in text


async def test_usage_says_what_was_reused_and_what_was_computed_again(docs) -> None:
    made = await add(docs, text=TEXT)
    size = made["num_tokens"]
    unique = details(await chat(docs, [made["id"]], fusion={"policy": "pie", "ratio": 0.0}))
    assert (unique["reused_tokens"], unique["recomputed_tokens"]) == (size, 0)
    some = details(await chat(docs, [made["id"]], fusion={"policy": "a3", "ratio": 0.25}))
    assert (some["reused_tokens"], some["recomputed_tokens"]) == (size - size // 4, size // 4)
    assert details(await chat(docs, []))["reused_tokens"] == 0
    assert await docs.metric("tandem_document_reused_tokens_total") == 2 * size - size // 4
    assert await docs.metric("tandem_document_recomputed_tokens_total") == size // 4
    assert await docs.metric("tandem_document_chats_total") == 2
    assert await docs.metric("tandem_document_tokens_total") == 2 * size
    assert await docs.metric("tandem_document_chunks_stored_total") == made["num_stored"]
    answer = await chat(docs, [made["id"]], n=3)
    assert details(answer)["reused_tokens"] == size - int(0.15 * size), "counted once, as the prompt is"


async def test_an_inline_document_is_stored_by_its_first_use_and_the_next_turn_fuses_it_again(docs) -> None:
    noted = note_requests(docs)
    inline = [{"title": "Keys", "text": OTHER}, {"text": TEXT}]
    assert details(await chat(docs, inline))["reused_tokens"] == 0
    listed = (await docs.http.get(DOCUMENTS)).json()["data"]
    assert [entry["title"] for entry in listed] == ["Keys", ""]
    turns = [*HI, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And?"}]
    ids = [entry["id"] for entry in reversed(listed)]
    assert details(await chat(docs, ids, messages=turns))["reused_tokens"] > 0
    first, second = noted
    names = [{(c.salt, r.prompt[4 * c.begin : 4 * c.end]) for c in r.chunks} for r in (first, second)]
    assert names[0] == names[1], "in another order, under another question, the chunks are the same"
    assert len((await docs.http.get(DOCUMENTS)).json()["data"]) == 2


async def test_vanilla_computes_the_same_ids_and_a_plain_chat_is_as_ever(docs) -> None:
    noted = note_requests(docs)
    fused, vanilla = (
        await chat(docs, [{"text": TEXT}]),
        await chat(docs, [{"text": TEXT}], fusion={"policy": "vanilla"}),
    )
    assert noted[0].prompt == noted[1].prompt
    assert (noted[1].fusion, noted[1].chunks) == (None, ())
    counts = {"cached_tokens": 7, "reused_tokens": 0, "recomputed_tokens": 0}
    assert details(vanilla) == counts | {"cached_tokens_from": {"card": 7, "host": 0, "disk": 0}}
    assert details(fused)["cached_tokens"] == 7
    await docs.http.post(CHAT, json={"messages": HI, "max_tokens": 1, "fusion": {"ratio": 1}, "documents": None})
    assert (noted[2].fusion, noted[2].chunks) == (None, ())


async def test_the_official_client_names_documents_in_extra_body(docs) -> None:
    made = await docs.openai.post("/documents", body={"text": TEXT, "title": "Boats"}, cast_to=object)
    answer = await docs.openai.chat.completions.create(
        model="reference",
        messages=HI,
        max_tokens=4,
        extra_body={"documents": [made["id"], {"text": OTHER}], "fusion": {"policy": "random", "ratio": 0.3}},
    )
    assert answer.usage.prompt_tokens > made["num_tokens"]
    assert answer.usage.prompt_tokens_details.reused_tokens > 0
    stream = await docs.openai.chat.completions.create(
        model="reference", messages=HI, max_tokens=4, stream=True, stream_options={"include_usage": True},
        extra_body={"documents": [made["id"]]},
    )  # fmt: skip
    usage = [chunk.usage async for chunk in stream][-1]
    assert usage.prompt_tokens_details.reused_tokens > 0
    with pytest.raises(openai.NotFoundError) as refused:
        await docs.openai.chat.completions.create(
            model="reference", messages=HI, extra_body={"documents": [made["id"], "doc-of-nobody"]}
        )
    assert (refused.value.param, refused.value.code) == ("documents[1]", "document_not_found")


async def test_ids_are_their_keys_and_chunks_too_where_keys_are_isolated(tmp_path: Path) -> None:
    for isolation, is_shared in (("none", True), ("key", False)):
        deployment = make_deployment(api_keys=["one", "two"], cache_isolation=isolation)
        async with running_server(with_documents(deployment, tmp_path / isolation), fake_command()) as live:
            noted = note_requests(live)
            mine = await add(live, "one", text=TEXT)
            theirs = await add(live, "two", text=TEXT)
            assert mine["id"] != theirs["id"]
            assert (theirs["num_known"] > 0) is is_shared
            assert (await chat(live, [mine["id"]], "two")).status_code == 404
            for method in ("GET", "DELETE"):
                headers = {"authorization": "Bearer two"}
                answer = await live.http.request(method, f"{DOCUMENTS}/{mine['id']}", headers=headers)
                assert answer.status_code == 404
            listed = (await live.http.get(DOCUMENTS, headers={"authorization": "Bearer two"})).json()
            assert [entry["id"] for entry in listed["data"]] == [theirs["id"]]
            assert (await live.http.get(DOCUMENTS)).status_code == 401
            for key, own in (("one", None), ("two", None), ("one", "s"), ("one", "s")):
                extra = {} if own is None else {"cache_salt": own}
                assert (await chat(live, [{"text": OTHER}], key, **extra)).status_code == 200
            one, two, salted, again = ({chunk.salt for chunk in request.chunks} for request in noted)
            assert (one == two == {""}) is is_shared
            assert salted == again
            assert salted not in (one, two)
            ahead = await add(live, "one", text=OTHER, cache_salt="s")
            assert ahead["num_stored"] == 0, "known: the chats with that salt have stored them"


async def test_messages_make_a_document_too(docs) -> None:
    messages = [{"role": "user", "content": "Who has keys?"}, {"role": "assistant", "name": "Ann", "content": "I do."}]
    made = await add(docs, messages=messages)
    shown = (await docs.http.get(f"{DOCUMENTS}/{made['id']}")).json()
    assert shown["text"] == "user: Who has keys?\n\nAnn: I do."
    call = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"key": 7}'}}
    turns = [
        {"role": "assistant", "content": "Let me look.", "tool_calls": [call, call | {"id": "c2"}]},
        {"role": "tool", "content": "seven", "tool_call_id": "c1"},
        {"role": "tool", "content": "none", "tool_call_id": "c2"},
        {"role": "assistant", "tool_calls": [call | {"id": "c3"}]},
    ]
    made = await add(docs, messages=turns)
    shown = (await docs.http.get(f"{DOCUMENTS}/{made['id']}")).json()
    asked = 'find({"key": 7})'
    assert shown["text"] == (
        f"assistant: Let me look.\n{asked}\n{asked}\n\ntool: seven\n\ntool: none\n\nassistant: {asked}"
    )


REFUSED = [
    (DOCUMENTS, {}, "text"),
    (DOCUMENTS, {"text": "a", "messages": HI}, "text"),
    (DOCUMENTS, {"text": ""}, "text"),
    (DOCUMENTS, {"text": "word " * 20_000}, "text"),
    (DOCUMENTS, {"text": "a", "title": "t" * 1025}, "title"),
    (DOCUMENTS, {"text": "a", "titel": "t"}, "titel"),
    (DOCUMENTS, {"messages": []}, "messages"),
    (CHAT, {"messages": HI, "documents": [{"title": "t"}]}, "documents[0].text"),
    (CHAT, {"messages": HI, "documents": [{"text": "a", "txt": "b"}]}, "documents[0].txt"),
    (CHAT, {"messages": HI, "documents": [7]}, "documents[0]"),
    (CHAT, {"messages": HI, "documents": ["doc-"] * 1025}, "documents"),
    (CHAT, {"messages": HI, "documents": [{"text": "word " * 9000}, {"text": "word " * 9000}]}, "documents"),
    (CHAT, {"messages": HI, "documents": [{"text": "a"}], "fusion": {"policy": "best"}}, "fusion.policy"),
    (CHAT, {"messages": HI, "documents": [{"text": "a"}], "fusion": {"ratio": 1.5}}, "fusion.ratio"),
    (CHAT, {"messages": HI, "documents": [{"text": "a"}], "fusion": {"rate": 1}}, "fusion.rate"),
    (CHAT, {"messages": HI, "documents": [{"text": "a"}], "fusion": {"select_layer": 0}}, "fusion.select_layer"),
    (CHAT, {"messages": HI, "documents": [{"text": "a"}], "fusion": {"select_layer": 12}}, "fusion.select_layer"),
    (CHAT, {"messages": HI, "documents": [{"text": "a"}], "fusion": {"seam_tokens": -1}}, "fusion.seam_tokens"),
    (CHAT, {"messages": HI, "documents": [{"text": "a"}], "fusion": {"seam_tokens": 1.5}}, "fusion.seam_tokens"),
    (CHAT, {"messages": HI, "documents": [{"text": "a"}], "fusion": {"seam_tokens": 2**17}}, "fusion.seam_tokens"),
]


async def test_what_cannot_be_served_is_a_400_that_names_the_field(docs) -> None:
    for path, body, param in REFUSED:
        answer = await docs.http.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
        assert len(answer.text) < 400
    assert (await docs.http.get(DOCUMENTS)).json()["data"] == [], "nothing is left of it"


async def test_ids_of_more_text_than_any_prompt_holds_are_refused_unread(docs, tokenizer) -> None:
    made = await add(docs, text="word " * 15_000)
    most = 4 * tokenizer.longest_token_chars * 16384
    answer = await chat(docs, [made["id"]] * (most // made["num_bytes"] + 1))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "bytes; no prompt has room for them" in answer.json()["error"]["message"]
    answer = await chat(docs, [made["id"]] * 2)
    assert "documents: with the messages at least 30" in answer.json()["error"]["message"]


async def test_pages_have_a_size_and_begin_behind_a_document_that_is_there(docs) -> None:
    for limit in ("0", "1001", "x", "-1", "1e3", ""):
        answer = await docs.http.get(DOCUMENTS, params={"limit": limit})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "limit")
    assert (await docs.http.get(DOCUMENTS, params={"after": "doc-x"})).status_code == 404


async def test_a_deployment_without_the_section_refuses_documents_by_name() -> None:
    async with running_server(make_deployment(), fake_command()) as live:
        answer = await chat(live, [{"text": TEXT}])
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "documents")
        assert "needs the section `documents`" in answer.json()["error"]["message"]
        assert (await chat(live, [])).status_code == 200
        for method in ("GET", "POST"):
            refused = await live.http.request(method, DOCUMENTS)
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "documents_off")
        described = (await live.http.get("/openapi.json")).json()
        assert DOCUMENTS not in described["paths"]
        assert described["components"]["schemas"]["ChatBody"]["properties"]["documents"]["enum"] == [None, []]


async def test_what_the_engine_could_not_store_is_told_and_the_document_is_there(tmp_path: Path) -> None:
    deployment = with_documents(make_deployment(), tmp_path, chunk_tokens=64)
    async with running_server(deployment, fake_command(most_chunks=2)) as live:
        made = await add(live, text=" ".join(f"Line {i} is its own." for i in range(60)))
        assert (made["num_stored"], made["reason"]) == (2, "the disk is full")
        assert (await chat(live, [made["id"]])).status_code == 200


async def test_who_does_not_wait_is_answered_at_once_and_who_waits_is_told_that_the_engine_died(
    tmp_path: Path,
) -> None:
    async with running_server(with_documents(make_deployment(), tmp_path), fake_command(no_store=1)) as live:
        made = await add(live, text=TEXT, wait=False)
        assert (made["num_stored"], made["num_known"], made["reason"]) == (None, None, None)
        waiting = asyncio.create_task(live.http.post(DOCUMENTS, json={"text": OTHER}))
        while len(live.service.supervisor._storing) < 2:
            await asyncio.sleep(0.01)
        live.service.supervisor.kill_engine()
        answer = await waiting
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
        await asyncio.sleep(0)
        assert live.service.supervisor._storing == {}
        assert len((await live.http.get(DOCUMENTS)).json()["data"]) == 2, "both are there"


async def test_without_room_a_new_document_is_refused_and_an_inline_one_is_served_all_the_same(tmp_path: Path) -> None:
    deployment = with_documents(make_deployment(), tmp_path, max_documents=1)
    async with running_server(deployment, fake_command()) as live:
        await add(live, text=TEXT)
        answer = await live.http.post(DOCUMENTS, json={"text": OTHER})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "documents_full")
        assert (await chat(live, [{"text": OTHER}])).status_code == 200
        live.service.documents.registry._file.execute("DROP TABLE documents")
        answer = await live.http.get(DOCUMENTS)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "documents_unavailable")
        assert str(tmp_path) not in answer.text
        assert (await chat(live, [{"text": OTHER}])).status_code == 200


async def test_documents_outlive_the_server(tmp_path: Path) -> None:
    async with running_server(with_documents(make_deployment(), tmp_path), fake_command()) as live:
        made = await add(live, text=TEXT)
    async with running_server(with_documents(make_deployment(), tmp_path), fake_command()) as live:
        assert await live.metric("tandem_documents") == 1
        assert (await chat(live, [made["id"]])).status_code == 200


def test_what_serve_would_refuse_is_known_before_and_nothing_is_made(tmp_path: Path) -> None:
    check_documents(make_deployment())
    deployment = with_documents(make_deployment(), tmp_path / "deep" / "folder")
    check_documents(deployment)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "deep").write_text("a file")
    with pytest.raises(ConfigError, match=r"documents\.folder: nothing can be written in .*/deep"):
        check_documents(deployment)
    (tmp_path / "documents.sqlite3").write_text("nothing of ours, and longer than a header would be" * 10)
    for check in (check_documents, lambda one: open_documents(one, None)):
        with pytest.raises(ConfigError, match=r"documents\.folder: .*documents\.sqlite3: file is not a database"):
            check(with_documents(make_deployment(), tmp_path))


def test_chunks_that_no_unit_of_prefill_has_room_for_are_refused_before_they_are_text_for_ever(tmp_path: Path) -> None:
    for prefill, most in ((PrefillConfig(chunk_tokens=256), 256), (PrefillConfig(max_hidden_tokens=300), 300)):
        scheduler = make_deployment().scheduler.model_copy(update={"prefill": prefill})
        for chunk_tokens in (most, most + 1):
            deployment = with_documents(make_deployment(), tmp_path, chunk_tokens=chunk_tokens)
            deployment = deployment.model_copy(update={"scheduler": scheduler})
            if chunk_tokens == most:
                require_settings(deployment)
                continue
            with pytest.raises(
                ConfigError, match=rf"documents\.chunk_tokens: got {chunk_tokens}; wanted at most {most}, "
            ):
                require_settings(deployment)


def test_a_folder_of_documents_is_relative_to_the_file_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("model: {path: /m}\ndocuments: {folder: kept, ratio: 0.3}\n")
    config = load_deployment(path).documents
    assert (config.folder, config.ratio, config.policy) == (tmp_path / "kept", 0.3, "a3")
    path.write_text("model: {path: /m}\ndocuments: {}\n")
    assert load_deployment(path).documents.resolved_folder.parts[-2:] == ("tandem", "chunks")
    path.write_text("model: {path: /m}\ndocuments: {policy: best}\n")
    with pytest.raises(ConfigError, match=r"documents\.policy"):
        load_deployment(path)

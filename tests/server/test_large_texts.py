"""Texts and bodies that are too large: refused for little memory and time, and nobody else waits for them."""

import asyncio
import gc
import json
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.api_error import ApiError
from server.bodies import body_reader
from server.bodies.body_reader import decode_body
from server.bodies.generation_bodies import MAX_BIASES
from server.bodies.json_size import MOST, MOST_LEVELS, check_json_size, count_items, count_levels
from server.prompting.chat_template import ChatTemplate
from server.text.model_tokenizer import Tokenizer, TooManyTokens
from server.text.text_pool import TextPool
from tests.server.live_server import REFERENCE, ROOT, Running, fake_command, make_deployment, running_server
from tests.server.program import Program
from tests.server.test_bad_input import error_of
from tests.tolerances import BODY_STALL_S, REFUSED_TEXT_BYTES, REFUSED_TEXT_S

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]
LONG = "word " * 20000


async def test_texts_that_cannot_fit_are_refused_for_little_memory_and_beside_them_a_chat_is_answered():
    prose = "It was the best of times, it was the worst of times. "
    texts = [prose * (15_000_000 // len(prose)), *[prose * (1_000_000 // len(prose))] * 3, " " * 300_000]
    bodies = [(COMPLETION, {"prompt": text}) for text in texts]
    bodies += [(CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": texts[1]}]}]})]
    program = Program({})  # its memory is its own: nothing that other tests let go of is taken again
    async with httpx.AsyncClient(base_url=program.ready(), timeout=60) as http:
        lone = await took(http.post(CHAT, json={"messages": HI, "max_tokens": 2}))
        before = psutil.Process(program.process.pid).memory_info().rss
        asked = [asyncio.create_task(http.post(path, json=body)) for path, body in bodies]
        await asyncio.sleep(0.1)
        beside = await took(http.post(CHAT, json={"messages": [HI[0] | {"content": "one " * 1000}], "max_tokens": 2}))
        for answer in await asyncio.gather(*asked):
            error = error_of(answer)
            assert error["code"] == "context_length_exceeded"
            assert "16384" in error["message"]
        growth = psutil.Process(program.process.pid).memory_info().rss - before
    program.process.terminate()
    assert program.end()[0] == 0
    assert growth < REFUSED_TEXT_BYTES * sum(map(len, texts))
    assert beside < lone + REFUSED_TEXT_S


def test_a_text_that_is_tokenised_takes_more_memory_than_that():
    code = (
        "import psutil, sys; from pathlib import Path; from server.text.model_tokenizer import Tokenizer\n"
        "tokenizer, text = Tokenizer(*[Path(sys.argv[1])] * 2), 'It was the best of times. ' * 40_000\n"
        "before = psutil.Process().memory_info().rss\n"
        "ids = tokenizer.vocabulary.encode_batch_fast([text], add_special_tokens=False)\n"
        "print((psutil.Process().memory_info().rss - before) / len(text))"
    )
    printed = subprocess.run([sys.executable, "-c", code, str(REFERENCE)], cwd=ROOT, capture_output=True, check=True)
    assert float(printed.stdout) > 2 * REFUSED_TEXT_BYTES


async def took(asked: Awaitable[httpx.Response]) -> float:
    began_s = asyncio.get_running_loop().time()
    assert (await asked).status_code == 200
    return asyncio.get_running_loop().time() - began_s


def test_a_text_that_is_counted_piece_by_piece_fits_if_all_of_it_does(tokenizer):
    longest = max((tokenizer.token_bytes(token_id) for token_id in range(8192)), key=len).decode()
    assert len(longest) == tokenizer.longest_token_chars
    texts = ("It was the best of times. " * 6000, "a" * 150_000, "naïve 東京 " * 20_000, "1234567" * 9000)
    for text in (longest * 15_000, *texts):
        num_tokens = len(tokenizer.encode(text, False))
        for most in (num_tokens, num_tokens + 5, 4 * num_tokens):
            tokenizer.check_fits(text, most)
        with pytest.raises(TooManyTokens) as refused:
            tokenizer.check_fits(text, len(text) // 200)
        assert len(text) // 200 < refused.value.num_tokens <= num_tokens
    assert len(longest) * 15_000 > 6 * len(tokenizer.encode(longest * 15_000, False)), (
        "the first is counted before it fits"
    )


async def test_tokenize_and_detokenize_have_a_limit():
    async with running_server(make_deployment(max_tokenize_kib=2), fake_command()) as live:
        for path, field, item in (("/tokenize", "prompt", "a"), ("/detokenize", "tokens", [70])):
            assert (await live.http.post(path, json={field: item * 2048})).status_code == 200
            error = error_of(await live.http.post(path, json={field: item * 2049}))
            assert error["message"].startswith(f"{field}: 2049 ")
            assert "server.max_tokenize_kib" in error["message"]
        error = error_of(await live.http.post("/tokenize", json={"messages": [{"role": "user", "content": LONG}]}))
        assert error["code"] == "context_length_exceeded"


class Held:
    """Hold a method where it is, while others run, until it is released; count how many are in it at once."""

    def __init__(self, method: Callable[..., object], is_held: Callable[..., bool]) -> None:
        self.goes_on = threading.Event()
        self.num_in = self.most_in = 0

        def call(*args: object) -> object:
            if is_held(*args):
                self.num_in += 1
                self.most_in = max(self.most_in, self.num_in)
                assert self.goes_on.wait(20)
                self.num_in -= 1
            return method(*args)

        self.call = call


@pytest.mark.parametrize(
    ("path", "body", "owner", "name", "is_held"),
    [
        ("/tokenize", {"prompt": LONG}, Tokenizer, "encode", lambda _, text, special: len(text) == len(LONG)),
        ("/tokenize", {"messages": [HI[0] | {"content": LONG[:65_000]}]}, ChatTemplate, "render", lambda *_: True),
        ("/detokenize", {"tokens": [70] * 70_000}, Tokenizer, "decode", lambda _, ids, skip: len(ids) == 70_000),
    ],
    ids=["prompt", "messages", "tokens"],
)
async def test_long_texts_to_tokenize_leave_a_thread_to_long_prompts(
    live, monkeypatch, path, body, owner, name, is_held
):
    held = Held(getattr(owner, name), is_held)
    monkeypatch.setattr(owner, name, held.call)
    asked = [asyncio.create_task(live.http.post(path, json=body)) for _ in range(4)]

    async def is_in() -> bool:
        return held.num_in > 0

    await live.until(is_in)
    beside = [(COMPLETION, {"prompt": LONG[:70_000], "max_tokens": 2}), ("/tokenize", {"prompt": "word " * 1000})]
    others = [asyncio.create_task(live.http.post(to, json=body)) for to, body in beside]
    done, _ = await asyncio.wait(others, timeout=5)
    held.goes_on.set()
    answers = await asyncio.gather(*others, *asked)
    assert len(done) == 2, "they were answered while the others were held"
    assert [answer.status_code for answer in answers] == [200] * 6
    assert held.most_in == 1


async def test_long_texts_that_wait_are_bounded_wherever_they_wait(monkeypatch):
    monkeypatch.setattr("server.text.text_pool._MOST_WAITING", 3)
    texts, has_come, goes_on = TextPool(1), threading.Event(), threading.Event()

    def work() -> None:
        has_come.set()
        assert goes_on.wait(10)

    async def ask() -> None:
        async with texts.one_at_a_time(100_000):
            await texts.run(100_000, work)

    asked = [asyncio.create_task(ask()) for _ in range(3)]
    assert await asyncio.to_thread(has_come.wait, 10)
    one_more = asyncio.create_task(ask())
    done, _ = await asyncio.wait([one_more], timeout=2)
    goes_on.set()
    await asyncio.gather(*asked)
    assert done == {one_more}, "it was told at once"
    with pytest.raises(ApiError, match="3 texts wait"):
        await one_more
    await ask()
    texts.shutdown()


async def test_bodies_that_are_being_read_share_a_room():
    async with running_server(make_deployment(max_body_mib=1.0, max_bodies_mib=1.5), fake_command()) as live:
        release = asyncio.Event()

        async def slow_body() -> AsyncIterator[bytes]:
            yield b'{"prompt": "' + b"a" * 900_000
            await release.wait()
            yield b'"}'

        media = {"content-type": "application/json"}
        first = asyncio.create_task(live.http.post(COMPLETION, content=slow_body(), headers=media))

        async def is_taken() -> bool:
            return live.service.body_memory.num_taken_bytes > 900_000

        await live.until(is_taken)
        answer = await live.http.post(COMPLETION, json={"prompt": "a" * 900_000})
        assert (answer.status_code, error_of(answer)["code"]) == (503, "overloaded")
        assert answer.headers["retry-after"]
        assert (await live.http.post(COMPLETION, json={"prompt": "a"})).status_code == 200
        release.set()
        assert (await first).status_code == 400
        assert live.service.body_memory.num_taken_bytes == 0


def listed(begin: str, item: str, number: int, end: str) -> bytes:
    return (begin + ",".join([item] * number) + end).encode()


async def stall_beside(live: Running, path: str, body: bytes) -> tuple[float, httpx.Response]:
    """Return the longest time, in seconds, that the event loop stood still while a body was refused.

    Times in which other programs had the processor do not count: no more than this process worked meanwhile.
    """
    worst = 0.0
    answer = asyncio.create_task(live.http.post(path, content=body, headers={"content-type": "application/json"}))
    while not answer.done():
        began_s, worked_s = time.monotonic(), time.process_time()
        await asyncio.sleep(0.005)
        worst = max(worst, min(time.monotonic() - began_s, time.process_time() - worked_s))
    return worst, answer.result()


@pytest.fixture
def frozen_heap():
    """Have a collection look at what the test makes, and not at what the tests before it have left."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


async def test_beside_a_body_of_many_items_the_event_loop_goes_on(live, frozen_heap):
    many = '{"messages":[' + ",".join(['{"role":"user","content":[{"type":"text","text":""}]}'] * 10_000)
    long_walk = listed(many + '],"stop_token_ids":[', "1.0", 1_200_000, "]}")
    user = '{"messages":[{"role":"user","content":"a"}],'
    for path, body, what in (
        (CHAT, listed(user + '"tools":[', "{}", 5_200_000, "]}"), "5200004 objects and lists"),
        (CHAT, listed('{"messages":[', '{"role":"","content":""}', 600_000, "]}"), "600002 objects and lists"),
        (COMPLETION, listed('{"prompt":[', "1", 7_800_000, "]}"), "7800001 values in"),
        (COMPLETION, listed('{"prompt":"a","logit_bias":{', '"1":1', 1_200_000, "}}"), "1200002 names in objects"),
        (COMPLETION, listed('{"prompt":[', "1.0", 1_300_000, "]}"), "1300000 tokens"),
        (CHAT, long_walk, "stop_token_ids: more than"),
        (COMPLETION, b'{"' + b"x" * 15_000_000 + b'":1}', "unknown field"),
    ):
        for is_last in (False, True):  # what is decoded in the loop's way stands in it each time, a slow moment once
            stall, answer = await stall_beside(live, path, body)
            assert what in error_of(answer)["message"]
            if stall < BODY_STALL_S:
                break
            assert not is_last, what


async def test_a_large_body_is_decoded_in_a_thread_and_a_small_one_at_once(live, monkeypatch):
    threads = []

    def decode(*given):
        threads.append(threading.current_thread())
        return decode_body(*given)

    monkeypatch.setattr(body_reader, "decode_body", decode)
    for num_chars in (10, 100_000):
        await live.http.post(COMPLETION, json={"prompt": "a" * num_chars, "max_tokens": 1})
    own = threading.current_thread()
    assert [thread is own for thread in threads] == [True, False]


async def test_biases_have_a_limit(live):
    for more in (0, 1):
        bias = {str(token_id): 200 for token_id in range(MAX_BIASES + more)}
        answer = await live.http.post(COMPLETION, json={"prompt": "a", "logit_bias": bias})
        wanted = f"logit_bias: more than {MAX_BIASES} token ids" if more else "logit_bias: got 200 for token 0"
        assert error_of(answer)["message"].startswith(wanted)


def size_of(tree: object) -> tuple[int, int, int]:
    """Count objects and lists, names in objects, and values in either, by looking at every one."""
    if not isinstance(tree, dict | list):
        return 0, 0, 0
    inside = [size_of(value) for value in (tree.values() if isinstance(tree, dict) else tree)]
    containers, names, values = (sum(counts) for counts in zip(*inside, strict=True)) if inside else (0, 0, 0)
    return containers + 1, names + len(tree) * isinstance(tree, dict), values + len(tree)


@settings(max_examples=50, deadline=None)
@given(
    st.recursive(
        st.integers() | st.text('a\\"[]{},:é\n'),
        lambda inner: st.lists(inner) | st.dictionaries(st.text('\\"[,:'), inner),
        max_leaves=20,
    ),
    st.booleans(),
)
def test_items_of_a_json_text_are_counted_without_those_that_strings_spell_out(tree, is_ascii):
    containers, names, values = size_of(tree)
    found = list(count_items(json.dumps(tree, ensure_ascii=is_ascii).encode()).values())
    assert found[:2] == [containers, names]
    assert values <= found[2] <= values + containers


def test_a_text_is_refused_for_one_item_too_many_and_never_for_what_its_strings_hold():
    check_json_size(json.dumps({"prompt": '[{,:"' * 1_000_000}).encode())
    for what, begin, item, end, in_frame in (
        ("objects and lists", "[", "[]", "]", 1),
        ("names in objects", "{", '"a":1', "}", 0),
        ("values in objects and lists", "[", "1", "]", 0),
    ):
        check_json_size(listed(begin, item, MOST[what] - in_frame, end))
        with pytest.raises(ApiError, match=f"^body: {MOST[what] + 1} {what}, at most {MOST[what]} are read"):
            check_json_size(listed(begin, item, MOST[what] + 1 - in_frame, end))


def levels_of(tree: object) -> int:
    inside = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else None
    return 0 if inside is None else 1 + max(map(levels_of, inside), default=0)


@settings(max_examples=50, deadline=None)
@given(st.recursive(st.text('a\\"[]{}'), lambda inner: st.lists(inner) | st.dictionaries(st.text('"{]'), inner)))
def test_levels_of_a_json_text_are_counted_behind_any_number_of_others(tree):
    few = json.dumps(tree).encode()
    many = json.dumps([tree, [[]] * MOST_LEVELS]).encode()
    assert levels_of(tree) <= count_levels(few) <= few.count(b"[") + few.count(b"{")
    assert count_levels(many) == 1 + max(levels_of(tree), 2)


def nest(levels: int) -> dict[str, object]:
    """Return a schema of so many objects in one another."""
    return {"items": nest(levels - 1)} if levels > 1 else {"type": "string"}


def nested_bodies(tree: dict[str, object]) -> list[tuple[str, dict[str, object]]]:
    """Return bodies in which clients send a tree of their own."""
    hi = {"role": "user", "content": "Hi"}
    tools = [{"type": "function", "function": {"name": "f", "parameters": tree}}]
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": json.dumps(tree)}}
    block = {"type": "tool_use", "id": "a", "name": "f", "input": tree}
    chat = {"messages": [hi], "max_tokens": 1}
    return [
        (CHAT, chat | {"structured_outputs": {"json": tree}}),
        (CHAT, chat | {"structured_outputs": {"json": json.dumps(tree)}}),
        (CHAT, chat | {"tools": tools, "tool_choice": "required"}),
        (CHAT, chat | {"tools": tools}),
        (CHAT, chat | {"chat_template_kwargs": {"x": tree}}),
        (CHAT, chat | {"messages": [hi, {"role": "assistant", "tool_calls": [call]}]}),
        ("/v1/messages", chat | {"messages": [hi, {"role": "assistant", "content": [block]}]}),
    ]


@pytest.mark.parametrize("levels", [MOST_LEVELS - 8, MOST_LEVELS + 1, 600])
async def test_what_is_nested_too_deeply_is_refused_wherever_it_stands(live, levels):
    for path, body in nested_bodies(nest(levels)):
        answer = await live.http.post(path, json=body)
        is_text = "tool_calls" in body["messages"][-1]  # arguments are text, which may be no object
        assert answer.status_code == (200 if levels < MOST_LEVELS or is_text else 400), answer.text
        if answer.status_code == 400:
            assert "levels deep, at most 100 are read" in answer.json()["error"]["message"]

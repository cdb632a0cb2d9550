"""Texts and bodies that are too large: refused for little memory and time, and nobody else waits for them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable

import httpx
import psutil
import pytest

from server.tokenizer import TooManyTokens
from tests.server.live_server import fake_command, make_deployment, running_server
from tests.server.test_bad_input import error_of
from tests.tolerances import REFUSED_TEXT_BYTES, REFUSED_TEXT_S

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]
LONG = "word " * 20000


async def test_texts_that_cannot_fit_are_refused_for_little_memory_and_beside_them_a_chat_is_answered(live, tokenizer):
    prose = "It was the best of times, it was the worst of times. "
    texts = [prose * (15_000_000 // len(prose)), *[prose * (1_000_000 // len(prose))] * 3, " " * 300_000]
    lone = await took(live.http.post(CHAT, json={"messages": HI, "max_tokens": 2}))
    before = psutil.Process().memory_info().rss
    bodies = [(COMPLETION, {"prompt": text}) for text in texts]
    bodies += [(CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": texts[1]}]}]})]
    asked = [asyncio.create_task(live.http.post(path, json=body)) for path, body in bodies]
    await asyncio.sleep(0.1)
    beside = await took(live.http.post(CHAT, json={"messages": [HI[0] | {"content": "one " * 1000}], "max_tokens": 2}))
    for answer in await asyncio.gather(*asked):
        error = error_of(answer)
        assert error["code"] == "context_length_exceeded"
        assert "16384" in error["message"]
    growth = psutil.Process().memory_info().rss - before
    assert growth < REFUSED_TEXT_BYTES * sum(map(len, texts))
    assert beside < lone + REFUSED_TEXT_S
    began = psutil.Process().memory_info().rss
    ids = tokenizer.vocabulary.encode_batch_fast([texts[1]], add_special_tokens=False)
    assert psutil.Process().memory_info().rss - began > REFUSED_TEXT_BYTES * len(texts[1]), "tokenised, it is seen"
    del ids


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
            return live.service.body_room.num_taken_bytes > 900_000

        await live.until(is_taken)
        answer = await live.http.post(COMPLETION, json={"prompt": "a" * 900_000})
        assert (answer.status_code, error_of(answer)["code"]) == (503, "overloaded")
        assert answer.headers["retry-after"]
        assert (await live.http.post(COMPLETION, json={"prompt": "a"})).status_code == 200
        release.set()
        assert (await first).status_code == 400
        assert live.service.body_room.num_taken_bytes == 0

"""Every endpoint and option, asked by the official client."""

import asyncio

import openai
import pytest
from openai import NOT_GIVEN

from tests.server.live_server import Running

PROMPT = "The café on the 5th street, 東京, is open — naïve €."
CHAT = [{"role": "user", "content": PROMPT}]


def complete(live: Running, **options):
    return live.openai.completions.create(**{"model": "reference", "prompt": PROMPT, "temperature": 0} | options)


def chat(live: Running, **options):
    return live.openai.chat.completions.create(**{"model": "reference", "messages": CHAT, "temperature": 0} | options)


async def all_of(stream) -> list:
    return [chunk async for chunk in await stream]


async def test_a_completion_repeats_the_prompt_and_counts_its_tokens(live, tokenizer):
    num_prompt = len(tokenizer.encode(PROMPT, True))
    done = await complete(live, max_tokens=200)
    assert done.choices[0].text == PROMPT
    assert done.choices[0].finish_reason == "stop"
    assert done.choices[0].logprobs is None
    assert done.object == "text_completion"
    assert done.usage.prompt_tokens == num_prompt
    assert done.usage.completion_tokens == num_prompt + 1
    assert done.usage.total_tokens == 2 * num_prompt + 1
    assert done.usage.prompt_tokens_details.cached_tokens == 7


async def test_prompts_may_be_strings_lists_and_token_ids(live, tokenizer):
    ids = tokenizer.encode("one two", True)
    texts = {"one two": ["one two"], "list": ["one two", "three"]}
    assert [c.text for c in (await complete(live, prompt=texts["list"])).choices] == ["one two", "three"]
    assert [c.text for c in (await complete(live, prompt=ids)).choices] == ["one two"]
    both = await complete(live, prompt=[ids, tokenizer.encode("three", True)], n=2)
    assert [c.text for c in both.choices] == ["one two", "one two", "three", "three"]
    assert [c.index for c in both.choices] == [0, 1, 2, 3]


async def test_a_streamed_completion_is_the_same_text(live):
    chunks = await all_of(complete(live, max_tokens=200, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == PROMPT
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage == (await complete(live, max_tokens=200)).usage
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1
    without = await all_of(complete(live, max_tokens=200, stream=True))
    assert all(c.choices and "usage" not in c.model_fields_set for c in without)


async def test_echo_with_logprobs_gives_every_prompt_token_its_place(live, tokenizer):
    for options in ({"max_tokens": 4}, {"max_tokens": 0}):
        done = (await complete(live, echo=True, logprobs=2, **options)).choices[0]
        assert done.text.startswith(PROMPT)
        logprobs = done.logprobs
        num_prompt = len(tokenizer.encode(PROMPT, True))
        lengths = {len(part) for part in (logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs)}
        assert lengths == {num_prompt + options["max_tokens"]} == {len(logprobs.text_offset)}
        assert logprobs.token_logprobs[0] is None
        assert logprobs.top_logprobs[0] is None
        assert all(value == -0.25 for value in logprobs.token_logprobs[1:])
        assert all(len(top) == 2 for top in logprobs.top_logprobs[1:])
        whole_tokens = [(t, o) for t, o in zip(logprobs.tokens, logprobs.text_offset, strict=True) if "bytes:" not in t]
        assert all(done.text[offset:].startswith(token) for token, offset in whole_tokens)


async def test_echo_without_logprobs_is_the_prompt_and_the_answer(live, tokenizer):
    assert (await complete(live, echo=True, max_tokens=200)).choices[0].text == PROMPT * 2
    ids = tokenizer.encode("one two", True)
    assert (await complete(live, prompt=ids, echo=True)).choices[0].text == "one twoone two"
    chunks = await all_of(complete(live, echo=True, logprobs=0, max_tokens=200, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == PROMPT * 2
    streamed = [token for c in chunks for token in c.choices[0].logprobs.tokens]
    whole = (await complete(live, echo=True, logprobs=0, max_tokens=200)).choices[0].logprobs
    assert streamed == whole.tokens
    assert [offset for c in chunks for offset in c.choices[0].logprobs.text_offset] == whole.text_offset
    assert len(whole.top_logprobs[1]) == 1, "the drawn token is always there"


async def test_a_stop_string_ends_the_request_in_the_engine(live):
    await complete(live, prompt="one two three four", max_tokens=8000, stop="two", extra_body={"ignore_eos": True})

    async def idle() -> bool:
        return await live.metric("tandem_requests_running") == 0

    await live.until(idle, 3)


async def test_seeds_of_n_choices_follow_one_another(live, tokenizer):
    words = "zero one two three four five six seven"
    num = len(tokenizer.encode(words, True))
    many = await complete(live, prompt=words, temperature=1, seed=1, n=3, max_tokens=num)
    alone = [(await complete(live, prompt=words, temperature=1, seed=1 + i, max_tokens=num)) for i in range(3)]
    assert [c.text for c in many.choices] == [c.choices[0].text for c in alone]
    assert len({c.text for c in many.choices}) == 3
    assert many.usage.prompt_tokens == num
    edge = await complete(live, temperature=1, seed=2**63 - 1, n=2)
    assert len(edge.choices) == 2


async def test_extension_fields_reach_the_engine(live, tokenizer):
    prompt = "one two three"
    num = len(tokenizer.encode(prompt, True))
    two = tokenizer.encode(" two", False)[0]
    ignoring = await complete(live, prompt=prompt, max_tokens=20, extra_body={"ignore_eos": True})
    assert ignoring.usage.completion_tokens == 20
    late = await complete(live, prompt=prompt, max_tokens=50, extra_body={"min_tokens": num + 5})
    assert late.usage.completion_tokens == num + 5 + 1  # and the one that ends it
    stopped = await complete(live, prompt=prompt, extra_body={"stop_token_ids": [two]})
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("one", "stop")
    extra = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "attention_profile": "exact"}
    assert (await complete(live, prompt=prompt, extra_body=extra)).choices[0].text == prompt
    rest = {"presence_penalty": 1, "frequency_penalty": -1, "logit_bias": {"5": -100}, "top_p": 0.5, "user": "me"}
    assert (await complete(live, prompt=prompt, best_of=1, **rest)).choices[0].text == prompt


async def test_a_chat_goes_through_the_template(live, tokenizer):
    done = await chat(live, max_completion_tokens=500)
    told = f"\n{PROMPT}\n"  # the template's special tokens have no text
    assert done.choices[0].message.content == told[:-1] or done.choices[0].message.content in told
    assert done.choices[0].message.role == "assistant"
    assert done.object == "chat.completion"
    rendered = f"<|begin_of_text|><|user|>\n{PROMPT}<|end|><|assistant|>\n"
    assert done.usage.prompt_tokens == len(tokenizer.encode(rendered, False))


async def test_chat_text_parts_and_both_limits(live):
    parts = [{"role": "user", "content": [{"type": "text", "text": PROMPT[:9]}, {"type": "text", "text": PROMPT[9:]}]}]
    joined = [{"role": "user", "content": f"{PROMPT[:9]}\n{PROMPT[9:]}"}]
    assert (await chat(live, messages=parts)).choices[0].message == (await chat(live, messages=joined)).choices[
        0
    ].message
    assert (await chat(live, max_tokens=3)).usage.completion_tokens == 3
    assert (await chat(live, max_completion_tokens=3)).usage.completion_tokens == 3
    allowed = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"]}
    assert (await chat(live, **allowed, metadata={"a": "b"}, store=False)).choices[0].message.content


async def test_a_streamed_chat_opens_with_the_role_and_ends_with_the_reason(live):
    for n in (NOT_GIVEN, 2):
        whole = await chat(live, n=n)
        chunks = await all_of(chat(live, stream=True, n=n, stream_options={"include_usage": True}))
        for index, choice in enumerate(whole.choices):
            mine = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
            assert (mine[0].delta.role, mine[0].delta.content) == ("assistant", "")
            assert all(c.delta.role is None for c in mine[1:])
            assert "".join(c.delta.content or "" for c in mine) == choice.message.content
            assert [c.finish_reason for c in mine] == [None] * (len(mine) - 1) + [choice.finish_reason]
        assert chunks[-1].usage == whole.usage
        assert all(c.object == "chat.completion.chunk" for c in chunks)


async def test_chat_logprobs_name_tokens_bytes_and_alternatives(live):
    whole = (await chat(live, logprobs=True, top_logprobs=3)).choices[0].logprobs.content
    assert all(entry.logprob == -0.25 and len(entry.top_logprobs) == 3 for entry in whole)
    text = b"".join(bytes(e.bytes) for e in whole if not e.token.startswith("<|")).decode()
    assert PROMPT in text
    chunks = await all_of(chat(live, logprobs=True, top_logprobs=3, stream=True))
    streamed = [entry for c in chunks if c.choices[0].logprobs for entry in c.choices[0].logprobs.content]
    assert streamed == whole
    bare = (await chat(live, logprobs=True)).choices[0].logprobs.content
    assert all(entry.top_logprobs == [] for entry in bare)


async def test_models_are_listed_and_looked_up(live):
    assert [m.id for m in (await live.openai.models.list()).data] == ["reference"]
    assert (await live.openai.models.retrieve("reference")).id == "reference"
    with pytest.raises(openai.NotFoundError) as missing:
        await live.openai.models.retrieve("gpt-5")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        await complete(live, model="gpt-5")


async def test_errors_are_the_clients_own_kinds(live):
    with pytest.raises(openai.BadRequestError) as bad:
        await complete(live, temperature=5)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.InternalServerError) as broken:
        await complete(live, extra_body={"attention_profile": "breaks"})
    assert "not finite" in broken.value.message
    with pytest.raises(openai.BadRequestError) as large:
        await complete(live, extra_body={"attention_profile": "too_large"})
    assert large.value.code == "context_length_exceeded"
    with pytest.raises(openai.APIError, match="not finite"):
        await all_of(complete(live, stream=True, extra_body={"attention_profile": "breaks"}))


async def test_many_streams_at_once_are_not_mixed_up(live):
    async def one(i: int) -> None:
        prompt = f"stream number {i} says {'x' * i} and ends"
        chunks = await all_of(complete(live, prompt=prompt, stream=True, max_tokens=200))
        assert "".join(c.choices[0].text for c in chunks) == prompt

    await asyncio.gather(*(one(i) for i in range(64)))

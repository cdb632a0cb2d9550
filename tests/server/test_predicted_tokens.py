"""The text that an answer may repeat comes to tokens of the model's vocabulary, or is refused by name."""

import asyncio
from types import SimpleNamespace

import pytest

from server.api_error import ApiError
from server.generation.prompt_tokens import predicted_tokens

BODY = SimpleNamespace(prediction=SimpleNamespace(content="abc"))


async def run(size: int, encode: object, *given: object) -> list[int]:
    return [1, 7, 299]


SERVICE = SimpleNamespace(texts=SimpleNamespace(run=run), tokenizer=SimpleNamespace(encode_within=None))


def test_tokens_of_the_vocabulary_are_taken() -> None:
    assert asyncio.run(predicted_tokens(SERVICE, BODY, 100, 300)) == [1, 7, 299]  # type: ignore[arg-type]


def test_a_token_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(ApiError, match="token id 299 is out of range, the vocabulary has 299") as refused:
        asyncio.run(predicted_tokens(SERVICE, BODY, 100, 299))  # type: ignore[arg-type]
    assert refused.value.param == "prediction"

"""Regular expressions that an engine's masks cannot follow are found before, those that they can are not."""

import json
import random

import pytest
from llguidance import LLMatcher

from gpu.config import ModelConfig
from scheduler.constraints.constraints import read_tokens
from scheduler.constraints.grammar import bytes_alone, check, limits
from scheduler.constraints.lexeme_trial import grows
from tests.server.live_server import REFERENCE

ANCHORED = {  # by whether they grow, as a text that they match as a whole
    "((a{1,50}){1,50}){1,50}": True,
    ".*a.{200}b.*c.{200}": True,
    r"(\w+\s?){1,100}": True,
    "([a-z]{1,30}){1,30}": True,
    "([^,]{1,40},?){1,10}": True,
    r"(.{1,80}\n?){1,50}": True,
    ".*é.{200}è.*à.{200}": True,
    "([a-z]{1,30} ){1,30}": False,
    "(.{1,100}\n){1,100}": False,
    r"(\w+ ){2,50}\w+": False,
    "(a|b|ab){1,1000}": False,
    "[a-z]{3,50}(,[a-z]{3,50}){0,20}": False,
    ".{1,5000}": False,
    r"[\s\S]{1,2000}": False,
    ".*abc.*": False,
    r"https?://[^\s/$.?#].[^\s]{0,200}": False,
    r"(?:(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)\.){3}(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)": False,
    "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}": False,
    r"(?:[0-9a-zA-Z+/]{4})*(?:(?:[0-9a-zA-Z+/]{2}==)|(?:[0-9a-zA-Z+/]{3}=))?": False,
}
ANYWHERE = {"a.{30}": True, ".{10,200}": True, ".{3,}b": False, r"\d{3}-\d{4}": False, "foo.{0,50}bar": False}


@pytest.mark.parametrize("pattern", ANCHORED)
def test_an_expression_that_grows_is_told_from_one_that_does_not(pattern: str) -> None:
    anchored = json.dumps({"type": "string", "pattern": f"^(?:{pattern})$"})
    assert grows(LLMatcher.grammar_from_regex(pattern), pattern) is ANCHORED[pattern]
    assert grows(LLMatcher.grammar_from_json_schema(anchored), pattern) is ANCHORED[pattern]


@pytest.mark.parametrize("pattern", ANYWHERE)
def test_a_pattern_that_may_match_anywhere_in_a_text_is_tried_so(pattern: str) -> None:
    schema = json.dumps({"type": "string", "pattern": pattern})
    assert grows(LLMatcher.grammar_from_json_schema(schema), pattern) is ANYWHERE[pattern]


@pytest.mark.parametrize("pattern", [pattern for pattern in ANCHORED if not ANCHORED[pattern]])
def test_one_that_does_not_grow_is_written_with_a_models_vocabulary(pattern: str) -> None:
    tokens = read_tokens(ModelConfig(path=REFERENCE), 8192)
    matcher = LLMatcher(tokens, LLMatcher.grammar_from_regex(pattern), log_level=0, limits=limits())
    draw = random.Random(5)
    for _ in range(100):
        mask = matcher.compute_bitmask()
        assert not matcher.is_error(), matcher.get_error()
        token_id = draw.randrange(8192)
        while not mask[token_id >> 3] >> (token_id & 7) & 1:
            token_id = (token_id + 1) % 8192
        matcher.consume_token(token_id)
        if matcher.is_stopped():
            break


def test_one_that_grows_passes_its_first_mask_and_fails_behind_some_tokens() -> None:
    """Power: it is for these that texts are tried."""
    grammar = LLMatcher.grammar_from_regex("((a{1,50}){1,50}){1,50}")
    assert check(grammar) == ""
    matcher = LLMatcher(bytes_alone(), grammar, log_level=0, limits=limits())
    while not matcher.is_error():
        matcher.compute_bitmask()
        matcher.consume_token(ord("a") + 1)
    assert "too many expressions" in matcher.get_error()


def test_one_that_does_not_compile_or_ends_at_once_does_not_grow() -> None:
    for pattern in ("(?=a)b", "(", "", "a"):
        assert not grows(LLMatcher.grammar_from_regex(pattern), pattern)

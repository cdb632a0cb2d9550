"""What answers are held to becomes a grammar, or a 400 that names what cannot be kept."""

import json

import pytest
from llguidance import LLMatcher

from scheduler.constraints.grammar import MOST_BYTES, check
from server.api_error import ApiError
from server.grammar.structured import (
    MOST_PROPERTIES,
    choice_grammar,
    lark_grammar,
    object_grammar,
    regex_grammar,
    schema_grammar,
    schema_in_lark,
)
from tests.server.grammar_texts import allows, spell_bytes

REFUSED = {
    "not": {"not": {"type": "string"}},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "contains": {"type": "object", "properties": {"a": {"type": "array", "contains": {"type": "string"}}}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "if": {"if": {"type": "string"}, "then": {"minLength": 2}},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^a"}, "properties": {"a": {}}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "$dynamicRef": {"$dynamicRef": "#node"},
    "format": {"type": "string", "format": "iri"},
    "pattern": {"type": "string", "pattern": "(?=a)b"},
    "oneOf": {"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}]},
    "$ref": {"$ref": "file:///etc/passwd"},
    "type": {"type": "text"},
    "minProperties": {"type": "object", "minProperties": 1, "properties": {"a": {}, "b": {}}},
    "minProperties: repeated names cannot be detected": {"minProperties": 3, "required": ["a"], "type": "object"},
    "patternProperties": {"type": "object", "patternProperties": {"^a": {"type": "null"}, "b$": {"type": "string"}}},
    "exclusiveMinimum": {"type": "integer", "minimum": 3, "exclusiveMinimum": True},
    "x-guidance": {"type": "object", "x-guidance": {"lenient": True}},
    "disallow": {"disallow": "string"},
}


@pytest.mark.parametrize("keyword", REFUSED)
def test_a_keyword_that_cannot_be_kept_is_refused_by_name(keyword):
    with pytest.raises(ApiError) as caught:
        schema_grammar("response_format", REFUSED[keyword])
    assert caught.value.status == 400
    assert caught.value.param == "response_format"
    assert caught.value.message.startswith("response_format: ")
    assert keyword in caught.value.message


def test_a_property_or_a_value_may_be_called_what_a_refused_keyword_is():
    schema = {
        "type": "object",
        "properties": {"not": {"type": "null"}, "x-guidance": {"const": {"disallow": 1}}, "extends": {"enum": [True]}},
        "required": ["not", "x-guidance", "extends"],
        "additionalProperties": False,
    }
    grammar = schema_grammar("response_format", schema)
    assert allows(grammar, '{"not": null, "x-guidance": {"disallow": 1}, "extends": true}')


@pytest.mark.parametrize("schema", [False, None, 3, "object", [{"type": "object"}]])
def test_what_is_no_schema_is_refused(schema):
    with pytest.raises(ApiError, match="wanted a JSON schema"):
        schema_grammar("response_format", schema)


def test_true_is_the_schema_of_everything():
    grammar = schema_grammar("response_format", True)
    assert allows(grammar, '[null, "text"]')


def test_a_schema_that_nothing_is_valid_by_is_refused():
    with pytest.raises(
        ApiError, match=r"no value satisfies this schema: minItems \(3\) is greater than maxItems \(1\)"
    ):
        schema_grammar("response_format", {"type": "array", "minItems": 3, "maxItems": 1})


def test_a_number_beyond_all_others_is_refused():
    for schema in ({"maximum": 10**400}, {"enum": [10**400]}):
        (keyword,) = schema
        with pytest.raises(ApiError, match=f"^response_format: #/{keyword}: number out of range, wanted one that"):
            schema_grammar("response_format", schema)


def test_a_schema_is_bounded_in_size():
    schema = {"enum": ["x" * MOST_BYTES]}
    with pytest.raises(ApiError, match=f"at most {MOST_BYTES} are compiled"):
        schema_grammar("response_format", schema)


def test_an_object_is_bounded_in_its_properties():
    schema = {"$defs": {"a": {"properties": {f"p{i}": {} for i in range(MOST_PROPERTIES + 1)}}}}
    with pytest.raises(ApiError, match=f"properties: {MOST_PROPERTIES + 1} of one object"):
        schema_grammar("response_format", schema)


def test_what_shows_to_be_too_complex_in_the_first_mask_is_refused():
    schema = {"properties": {f"p{i}": {} for i in range(MOST_PROPERTIES)}, "type": "object"}
    with pytest.raises(ApiError, match=r"max is 4000; consider [^<]*$"):
        schema_grammar("response_format", schema)


def test_between_the_tokens_of_json_stands_one_space_or_nothing():
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "null"}}, "b": {}}}
    grammar = schema_grammar("response_format", schema)
    assert allows(grammar, '{"a": [null, null], "b": {}}')
    for text in ('{"a":[', '{ "a"', '{"a":  ', '{"a": [ ', '{"a": []\n', ' {"', '{"b": {}} '):
        assert not allows(grammar, text, is_whole=False), text


@pytest.mark.parametrize("make", [object_grammar, lambda: schema_grammar("x", {"type": "object"})])
def test_an_object_is_no_other_value(make):
    assert allows(make(), '{"any": [1, {"thing": null}]}')
    assert not allows(make(), "[", is_whole=False)


def test_choices_are_texts_and_not_notation():
    choices = ["yes", 'a "quoted"\\ one', "<|end|>", "naïve /x/"]
    grammar = choice_grammar("structured_outputs.choice", choices)
    for choice in choices:
        assert allows(grammar, choice)
    assert not allows(grammar, "no", is_whole=False)


@pytest.mark.parametrize(
    ("choices", "param"), [([], "structured_outputs.choice"), (["a", ""], "structured_outputs.choice[1]")]
)
def test_no_choice_and_an_empty_one_are_refused(choices, param):
    with pytest.raises(ApiError, match=r": got an empty .*, wanted .*at least one") as caught:
        choice_grammar("structured_outputs.choice", choices)
    assert caught.value.param == param


def test_a_grammar_that_allows_nothing_is_refused_in_words():
    with pytest.raises(ApiError, match=r"^structured_outputs\.grammar: it allows no token$"):
        lark_grammar("structured_outputs.grammar", "start: start")


def test_a_pattern_matches_the_whole_text():
    grammar = regex_grammar("structured_outputs.regex", "[a-c]{2}|z")
    assert allows(grammar, "ab")
    assert allows(grammar, "z")
    assert not allows(grammar, "abc", is_whole=False)


@pytest.mark.parametrize("text", ['start: "a" DIGIT+\nDIGIT: /[0-9]/', 'root ::= "a" [0-9]+'])
def test_a_grammar_comes_as_lark_or_as_gbnf(text):
    grammar = lark_grammar("structured_outputs.grammar", text)
    assert allows(grammar, "a42")
    assert not allows(grammar, "b", is_whole=False)


@pytest.mark.parametrize("make", [regex_grammar, lark_grammar])
def test_what_is_no_pattern_and_no_grammar_is_refused_with_its_fault(make):
    with pytest.raises(ApiError) as caught:
        make("structured_outputs", "start: (")
    assert caught.value.status == 400
    assert "\n" not in caught.value.message


def test_a_schema_inside_a_grammar_has_no_endless_whitespace_either():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    grammar = lark_grammar("tools", 'start: "<call>" ' + schema_in_lark("tools", schema) + ' "</call>"')
    assert allows(grammar, '<call>{"a": 3}</call>')
    assert not allows(grammar, '<call>{"a":  ', is_whole=False)
    with pytest.raises(ApiError, match="uniqueItems"):
        schema_in_lark("tools", {"type": "array", "uniqueItems": True})


def test_special_tokens_of_a_grammar_are_left_to_who_has_the_vocabulary():
    assert check('start: <|call|> "a"') == ""


def test_a_grammar_says_all_there_is_to_know():
    """What is checked here is compiled elsewhere: the text holds options, too."""
    grammar = schema_grammar("x", {"type": "object"})
    assert json.loads(grammar)["grammars"][0]["json_schema"]["x-guidance"]["whitespace_flexible"] is False
    assert not LLMatcher(spell_bytes(), grammar).is_error()

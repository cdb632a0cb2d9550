"""Chat templates in their sandbox."""

import json

import pytest

from gpu.config import ModelConfig
from server.api_error import ApiError
from server.chat_message import Message, Part
from server.config import ConfigError
from server.template import ChatTemplate, load_template
from server.tokenizer import Tokenizer
from tests.server.live_server import REFERENCE

TURN = [Message(role="user", content="Hi")]


def test_the_references_template_writes_the_turns_it_was_trained_on(tokenizer):
    template = load_template(ModelConfig(path=REFERENCE), tokenizer)
    turns = [*TURN, Message(role="assistant", content="Yes."), Message(role="user", content="And?")]
    text = template.render(turns, str)
    assert text == (
        "<|begin_of_text|><|user|>\nHi<|end|><|assistant|>\nYes.<|end|><|user|>\nAnd?<|end|><|assistant|>\n"
    )
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert token_ids.count(0) == 1, "one BOS, the template's"


def test_text_parts_are_joined():
    template = ChatTemplate("{{ messages[0].content }}", {})
    parts = [Part(type="text", text="a"), Part(type="text", text="b")]
    assert template.render([Message(role="user", content=parts)], str) == "ab"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 // 0 }}",
        "{{ undefined.field.deeper }}",
    ],
)
def test_a_template_that_refuses_or_breaks_out_is_a_400_about_messages(source):
    with pytest.raises(ApiError) as refused:
        ChatTemplate(source, {}).render(TURN, str)
    assert (refused.value.status, refused.value.param) == (400, "messages")


def test_functions_and_tags_that_templates_expect_are_there():
    source = (
        "{% generation %}{{ bos_token }}{% endgeneration %}{{ messages | tojson }}"
        "{% for i in range(9) %}{% if i > 1 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        "{{ strftime_now('%Y') | length }}"
    )
    text = ChatTemplate(source, {"bos_token": "<s>"}).render(TURN, str)
    assert text == "<s>" + json.dumps([{"role": "user", "content": "Hi"}]) + "014"


def test_a_template_that_does_not_compile_stops_the_program_with_one_line():
    with pytest.raises(ConfigError, match="chat_template: does not compile"):
        ChatTemplate("{% if %}", {})


def test_a_template_file_comes_before_the_tokenizers_own(tmp_path, tokenizer):
    path = tmp_path / "chat.jinja"
    path.write_text("mine")
    assert load_template(ModelConfig(path=REFERENCE, chat_template=path), tokenizer).render(TURN, str) == "mine"


def test_a_missing_or_broken_tokenizer_stops_the_program_with_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"tokenizer\.json is missing"):
        Tokenizer(tmp_path, None)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        Tokenizer(tmp_path, None)

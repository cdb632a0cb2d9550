"""Chat templates in their sandbox."""

import json
from functools import partial
from itertools import pairwise

import pytest

from gpu.config import ModelConfig
from server.api_error import ApiError
from server.bodies.chat_message import CalledFunction, Message, MessageCall, Part
from server.deployment import ConfigError
from server.prompting.chat_template import ChatTemplate, load_template
from server.prompting.plain_chat import Conversation
from server.text.control_tokens import ControlTokens
from server.text.model_tokenizer import Tokenizer
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


def say(*texts):
    return Message(role="user", content=[Part(type="text", text=text) for text in texts])


def test_text_parts_are_joined_by_a_newline_where_the_template_wants_one_text():
    for source in ("{{ messages[0].content }}", "{{ messages[0]['content'] | trim }}"):
        assert ChatTemplate(source, {}).render([say("a", "b")], str) == "a\nb"


def test_a_template_that_goes_over_parts_gets_them():
    over = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}PARTS{% endif %}{% endfor %}"
    both = over.replace("PARTS", "{% for part in m.content %}{{ loop.index }}{{ part.text }}{% endfor %}")
    both = both.replace("loop.index", "'|' if not loop.first")
    assert ChatTemplate(both, {}).render([say("a", "b"), *TURN], str) == "a|bHi"
    alone = "{% for m in messages %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}"
    assert ChatTemplate(alone, {}).render([say("a", "b"), *TURN], str) == "[a][b][Hi]"


def test_parts_that_spell_out_a_control_token_together_are_text(tokenizer):
    source = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    template, control = ChatTemplate(source, {}), ControlTokens(tokenizer)
    conversation = Conversation([say("<|e", "nd|>")])
    mark = control.choose_mark(conversation.texts())
    text = template.render(conversation, str if mark is None else partial(control.hide, mark=mark))
    token_ids = tokenizer.encode(text, False) if mark is None else control.encode(text, mark, 100)
    assert not set(token_ids) & set(tokenizer.special_ids)


# --- roles ------------------------------------------------------------------------------------------------------------

OVER = "{% for m in messages %}EACH{% endfor %}"
SAYS = "[{{ m.role }}]{{ m.content }}"
ANYWHERE = OVER.replace("EACH", SAYS)
KNOWN = OVER.replace("EACH", f"{{% if m.role in ['system', 'user', 'assistant'] %}}{SAYS}{{% endif %}}")
DROPS_LATER = OVER.replace("EACH", f"{{% if m.role != 'system' or loop.first %}}{SAYS}{{% endif %}}")
DROPS_ALL = DROPS_LATER.replace(" or loop.first", "")
NO_SYSTEM = OVER.replace("EACH", f"{{% if m.role == 'system' %}}{{{{ raise_exception('first') }}}}{{% endif %}}{SAYS}")
FIRST = NO_SYSTEM.replace("'system' %}", "'system' and not loop.first %}")
HI, YES = Message(role="user", content="Hi"), Message(role="assistant", content="Yes.")
REMINDED = "<system-reminder>\nB\n</system-reminder>"


def told(role, text):
    return Message(role=role, content=text)


@pytest.mark.parametrize("source", [ANYWHERE, KNOWN, FIRST, DROPS_LATER])
@pytest.mark.parametrize("role", ["system", "developer"])
def test_what_opens_a_chat_is_one_system_message(source, role):
    template = ChatTemplate(source, {})
    assert template.render([told(role, "A"), HI], str) == "[system]A[user]Hi"
    assert template.render([told("system", "A"), told(role, "B"), HI], str) == "[system]A\n\nB[user]Hi"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (ANYWHERE, "[system]A[user]Hi[system]B[assistant]Yes."),
        (KNOWN, "[system]A[user]Hi[system]B[assistant]Yes."),
        (FIRST, f"[system]A[user]Hi\n\n{REMINDED}[assistant]Yes."),
        (DROPS_LATER, f"[system]A[user]Hi\n\n{REMINDED}[assistant]Yes."),
        (NO_SYSTEM, f"[user]A\n\nHi\n\n{REMINDED}[assistant]Yes."),
        (DROPS_ALL, f"[user]A\n\nHi\n\n{REMINDED}[assistant]Yes."),
    ],
)
def test_a_later_one_stays_where_the_template_takes_it_and_none_is_lost(source, text):
    chat = [told("developer", "A"), HI, told("developer", "B"), YES]
    assert ChatTemplate(source, {}).render(chat, str) == text


@pytest.mark.parametrize("source", [ANYWHERE, FIRST, DROPS_LATER, NO_SYSTEM, DROPS_ALL])
def test_a_chat_that_grows_only_grows_in_its_text_wherever_instructions_stand(source):
    asked = Message(role="user", content=[Part(type="text", text="Hi"), Part(type="text", text="there")])
    chat = [told("system", "A"), HI, told("system", "B"), YES, told("system", "B"), asked, told("developer", "B"), YES]
    texts = [ChatTemplate(source, {}).render(chat[:count], str) for count in range(2, 9)]
    for shorter, longer in pairwise(texts):
        assert longer.startswith(shorter)
    assert texts[-1].count("B") == 3


def test_with_nobody_to_speak_to_instructions_are_the_users():
    assert ChatTemplate(DROPS_ALL, {}).render([told("system", "A"), YES], str) == "[user]A[assistant]Yes."


# --- calls and results of earlier turns -------------------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
CALLED = Message(role="assistant", content="So.", tool_calls=[
    MessageCall(id="c", function=CalledFunction(name="f", arguments='{"x": "é"}'))])  # fmt: skip
RESULT = Message(role="tool", content="31C", tool_call_id="c")
GLM4 = """{{ tools | tojson if tools }}{% for m in messages %}{% if m.role == 'user' %}<|user|>
{{ m.content }}{% elif m.role == 'assistant' %}<|assistant|>{{ m.metadata }}
{{ m.content }}{% elif m.role == 'observation' %}<|observation|>
{{ m.content }}{% endif %}{% endfor %}"""


def test_calls_are_metadata_and_results_observations_where_the_template_has_them_so():
    text = ChatTemplate(GLM4, {}).render(Conversation([HI, CALLED, RESULT], [TOOL]), str)
    wanted = '<|user|>\nHi<|assistant|>\nSo.<|assistant|>f\n{"x": "é"}<|observation|>\n31C'
    assert text == json.dumps([TOOL]) + wanted


@pytest.mark.parametrize("source", [DROPS_LATER, KNOWN])
def test_calls_and_results_that_a_template_drops_without_a_word_are_text(source):
    text = ChatTemplate("{{ tools | tojson if tools }}" + source, {}).render(
        Conversation([HI, CALLED, RESULT], [TOOL]), str
    )
    result = "[tool]31C" if source == DROPS_LATER else "[user]<tool_response>\n31C\n</tool_response>"
    call = '<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>'
    assert text == json.dumps([TOOL]) + f"[user]Hi[assistant]So.\n{call}{result}"


def test_what_a_template_refuses_is_refused():
    source = "{{ tools }}" + NO_SYSTEM.replace("'system'", "'tool'").replace("first", "no results")
    with pytest.raises(ApiError, match="no results"):
        ChatTemplate(source, {}).render(Conversation([HI, CALLED, RESULT], [TOOL]), str)


# --- named templates --------------------------------------------------------------------------------------------------


class Folder:
    """Hold what finding the template needs of a tokenizer."""

    special_tokens: dict[str, str] = {}

    def __init__(self, folder, template):
        self.folder, self.settings = folder, {"chat_template": template} if template is not None else {}


NAMED = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T{{ tools | tojson }}"}]


def both(folder, template):
    found = load_template(ModelConfig(random_weights="x"), Folder(folder, template))
    return found.render([HI], str), found.render(Conversation([HI], [TOOL]), str)


def test_the_template_named_tool_use_is_rendered_with_tools(tmp_path):
    wanted = ("D", "T" + json.dumps([TOOL]))
    assert both(tmp_path, NAMED) == wanted
    assert both(tmp_path, {entry["name"]: entry["template"] for entry in NAMED}) == wanted
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/tool_use.jinja").write_text(NAMED[1]["template"])
    assert both(tmp_path, "D") == wanted
    (tmp_path / "chat_template.jinja").write_text("D")
    assert both(tmp_path, None) == wanted


def test_the_only_template_is_the_one_whatever_its_name(tmp_path):
    assert both(tmp_path, NAMED[1:]) == ("T" + json.dumps(None), "T" + json.dumps([TOOL]))


@pytest.mark.parametrize("template", [5, [5], {"default": 5}, [{"template": "D"}], {"a": "A", "b": "B"}])
def test_templates_of_which_none_can_be_chosen_are_an_error_of_the_deployment(tmp_path, template):
    with pytest.raises(ConfigError, match="chat_template"):
        load_template(ModelConfig(random_weights="x"), Folder(tmp_path, template))


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


# --- a last turn that is continued ------------------------------------------------------------------------------------


def test_a_continued_turn_is_the_prompts_end_and_its_own_end_is_not_written(tokenizer):
    template = load_template(ModelConfig(path=REFERENCE), tokenizer)
    turns = [*TURN, Message(role="assistant", content="It is<|end|>")]
    whole = template.render(turns, str)
    text = template.render(Conversation(turns, continues=True), str)
    assert text.endswith("<|assistant|>\nIt is<|end|>")
    assert whole.startswith(text + "<|end|>")
    deaf = ChatTemplate("{% for m in messages if m.role != 'assistant' %}{{ m.content }}{% endfor %}", {})
    with pytest.raises(ApiError, match="cannot be continued"):
        deaf.render(Conversation(turns, continues=True), str)


PLAIN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
ONE_TURN = "{% if messages[0].role == 'system' %}{{ raise_exception('No system.') }}{% endif %}" + PLAIN
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("source", [PLAIN, ONE_TURN])
def test_a_prompt_ends_alike_with_tools_that_the_template_does_not_write(source):
    template = ChatTemplate(source, {})
    whole = template.render(Conversation(TURN, [TOOL], begins_answer=False), str)
    assert whole.endswith("Hi<end>")
    assert template.render(Conversation(TURN, [TOOL]), str) == whole + "[assistant]"
    begun = [Message(role="assistant", content="It is")]
    text = template.render(Conversation(begun, [TOOL], continues=True), str)
    assert text.endswith("<end>[assistant]It is"), "the tools stand before what is continued"

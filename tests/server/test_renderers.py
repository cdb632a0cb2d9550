"""Chat templates that never end or take all memory: refused in one line, and nobody else waits for them."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from server.api_error import ApiError
from server.bodies.chat_message import Message
from server.deployment import ConfigError
from server.prompting import template_renderers
from server.prompting.chat_template import ChatTemplate
from server.prompting.template_renderers import Renderers, TemplateOverrun
from tests.server.live_server import fake_command, make_deployment, running_server

RECURSES, RUNS, GROWS = "recursed without end", "ran for more than ", "took more than 64 MiB of memory"
HOSTILE = {
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": RECURSES,
    "{% macro f() %}{{ g() }}{% endmacro %}{% macro g() %}{{ f() }}{% endmacro %}{{ f() }}": RECURSES,
    "{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}": RECURSES,
    "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}": RUNS,
    "{{ 'a' * 10 ** 10 }}": GROWS,
    "{{ [messages | length] * 10 ** 9 }}": GROWS,
    "{% set n = messages | length %}{{ 'a' * n * 10 ** 9 }}": GROWS,
    "{% set n = (6 + messages | length) ** 99999999 %}": "",
    "{{ '%1000000000d' % 1 }}": GROWS,
    "{{ '{:1000000000}'.format(1) }}": GROWS,
    "{{ 'a' | center(10 ** 9) }}": GROWS,
    "{{ ('a\n' * 9999) | indent(10 ** 6) }}": GROWS,
    "{{ range(99999) | join('a' * 9999) }}": GROWS,
    "{{ ('a' * 99999) | replace('a', 'a' * 9999) }}": GROWS,
    "{% set s = namespace(x='ab') %}{% for _ in range(99999) %}{% set s.x = s.x + s.x %}{% endfor %}": GROWS,
    "{% set s = namespace(x=[1]) %}{% for _ in range(99999) %}{% set s.x = s.x + s.x %}{% endfor %}": GROWS,
    "{% for _ in range(99999) %}{{ 'a' * 99999 }}{% endfor %}": GROWS,
}  # fmt: skip
WHEN_ASKED = "{{% if messages[0].content == 'bomb' %}}{}{{% endif %}}{{{{ messages[0].content }}}}"


@pytest.fixture(autouse=True)
def short_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_renderers, "SECONDS", 0.3)


def say(text: str) -> list[Message]:
    return [Message(role="user", content=text)]


@pytest.mark.parametrize(("source", "what"), HOSTILE.items())
def test_a_template_that_cannot_be_rendered_is_refused_in_one_line_at_the_start(source: str, what: str) -> None:
    begin = time.monotonic()
    with pytest.raises(ConfigError, match=f"^chat_template: .*{what}") as told:
        ChatTemplate(source, {})
    assert "\n" not in str(told.value)
    assert len(str(told.value)) < 200
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize(("source", "what"), [one for one in HOSTILE.items() if "((((" not in one[0]])
def test_a_chat_that_sets_a_template_off_is_refused_and_the_next_one_is_rendered(source: str, what: str) -> None:
    source = source.replace("'a' * 10", "messages[0].role * 10")  # else it is multiplied when the template is compiled
    macros, end, rest = source.rpartition("{% endmacro %}")
    template = ChatTemplate(macros + end + WHEN_ASKED.format(rest), {})
    with pytest.raises(ApiError, match=f"chat template was stopped: on them it .*{what}") as told:
        template.render(say("bomb"), str)
    assert told.value.status == 400
    assert template.render(say("hello"), str) == "hello"


def test_a_child_that_was_killed_is_replaced() -> None:
    pool = Renderers()
    assert pool.render("{{ a }}", {"a": "x"}) == "x"
    os.kill(pool._idle[0]._process.pid, signal.SIGKILL)
    pool._idle[0]._process.wait()
    assert pool.render("{{ a }}", {"a": "y\ud800"}) == "y\ud800"
    pool.close()


def test_a_child_that_stands_still_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Renderers()
    pool.render("x", {})  # in a process that starts, which takes long on a busy machine
    monkeypatch.setattr(template_renderers, "_MOST_WAITED", 1)
    process = pool._idle[0]._process
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(TemplateOverrun, match="ran for more than"):
        pool.render("x", {})
    assert process.returncode == -signal.SIGKILL
    assert pool._idle == []


@pytest.mark.parametrize(("source", "answers"), [("{{ a }}", "x"), ("{{ 'a' * 10 ** 10 }}", GROWS)])
def test_a_server_whose_own_memory_is_limited_renders_within_that(source: str, answers: str) -> None:
    script = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))\n"
        "from server.prompting.template_renderers import RENDERERS, TemplateOverrun\n"
        "try: print([RENDERERS.render(sys.argv[1], {'a': 'x'}) for _ in range(2)][1])\n"
        "except TemplateOverrun as error: print(error)"
    )
    command, root = [sys.executable, "-c", script, source], Path(__file__).parents[2]
    told = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert told.stdout == answers + "\n"


def test_a_long_chat_has_memory_as_it_needs() -> None:
    text = "wörter " * 2_000_000
    assert Renderers().render("{{ messages[0] | trim }}{{ messages | tojson }}", {"messages": [text]}).startswith("wör")


def test_a_child_ends_with_the_process_that_started_it() -> None:
    script = (
        "import os; from server.prompting.template_renderers import RENDERERS as r; r.render('x', {});"
        "print(r._idle[0]._process.pid, flush=True); os._exit(1)"
    )
    root = Path(__file__).parents[2]
    child = int(subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, check=False).stdout)
    ends = time.monotonic() + 10
    while Path(f"/proc/{child}/cmdline").exists() and Path(f"/proc/{child}/cmdline").read_bytes():
        assert time.monotonic() < ends
        time.sleep(0.01)


async def test_chats_that_set_a_template_off_delay_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_renderers, "SECONDS", 1.0)
    loops = next(source for source, what in HOSTILE.items() if what == RUNS)
    (tmp_path / "template.jinja").write_text(WHEN_ASKED.format(loops))
    deployment = make_deployment()
    model = deployment.model.model_copy(update={"chat_template": tmp_path / "template.jinja"})
    async with running_server(deployment.model_copy(update={"model": model}), fake_command()) as running:

        async def chat(text: str) -> int:
            body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
            return (await running.http.post("/v1/chat/completions", json=body)).status_code

        bombs = [asyncio.create_task(chat("bomb")) for _ in range(2)]
        await asyncio.sleep(0.1)
        assert [await chat("hello") for _ in range(2)] == [200, 200]
        assert not any(bomb.done() for bomb in bombs)
        assert [await bomb for bomb in bombs] == [400] * 2

"""What the README and the demo tell a newcomer to ask: it is answered, and it ends."""

import asyncio
import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy import demo
from server.commands.tandem import app
from server.deployment import Deployment, load_deployment
from tests.server.live_server import Running, fake_command, make_deployment, running_server, with_documents

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
ENOUGH_TOKENS = 256


def curl_bodies(text: str) -> list[str]:
    return re.findall(r"-d '(\{.*?\})'", text, re.DOTALL)


def named_as_the_laptops() -> Deployment:
    deployment = make_deployment()
    name = load_deployment(ROOT / "deploy" / "laptop.yaml").model.name
    return deployment.model_copy(update={"model": deployment.model.model_copy(update={"name": name})})


async def answered(live: Running, body: str) -> None:
    tree = json.loads(body)
    assert tree["max_tokens"] <= ENOUGH_TOKENS
    answer = await live.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text
    assert answer.text.endswith("data: [DONE]\n\n")


async def test_the_readmes_requests_are_answered_and_end(tmp_path: Path) -> None:
    bodies = curl_bodies(README)
    assert len([body for body in bodies if "documents" in body]) == 1
    async with running_server(with_documents(named_as_the_laptops(), tmp_path), fake_command()) as live:
        for body in bodies:
            await answered(live, body)


async def test_the_readmes_program_runs_and_ends() -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert "http://127.0.0.1:8000/v1" in program
    assert "max_tokens=32" in program
    async with running_server(named_as_the_laptops(), fake_command()) as live:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program.replace("http://127.0.0.1:8000", live.url), cwd=ROOT,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, errors.decode()
    assert out.decode().lstrip().startswith("# Tandem in plain words"), "the fake engine says what it was told"


def test_the_readme_shows_what_plan_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    command, shown = re.search(r"`tandem (plan deploy/[^`]+)`[^`]*-->\n```text\n(.*?)```", README, re.DOTALL).groups()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(ROOT)
    printed = CliRunner().invoke(app, command.split()).output
    assert shown in printed


def test_the_readme_asks_what_the_demo_asks_of_the_same_page() -> None:
    first = demo.QUESTIONS[0]
    assert README.count(first.text) == 2
    assert str(demo.PAGE.relative_to(ROOT)) in README
    for question in demo.QUESTIONS:
        assert question.answer in " ".join(demo.PAGE.read_text().split())
        assert question.answer not in question.text


@pytest.mark.parametrize("name", ["laptop", "reference"])
def test_the_small_deployments_end_answers_without_a_limit(name: str) -> None:
    limit = load_deployment(ROOT / "deploy" / f"{name}.yaml").server.default_max_tokens
    assert limit is not None
    assert limit <= ENOUGH_TOKENS


def test_no_command_of_the_readme_comes_after_one_that_does_not_end() -> None:
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL):
        lines = [line for line in block.splitlines() if line.strip()]
        assert not any(re.match(r"tandem serve", line) for line in lines[:-1]), "what follows is never reached"

"""What the README and the demo tell a newcomer to ask: it is answered, and it ends."""

import asyncio
import json
import random
import re
import sys
from pathlib import Path

from rich.console import Console

from deploy import demo
from server.config import load_deployment
from tests.server.live_server import Running, fake_command, make_deployment, running_server, with_documents

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
ENOUGH_TOKENS = 256


def curl_bodies(text: str) -> list[str]:
    return re.findall(r"-d '(\{.*?\})'", text, re.DOTALL)


async def answered(live: Running, body: str) -> None:
    tree = json.loads(body)
    assert tree["max_tokens"] <= ENOUGH_TOKENS
    answer = await live.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text
    assert answer.text.endswith("data: [DONE]\n\n")


async def test_the_readmes_requests_are_answered_and_end(tmp_path: Path) -> None:
    bodies = curl_bodies(README)
    assert [json.loads(body)["model"] for body in bodies if "documents" in body] == ["reference"]
    async with running_server(with_documents(make_deployment(), tmp_path), fake_command()) as live:
        for body in bodies:
            await answered(live, body)


async def test_the_demos_request_is_answered_and_ends(live: Running) -> None:
    console = Console(width=1000)
    with console.capture() as printed:
        demo.explain(live.url, "reference", console)
    (body,) = curl_bodies(printed.get())
    await answered(live, body)
    assert f"--file {demo.DOCUMENT.relative_to(ROOT)}" in printed.get()


async def test_the_readmes_program_runs_and_ends(live: Running, tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert "http://127.0.0.1:8000/v1" in program
    assert "max_tokens=16" in program
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "document.txt").write_text("one two three four")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program.replace("http://127.0.0.1:8000", live.url), cwd=tmp_path,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, errors = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, out.decode().strip()[:7]) == (0, "one two"), errors.decode()


def test_the_readme_asks_for_a_needle_of_the_demos_document() -> None:
    keys = [key for key, _ in demo.draw_needles(random.Random(demo.SEED))]
    asked = set(re.findall(r"magic number for ([a-z]+-[a-z]+)\?", README)) - {"amber-lantern"}
    assert asked
    assert asked <= set(keys)
    assert str(demo.DOCUMENT.relative_to(ROOT)) in README


def test_the_small_deployment_ends_answers_without_a_limit() -> None:
    limit = load_deployment(ROOT / "deploy" / "laptop.yaml").server.default_max_tokens
    assert limit is not None
    assert limit <= ENOUGH_TOKENS


def test_no_command_of_the_readme_comes_after_one_that_does_not_end() -> None:
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL):
        lines = [line for line in block.splitlines() if line.strip()]
        assert not any(re.match(r"tandem serve", line) for line in lines[:-1]), "what follows is never reached"

"""Runs each client's program, with its own interpreter, against servers that this one starts.

`python -m tests.clients ENVIRONMENTS [--record FOLDER] [NAME ...]`, where each program has an environment of its own
name; those that drive a program from npm share `agents`. A program gets the addresses of the reference model and of the
scripted one, and the file into which it writes what the scripted one is to say. `--record` writes what each one sent.
Ends with 1 if one of them fails, and else with 3 if the agents were left out because npm is not there.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from tests.clients.recorder import Recorder, write_bodies
from tests.server.fake_engine import PAGE
from tests.server.live_server import LAPTOP, REFERENCE, ROOT, fake_command
from tests.server.program import Program
from tests.server.scripted_model import HERMES, make_model
from tests.server.test_agent_turns import excess

PROGRAMS = {  # and the packages that they use
    "aider_edits": "aider-chat",
    "instructor_answers": "instructor",
    "langchain_openai_agent": "langchain-openai",
    "litellm_calls": "litellm",
    "pydantic_ai_agent": "pydantic-ai-slim",
}
AGENT_PROGRAMS = {
    "claude_code": "@anthropic-ai/claude-code",
    "cline": "cline",
    "codex": "@openai/codex",
    "continue_cli": "@continuedev/cli",
    "ollama_js": "ollama",
    "opencode": "opencode-ai",
}
TEN_TURNS = ("cline", "continue_cli")  # whose turns compute what is new and a block at most
AGENT_CONTEXT = 200_000  # the agents' own instructions and tools take 30,000 tokens of the reference tokenizer's
CLOSED_PROXY = "http://127.0.0.1:9"  # where requests for any other host end
_SERVE = (
    "import sys, yaml; from pathlib import Path; from server.http import app\n"
    "from server.deployment import Deployment\n"
    "from server.planning.deployment_plan import resolve_plan; from transfer.machine import load_machine\n"
    "tree, command = yaml.safe_load(sys.argv[1]), yaml.safe_load(sys.argv[2])\n"
    "own = {'engine_command': command} if command else {}\n"
    "resolved = resolve_plan(Deployment.model_validate(tree), load_machine(Path(sys.argv[3])))\n"
    "sys.exit(app.serve(resolved.deployment, resolved.memory, **own))"
)


class Served(Program):
    """A server in a process: the reference model's engine, or another command."""

    def __init__(self, tree: dict[str, object], command: list[str]) -> None:
        log, self._log = tempfile.mkstemp(suffix=".log")
        arguments = [yaml.safe_dump(tree), yaml.safe_dump(command), str(LAPTOP)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, *arguments], cwd=ROOT, stderr=log, env=environment
        )
        os.close(log)

    def turns(self) -> list[tuple[int, int, int]]:
        """Return the tokens of each prompt so far, those that were cached, and those of its answer."""
        found = re.findall(
            r" generated .*?prompt_tokens=(\d+) cached_tokens=(\d+).*? generated_tokens=(\d+)", self._errors()
        )
        return [(int(prompt), int(cached), int(written)) for prompt, cached, written in found]


def version_of(name: str) -> str:
    here = Path(__file__).parent
    if name in AGENT_PROGRAMS:
        return str(json.loads((here / "agents.json").read_text())["dependencies"][AGENT_PROGRAMS[name]])
    found = re.search(rf"^{PROGRAMS[name]}==(\S+)", (here / f"{name}.txt").read_text(), re.MULTILINE)
    assert found is not None, f"{name}.txt: no version of {PROGRAMS[name]}"
    return found[1]


def main(environments: Path, names: list[str], record: Path | None) -> int:
    folder = Path(tempfile.mkdtemp(prefix="tandem-clients-"))
    make_model(folder / "model", HERMES)
    model = {"path": str(REFERENCE), "name": "scripted", "tokenizer": str(folder / "model")}
    script = folder / "script"
    script.write_text("")
    scripted = Served(
        {"model": model, "server": {"port": 0}}, fake_command(script=str(script), context=AGENT_CONTEXT, prefixes=1)
    )
    real = Served({"model": {"path": str(REFERENCE), "name": "reference"}, "server": {"port": 0}}, [])
    agents = environments / "agents" / "node_modules"
    asked = names or [*PROGRAMS, *AGENT_PROGRAMS]
    left_out = [name for name in asked if name in AGENT_PROGRAMS and not agents.is_dir()]
    asked = [name for name in asked if name not in left_out]
    failed = []
    try:
        urls = [scripted.ready(), wait_until_ready(real)]
        recorders = [] if record is None else [Recorder(url) for url in urls]
        scripted_url, reference_url = [recorder.url for recorder in recorders] or urls
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "SCRIPTED_URL": f"{scripted_url}/v1",
            "REFERENCE_URL": f"{reference_url}/v1",
            "SCRIPT": str(script),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "AGENTS": str(agents.absolute()),
            "HTTP_PROXY": CLOSED_PROXY,
            "HTTPS_PROXY": CLOSED_PROXY,
            "NO_PROXY": "127.0.0.1",
        }
        for name in asked:
            begun, num_before = time.monotonic(), len(scripted.turns())
            python = sys.executable if name in AGENT_PROGRAMS else str(environments / name / "bin" / "python")
            program = [python, str(Path(__file__).parent / f"{name}.py")]
            done = subprocess.run(program, env=environment, timeout=300)
            is_right = done.returncode == 0
            if name in TEN_TURNS:
                turns = scripted.turns()[num_before:]
                is_right = is_right and len(turns) == 10 and max(excess(turns)) <= PAGE
                print(f"{name}: tokens of prompts, cached, written: {turns}; computed beyond new: {excess(turns)}")
            print(f"{name}: {'ok' if is_right else 'FAILED'} in {time.monotonic() - begun:.1f} s", flush=True)
            if not is_right:
                failed.append(name)
            elif record is not None:
                requests = [request for recorder in recorders for request in recorder.take()]
                requests = [one for one in requests if one["path"] != "/tokenize"]  # of `script.say`
                write_bodies(record / f"{name}.json", version_of(name), requests)
    finally:
        for server in (scripted, real):
            server.process.terminate()
            server.end()
    if left_out:
        print(f"{', '.join(left_out)}: LEFT OUT: they are installed by npm, which is not there", flush=True)
    return 1 if failed else 3 if left_out else 0


def wait_until_ready(server: Served) -> str:
    """The reference model takes longer than a fake one to load."""
    for _ in range(10):
        try:
            return server.ready()
        except AssertionError:
            if server.process.poll() is not None:
                raise
    raise RuntimeError("the reference model was not ready in 100 seconds")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("environments", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--record", type=Path, metavar="FOLDER")
    given = parser.parse_args()
    sys.exit(main(given.environments, given.names, given.record))

"""Runs each client's program, with its own interpreter, against servers that this one starts.

`python -m tests.clients ENVIRONMENTS [NAME ...]`, where each program has an environment of its own name; those that
drive an agent from npm share `agents`. A program gets the addresses of the reference model and of the scripted one, and the
file into which it writes what the scripted one is to say. Ends with 1 if one of them fails, and else with 3 if the
agents were left out because npm is not there.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from server.tokenizer import Tokenizer
from tests.server.live_server import LAPTOP, REFERENCE, ROOT, fake_command
from tests.server.program import Program
from tests.server.scripted_model import HERMES, make_model

PROGRAMS = ("instructor_answers", "langchain_openai_agent", "litellm_calls", "pydantic_ai_agent")
AGENT_PROGRAMS = ("claude_code", "codex")
AGENT_CONTEXT = 200_000  # the agents' own instructions and tools take 30,000 tokens of the reference tokenizer's
CLOSED_PROXY = "http://127.0.0.1:9"  # where requests for any other host end
_SERVE = (
    "import sys, yaml; from pathlib import Path; from server import app; from server.config import Deployment\n"
    "from server.plan import resolve_plan; from transfer.machine import load_machine\n"
    "tree, command = yaml.safe_load(sys.argv[1]), yaml.safe_load(sys.argv[2])\n"
    "if command: app.create_app.__defaults__ = (command, *app.create_app.__defaults__[1:])\n"
    "resolved = resolve_plan(Deployment.model_validate(tree), load_machine(Path(sys.argv[3])))\n"
    "sys.exit(app.serve(resolved.deployment, resolved.memory))"
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


def write_vocabulary(folder: Path) -> None:
    """What a program needs to say texts in tokens, without the tokenizer: characters, each by its own token."""
    tokenizer = Tokenizer(folder / "model", REFERENCE)
    spelled = {chr(code): tokenizer.encode_plain(chr(code)) for code in [9, 10, *range(32, 127)]}
    (folder / "characters.json").write_text(json.dumps(spelled))


def main(environments: Path, names: list[str]) -> int:
    folder = Path(tempfile.mkdtemp(prefix="tandem-clients-"))
    make_model(folder / "model", HERMES)
    write_vocabulary(folder)
    model = {"path": str(REFERENCE), "name": "scripted", "tokenizer": str(folder / "model")}
    script = folder / "script"
    script.write_text("")
    scripted = Served({"model": model, "server": {"port": 0}}, fake_command(script=str(script), context=AGENT_CONTEXT))
    real = Served({"model": {"path": str(REFERENCE), "name": "reference"}, "server": {"port": 0}}, [])
    agents = environments / "agents" / "node_modules"
    asked = names or [*PROGRAMS, *AGENT_PROGRAMS]
    left_out = [name for name in asked if name in AGENT_PROGRAMS and not agents.is_dir()]
    asked = [name for name in asked if name not in left_out]
    failed = []
    try:
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "SCRIPTED_URL": f"{scripted.ready()}/v1",
            "REFERENCE_URL": f"{wait_until_ready(real)}/v1",
            "SCRIPT": str(script),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "AGENTS": str(agents.absolute()),
            "HTTP_PROXY": CLOSED_PROXY,
            "HTTPS_PROXY": CLOSED_PROXY,
            "NO_PROXY": "127.0.0.1",
        }
        for name in asked:
            begun = time.monotonic()
            python = sys.executable if name in AGENT_PROGRAMS else str(environments / name / "bin" / "python")
            program = [python, str(Path(__file__).parent / f"{name}.py")]
            done = subprocess.run(program, env=environment, timeout=300)
            print(
                f"{name}: {'ok' if done.returncode == 0 else 'FAILED'} in {time.monotonic() - begun:.1f} s", flush=True
            )
            if done.returncode:
                failed.append(name)
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
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))

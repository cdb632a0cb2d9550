"""`serve` in a process of its own, on the fake engine."""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import yaml

from tests.server.live_server import FAKE_ENGINE, LAPTOP, REFERENCE, ROOT, fake_command


class Program:
    """Run the program: `url` once it listens, `ready` once its engine serves, `end` when it was told to."""

    def __init__(self, engine: dict[str, float], documents: dict[str, object] | None = None,
                 model: dict[str, object] | None = None, **server: object) -> None:  # fmt: skip
        tree = {
            "model": {"path": str(REFERENCE), **(model or {})},
            "server": {"port": 0, **server},
            "documents": documents,
        }
        script = (
            "import sys, yaml; from pathlib import Path; from server.http import app\n"
            "from server.deployment import Deployment\n"
            "from server.planning.deployment_plan import resolve_plan; from transfer.machine import load_machine\n"
            "tree = yaml.safe_load(sys.argv[1])\n"
            "command = yaml.safe_load(sys.argv[2])\n"
            "deployment = Deployment.model_validate(tree)\n"
            "memory = resolve_plan(deployment, load_machine(Path(sys.argv[3]))).memory\n"
            "sys.exit(app.serve(deployment, memory, engine_command=command))"
        )
        assert FAKE_ENGINE.is_file()
        arguments = [yaml.safe_dump(tree), yaml.safe_dump(fake_command(**engine)), str(LAPTOP)]
        log, self._log = tempfile.mkstemp(suffix=".log")  # not a pipe, which would fill up
        self.process = subprocess.Popen([sys.executable, "-c", script, *arguments], cwd=ROOT, stderr=log)
        os.close(log)

    def url(self) -> str:
        while True:
            has_ended = self.process.poll() is not None
            found = re.search(r"listening url=(\S+)", self._errors())
            if found:
                return found[1]
            assert not has_ended, "it ended before it listened"
            time.sleep(0.02)

    def ready(self) -> str:
        url = self.url()
        ends = time.monotonic() + 10
        while httpx.get(f"{url}/health").status_code != 200:
            assert time.monotonic() < ends
            time.sleep(0.02)
        return url

    def end(self) -> tuple[int, str]:
        self.process.wait(timeout=20)
        errors = self._errors()
        os.unlink(self._log)
        return self.process.returncode, errors

    def _errors(self) -> str:
        return Path(self._log).read_text()

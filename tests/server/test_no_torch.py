"""The API process has no torch, not even by way of something else."""

import subprocess
import sys

from tests.server.live_server import LAPTOP, REFERENCE, ROOT


def test_importing_the_server_and_loading_its_tokenizer_does_not_import_torch():
    script = f"""
import sys
from pathlib import Path
from server.http.app import create_app
from server.deployment import Deployment
from server.bodies.chat_message import Message
from server.planning.deployment_plan import resolve_plan
from transfer.machine import load_machine
machine = load_machine(Path({str(LAPTOP)!r}))
plan = resolve_plan(Deployment.model_validate({{"model": {{"path": {str(REFERENCE)!r}}}}}), machine)
app = create_app(plan.deployment, plan.memory)
service = app.state.service
service.tokenizer.encode("text", True)
service.template.render([Message(role="user", content="Hi")], str)
heavy = {{"torch", "triton", "numba", "transformers"}} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr

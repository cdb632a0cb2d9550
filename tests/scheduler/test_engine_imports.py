"""What an engine and its server do not import, where they have no use for it: it would take their time at each start,
and their memory.
"""

import subprocess
import sys

import pytest

ENGINE = "scheduler.engine.engine_process"
SERVER = "server.commands.named_models, server.http.app"


@pytest.mark.parametrize(
    ("imported", "unused"),
    [(ENGINE, ["scipy.optimize", "cpu", "torch.distributed._symmetric_memory"]), (SERVER, ["huggingface_hub"])],
)
def test_what_few_use_is_not_imported_by_all(imported: str, unused: list[str]) -> None:
    code = f"import sys, {imported}; print([name for name in {unused} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "[]"

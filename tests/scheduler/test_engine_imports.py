"""What an engine and its server do not import, where they have no use for it: it would take their time at each start,
and their memory.
"""

import os
import subprocess
import sys

import pytest
import torch

ENGINE = """
import sys
from pathlib import Path
from scheduler.engine import engine_process
assert engine_process.main(*sys.argv[1:]) == 1 and 'scheduler.engine.engine_loop' in sys.modules
print([name for name in ['scipy.optimize', 'cpu', 'torch.distributed._symmetric_memory'] if name in sys.modules])
print([line for line in Path('/proc/self/maps').read_text().splitlines() if 'triton' in line])
"""
SERVER = """
import sys, server.commands.named_models, server.http.app
print([name for name in ['huggingface_hub'] if name in sys.modules])
"""


def told_by(code: str, *arguments: str) -> list[str]:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, input="", capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """What an engine that is given nothing has imported that few use, and has mapped of Triton."""
    sockets = tmp_path_factory.mktemp("engine") / "sockets"
    *_, imported, mapped = told_by(ENGINE, f"ipc://{sockets}/requests", f"ipc://{sockets}/replies", str(os.getpid()))
    return imported, mapped


def test_an_engine_does_not_import_what_few_use(engine: tuple[str, str]) -> None:
    assert engine[0] == "[]"


def test_a_server_does_not_import_what_few_use() -> None:
    assert told_by(SERVER)[-1] == "[]"


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="an engine with a GPU has kernels of Triton")
def test_an_engine_whose_torch_has_no_gpu_maps_nothing_of_triton(engine: tuple[str, str]) -> None:
    assert engine[1] == "[]"

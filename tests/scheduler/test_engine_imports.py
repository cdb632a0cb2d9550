"""What an engine and its server do not import, where they have no use for it: it would take their time at each start,
and their memory.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ENGINE = "scheduler.engine.engine_loop"
SERVER = "server.commands.named_models, server.http.app"


@pytest.mark.parametrize(
    ("imported", "unused"),
    [(ENGINE, ["scipy.optimize", "cpu", "torch.distributed._symmetric_memory"]), (SERVER, ["huggingface_hub"])],
)
def test_what_few_use_is_not_imported_by_all(imported: str, unused: list[str]) -> None:
    code = f"import sys, {imported}; print([name for name in {unused} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="an engine with a GPU has kernels of Triton")
def test_an_engine_whose_torch_has_no_gpu_maps_nothing_of_triton(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from scheduler.engine import engine_process\n"
        "assert engine_process.main(*sys.argv[1:]) == 1 and 'scheduler.engine.engine_loop' in sys.modules\n"
        "print([line for line in Path('/proc/self/maps').read_text().splitlines() if 'triton' in line])"
    )
    sockets = [f"ipc://{tmp_path}/sockets/{end}" for end in ("requests", "replies")]
    command = [sys.executable, "-c", code, *sockets, str(os.getpid())]
    done = subprocess.run(command, input="", capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "[]"

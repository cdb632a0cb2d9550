"""What an engine that has no use for them does not import: it would take their time at each start, and their memory."""

import subprocess
import sys

UNUSED = ("scipy.optimize", "cpu", "torch.distributed._symmetric_memory")


def test_an_engine_process_imports_nothing_that_few_engines_use() -> None:
    code = f"import sys, scheduler.engine.engine_process; print([name for name in {UNUSED} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "[]"

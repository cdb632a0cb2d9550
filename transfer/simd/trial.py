"""Try in a child process whether LLVM compiles some code. LLVM aborts the process if it lacks the vectors that the code
asks for, so the trial must not run in a process that is needed.
"""

import logging
import os
import subprocess
import sys
from functools import cache

log = logging.getLogger(__name__)

_SECONDS = 120.0
_CHILD = "import importlib, sys; getattr(importlib.import_module(sys.argv[1]), sys.argv[2])()"


@cache
def compiles(module: str, function: str, processor: str | None = None) -> bool:
    """Return whether a function without arguments, which compiles something, ends well in a child process. If not, the
    log names what is replaced. processor: LLVM's name of one to compile for without running; None: this one.
    """
    variables = {} if processor is None else {"NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": ""}
    command = [sys.executable, "-c", _CHILD, module, function]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    try:
        done = subprocess.run(
            command, env={**os.environ, **variables, "PYTHONPATH": path}, capture_output=True, text=True,
            timeout=_SECONDS,
        )  # fmt: skip
        reason = f"exit status {done.returncode}: {' '.join(done.stderr.split())[:200]}" if done.returncode else None
    except subprocess.TimeoutExpired:
        reason = f"not done after {_SECONDS:.0f} s"
    if reason is not None:
        log.warning("kernels event=replaced what=%s.%s reason=%r", module, function, reason)
    return reason is None

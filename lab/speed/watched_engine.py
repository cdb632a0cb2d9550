"""Run an engine process with a clock on its loop: `python -m lab.speed.watched_engine FILE REQUESTS REPLIES PARENT_ID`.

FILE gets the clock's records as JSON at shutdown. Kernels are traced while FILE.trace exists.
"""

import sys
from pathlib import Path
from typing import Any

import msgspec

from lab.speed.kernel_trace import KernelTrace
from lab.speed.step_clock import StepClock
from scheduler.engine.engine_loop import Loop, run_engine

TRACE_SUFFIX = ".trace"


def main(file: Path, arguments: list[str]) -> int:
    run = Loop.run

    def run_watched(loop: Loop) -> None:
        clock = StepClock(loop, KernelTrace(file.with_name(file.name + TRACE_SUFFIX)))
        try:
            run(loop)
        finally:
            clock.end_turn()
            file.write_bytes(msgspec.json.encode(clock.told()))

    vars_of_class: Any = Loop
    vars_of_class.run = run_watched
    return run_engine(*arguments)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))

"""Run an engine process: `python -m scheduler.engine.engine_process REQUESTS REPLIES PARENT_ID`.

Triton is left out before anything is imported that would import it.
"""

import os
import sys
import traceback
from contextlib import suppress

from transfer.no_triton import leave_out_triton


def main(requests: str, replies: str, parent_id: str) -> int:
    """Run the engine until it is shut down, and return the process's status. requests, replies: sockets' paths."""
    leave_out_triton()
    from scheduler.engine.engine_loop import run_engine

    return run_engine(requests, replies, parent_id)


if __name__ == "__main__":
    status = 1
    try:
        status = main(*sys.argv[1:])
    except BaseException:
        traceback.print_exc()
    with suppress(OSError):  # nobody may read them any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)  # libraries take more than a second to end, in which the next engine could have the memory

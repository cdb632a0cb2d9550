"""Run an engine process: `python -m scheduler.engine.engine_process REQUESTS REPLIES PARENT_ID`.

On a machine without a GPU, Triton is replaced before any module imports it.
"""

import os
import sys
import traceback
from contextlib import suppress

from transfer.no_triton import leave_out_triton


def main(requests: str, replies: str, parent_id: str) -> int:
    """Run the engine until it is shut down; return the exit status. requests, replies: addresses of sockets."""
    leave_out_triton()
    from scheduler.engine.engine_loop import run_engine

    return run_engine(requests, replies, parent_id)


if __name__ == "__main__":
    status = 1
    try:
        status = main(*sys.argv[1:])
    except BaseException:
        traceback.print_exc()
    with suppress(OSError):  # their readers may have ended
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)  # libraries would take more than a second to end, and the next engine needs the memory

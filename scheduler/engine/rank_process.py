"""Run one rank of a model that is split over devices: `python -m scheduler.engine.rank_process DESCRIPTOR PARENT_ID`.

Over the connection with that descriptor come `RankStart` and then every plan that rank 0 launches. Invariant: the
process never outlives process PARENT_ID, which started it.
"""

import gc
import logging
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

from gpu.model.spec import ModelError
from gpu.ranks import ProcessRanks, RankError, open_store
from gpu.runner import Runner
from scheduler.engine.engine import HANDOVER_SECONDS, MOST_IN_FLIGHT
from scheduler.engine.follower import Follower, PartedError
from scheduler.engine.load_device import load_device
from scheduler.engine.parent_watch import be_killed_with_parent, end_with_parent
from scheduler.engine.rank_processes import RankStart
from scheduler.engine_config import EngineStart
from transfer.host_tier import HostMemoryError

_ROOT_CAUSE_S = 2.0  # for rank 0 to notice the rank that ended first, and to end the others


def main(descriptor: str, parent_id: str) -> int:
    """Load this rank's part of the model and follow rank 0; return the exit status. descriptor: of the connection to
    rank 0.
    """
    be_killed_with_parent()
    end_with_parent(int(parent_id))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides when to end
    sys.setswitchinterval(HANDOVER_SECONDS)
    connection: Connection[Any, Any] = Connection(int(descriptor))
    try:
        told: RankStart = connection.recv()
        start = EngineStart.model_validate_json(told.start_json)
        _set_loggers(start)
        _follow(connection, start, _load(told, start))
    except EOFError:  # rank 0 has gone
        return 1
    except RankError as error:
        time.sleep(_ROOT_CAUSE_S)
        return _fail(connection, str(error))
    except (HostMemoryError, ModelError, PartedError) as error:
        return _fail(connection, str(error))
    except BaseException as error:  # an ordinary end of the interpreter may wait for graphs
        traceback.print_exc()
        return _fail(connection, f"{type(error).__name__}: {error}")
    return 0


def _fail(connection: "Connection[Any, Any]", reason: str) -> int:
    """Tell rank 0 why this rank ends, and return the status."""
    with suppress(OSError):  # it has gone
        connection.send(" ".join(reason.split()))
    return 1


def _load(told: RankStart, start: EngineStart) -> Runner:
    os.sched_setaffinity(0, told.cores)
    memory = start.memory
    ranks = ProcessRanks(
        told.rank, told.count, torch.device(memory.device), open_store(told.rank, told.count, told.port)
    )
    return load_device(start.config, memory, lambda stage, fraction: None, ranks).runner


def _follow(connection: "Connection[Any, Any]", start: EngineStart, runner: Runner) -> None:
    """Carry out what rank 0 launches until it sends None."""
    gc.collect()
    gc.freeze()  # as in rank 0's process
    follower = Follower(runner, MOST_IN_FLIGHT if start.memory.device == "cuda" else 1)
    while (message := connection.recv()) is not None:
        follower.take(message)
    follower.end()


def _set_loggers(start: EngineStart) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("gpu").setLevel(max(logging.WARNING, logging.getLevelName(start.log_level.upper())))


if __name__ == "__main__":
    status = main(*sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)  # graphs hold NCCL's kernels, and its group waits for them at an interpreter's end

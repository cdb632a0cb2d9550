"""Start numba's threads, one set per process, without changing the threads of torch.

numba sets OpenMP's number of threads in the thread that starts them, even by an import: torch, which asks OpenMP, would
then have as many, whatever OMP_NUM_THREADS says. A short-lived thread starts them here, so the number of every other
stays as it was.
"""

from threading import Thread

import numba


def start_threads() -> None:
    """Start numba's threads, if that is still to do. Call it before a parallel function is compiled or loaded."""
    thread = Thread(target=numba.get_num_threads, name="start-of-numba")
    thread.start()
    thread.join()

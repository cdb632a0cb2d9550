"""Start numba's threads, one set per process, without changing the threads of torch.

numba sets OpenMP's number of threads in the thread that starts numba's, even on import. torch asks OpenMP and would
then use as many, whatever OMP_NUM_THREADS says. Here a short-lived thread starts them, so the number of all other
threads does not change.
"""

from threading import Thread

import numba


def start_threads() -> None:
    """Start numba's threads, if they are not running yet. Call it before a parallel function is compiled or loaded."""
    thread = Thread(target=numba.get_num_threads, name="start-of-numba")
    thread.start()
    thread.join()

"""The start of numba's threads, of which it has one set a process, in a way that nobody else notices.

It refuses to know what runs on them. numba makes its number of threads OpenMP's of the thread that starts them, be that
by an import: torch, which asks OpenMP, would then have as many, whatever OMP_NUM_THREADS says. Invariant: a thread that
has ended by then starts them, so the number of every other stays as it was.
"""

from threading import Thread

import numba


def start_threads() -> None:
    """Start numba's threads, if that is still to do. To be called before a parallel function is compiled or loaded."""
    thread = Thread(target=numba.get_num_threads, name="start-of-numba")
    thread.start()
    thread.join()

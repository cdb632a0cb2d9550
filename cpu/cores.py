"""Who has which of the host's cores beside attention, by how many threads that has. It is said here alone.

All threads of an ask wait for the slowest, so a thread whose core is taken for a millisecond costs all of them that.
The core of one that builds is left to it while there is anything for it to do, and the launching thread's while the
other lane has work. Two that build take twice the cores for half the time, so attention loses as much by either; but
one needs 6 to 7 s for the tables of 98,304 tokens of an 8B shape, as long as a card takes for the next such prompt, and
two are done with it.
"""

from dataclasses import dataclass

_BUILDER_SHARE = 4  # one of so many threads builds tables while decode leaves the cores
_OWN_CORE_THREADS = 8  # where there are so many, one core is left to what is built, and one to launches
_SECOND_CORE_THREADS = 16  # ... and another to what is built


@dataclass(frozen=True, slots=True)
class Cores:
    """builders: threads that build; building: of these, how many have a core of their own while they have work;
    launching: cores left to the thread that launches beside the other lane.
    """

    builders: int
    building: int
    launching: int


def share_cores(num_threads: int) -> Cores:
    """num_threads: of attention."""
    building = (num_threads >= _OWN_CORE_THREADS) + (num_threads >= _SECOND_CORE_THREADS)
    builders = max(1, num_threads // _BUILDER_SHARE)
    return Cores(builders, building, int(num_threads >= _OWN_CORE_THREADS))

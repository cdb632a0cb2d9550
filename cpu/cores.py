"""Divide the host's cores between attention, table builders and the thread that launches kernels.

All threads of an attention wait for the slowest, so a thread whose core is taken for a millisecond costs all of them
that millisecond. A builder keeps its core while it has work, and the launching thread keeps one while the other lane
has work. Two builders take twice the cores for half the time, so attention loses the same. But one builder needs 6 to 7
s for the tables of 98,304 tokens of an 8B shape, as long as a card takes for the next such prompt; two finish in time.
"""

from dataclasses import dataclass

_BUILDER_SHARE = 4  # one of so many threads builds tables while decode does not need the cores
_OWN_CORE_THREADS = 8  # from so many threads on, one core is left to a builder, and one to launches
_SECOND_CORE_THREADS = 16  # from so many threads on, a second core is left to builders


@dataclass(frozen=True, slots=True)
class Cores:
    """How attention, table builders and launches share the cores. builders: threads that build tables. building: how
    many of these have a core of their own while they have work. launching: cores left to the thread that launches
    kernels while the other lane has work.
    """

    builders: int
    building: int
    launching: int


def share_cores(num_threads: int) -> Cores:
    """Return the cores for this number of attention threads."""
    building = (num_threads >= _OWN_CORE_THREADS) + (num_threads >= _SECOND_CORE_THREADS)
    builders = max(1, num_threads // _BUILDER_SHARE)
    return Cores(builders, building, int(num_threads >= _OWN_CORE_THREADS))

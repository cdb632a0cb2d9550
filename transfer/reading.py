"""Define how attention reads the part of a context that lies in host memory."""

from collections.abc import Iterable
from enum import Enum


class Reading(Enum):
    """A way to read a context in host memory. Other code uses the properties below instead of the names.

    NONE: nothing of the context is there. WHOLE: the CPU reads all of it. SAMPLE: the CPU reads a sample that hash
    tables choose. BLOCKS: the device or the CPU reads some blocks and the rest is dropped. INDEXED: the device fetches
    tokens and estimates the rest. With the last two, the CPU reads all of it for a row without a ring.
    """

    NONE = "none"
    WHOLE = "whole"
    SAMPLE = "sample"
    BLOCKS = "blocks"
    INDEXED = "indexed"

    @property
    def has_tables(self) -> bool:
        """Return whether the host keeps key codes and hash tables beside the rows."""
        match self:
            case Reading.SAMPLE:
                return True
            case Reading.NONE | Reading.WHOLE | Reading.BLOCKS | Reading.INDEXED:
                return False

    @property
    def reads_all(self) -> bool:
        """Return whether every token of the context takes part in each step."""
        match self:
            case Reading.NONE | Reading.WHOLE:
                return True
            case Reading.SAMPLE | Reading.BLOCKS | Reading.INDEXED:
                return False

    @property
    def is_estimate(self) -> bool:
        """Return whether the softmax mass of the offloaded tokens is estimated instead of summed."""
        match self:
            case Reading.SAMPLE | Reading.INDEXED:
                return True
            case Reading.NONE | Reading.WHOLE | Reading.BLOCKS:
                return False

    @property
    def drops_rest(self) -> bool:
        """Return whether tokens that the method leaves out are dropped."""
        match self:
            case Reading.BLOCKS:
                return True
            case Reading.NONE | Reading.WHOLE | Reading.SAMPLE | Reading.INDEXED:
                return False

    @property
    def device_reads_all(self) -> bool:
        """Return whether the CPU reads nothing for a row with a ring."""
        match self:
            case Reading.INDEXED:
                return True
            case Reading.NONE | Reading.WHOLE | Reading.SAMPLE | Reading.BLOCKS:
                return False

    @property
    def cost_order(self) -> int:
        """Return a rank of readings by the host's cost of one token in a step: a higher one costs more."""
        match self:
            case Reading.NONE:
                return 0
            case Reading.SAMPLE | Reading.INDEXED:
                return 1
            case Reading.WHOLE | Reading.BLOCKS:
                return 2

    def on_cpu(self, num_tables: int) -> "Reading":
        """Return how the CPU reads such a context in a store with `num_tables` hash tables."""
        match self:
            case Reading.SAMPLE:
                return Reading.SAMPLE if num_tables else Reading.WHOLE
            case Reading.NONE | Reading.WHOLE | Reading.BLOCKS | Reading.INDEXED:
                return Reading.WHOLE


def join_readings(readings: Iterable[Reading]) -> Reading:
    """Return the reading of a profile from those of its methods: the first that occurs of sample, blocks, indexed,
    whole; NONE without any.
    """
    given = set(readings)
    order = (Reading.SAMPLE, Reading.BLOCKS, Reading.INDEXED, Reading.WHOLE)
    return next((reading for reading in order if reading in given), Reading.NONE)

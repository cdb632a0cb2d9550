"""Bytes and records of contexts on disk, as the engine tells them to the server."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DiskCounts:
    """Bytes and records now, and counts since the engine started."""

    bytes_held: int  # of all models in the folder
    records: int
    bytes_written: int
    bytes_read: int
    written: int
    refused: int
    capped: int
    evicted: int
    damaged: int
    failed: int
    declined: int
    read_rate: int  # bytes a second, as it is reckoned with
    bytes_today: int  # written
    bytes_a_day: int  # that may be; 0: any
    turns_written: tuple[int, ...]  # by the bytes that each wrote: `transfer.disk.turn_bytes.BOUNDS`, and more
    turn_bytes: int  # of these together

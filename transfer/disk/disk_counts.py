"""Count bytes and records of contexts on disk, as the engine reports them to the server."""

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
    read_rate: int  # bytes a second, as estimated now
    bytes_today: int  # bytes written today
    bytes_a_day: int  # limit of bytes written in a day; 0: none
    turns_written: tuple[int, ...]  # counts by the bytes of a turn, between `transfer.disk.turn_bytes.BOUNDS`
    turn_bytes: int  # written by all turns together

"""Select the rows of a decode group that go on after others failed, and list the rows' host reads."""

from collections.abc import Container, Sequence
from dataclasses import replace

from gpu.step import DecodeGroup, HostRead
from transfer.host_tier import ContextLostError


def without_slots(group: DecodeGroup, slots: Container[int]) -> DecodeGroup:
    """Return the group without the rows of `slots`; the group itself if it has none of them."""
    rows = [row for row, slot in enumerate(group.slots) if slot not in slots]
    if len(rows) == len(group.slots):
        return group
    return replace(
        group,
        slots=[group.slots[row] for row in rows],
        positions=[group.positions[row] for row in rows],
        samples=[group.samples[row] for row in rows],
        host_reads=None if group.host_reads is None else [group.host_reads[row] for row in rows],
        runs=None if group.runs is None else [group.runs[row] for row in rows],
        drafts=None if group.drafts is None else [group.drafts[row] for row in rows],
    )


def slots_over(group: DecodeGroup, error: ContextLostError) -> dict[int, str]:
    """Return the slots of the rows that read the lost context, with the reason."""
    rows = zip(group.slots, host_reads_of(group), strict=True)
    return {
        slot: str(error)
        for slot, host_read in rows
        if host_read is not None and host_read.context_id == error.context_id
    }


def host_reads_of(group: DecodeGroup) -> Sequence[HostRead | None]:
    """Return what each row reads in host memory, or None where it reads nothing there."""
    return group.host_reads if group.host_reads is not None else [None] * len(group.slots)

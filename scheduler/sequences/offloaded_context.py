"""A context in host memory: a run of blocks, of which a fork shares the first ones with its parent."""

from dataclasses import dataclass, field

from transfer.reading import Reading


@dataclass(frozen=True, slots=True)
class RunSize:
    """A run in blocks: `num_shared` in front are a parent's, `num_bulk` come next and at once, the rest later."""

    num_shared: int
    num_bulk: int
    num_blocks: int
    reading: Reading

    @property
    def num_own(self) -> int:
        return self.num_blocks - self.num_shared


@dataclass(eq=False, slots=True)
class HostContext:
    """The context of one sequence in host memory.

    size: the blocks that host memory is charged for.
    pages: of the blocks that are written, the parent's in front. The first `num_evicted` are dense pages; `storage`
        holds those among them that are this context's own.
    num_landed: how many of its first blocks have landed in host memory, or will before the next draw.
    hashes: of its first blocks, as far as others may find them.
    owner: the number of the conversation that left it.
    used: when it was used last, counted in uses.
    is_open: whether the device knows it.
    is_written: whether all of it is in host memory once the plans so far are carried out; if not, a prefill still
        writes.
    """

    context_id: int
    parent: "HostContext | None"
    size: RunSize
    pages: list[int]
    num_evicted: int
    num_landed: int
    hashes: list[bytes]
    storage: list[int] = field(default_factory=list)
    sink_pages: list[int] = field(default_factory=list)
    num_forks: int = 0
    charged_bytes: int = 0
    used: int = 0
    owner: int = 0
    is_open: bool = False
    is_written: bool = True
    is_held: bool = True
    is_findable: bool = True
    is_closed: bool = False

    @property
    def num_blocks(self) -> int:
        return len(self.pages)

    @property
    def num_own(self) -> int:
        """Count the blocks that are offloaded for this context and not for its parent."""
        return len(self.pages) - self.size.num_shared

    @property
    def num_resident(self) -> int:
        """Count the offloaded blocks that have resident pages as well."""
        return len(self.pages) - self.num_evicted


def owner_of(context: HostContext, block: int) -> HostContext:
    """Return the context that owns this block of the run: this one, or an ancestor."""
    while block < context.size.num_shared:
        assert context.parent is not None
        context = context.parent
    return context


def end_of_shared(context: HostContext, owner: HostContext) -> int:
    """Return where the owner's blocks end in the context's run; 0: the owner is no ancestor."""
    end = context.num_blocks
    while context is not owner:
        if context.parent is None:
            return 0
        end, context = min(end, context.size.num_shared), context.parent
    return end


def root_of(context: HostContext) -> HostContext:
    """Return the first ancestor, which is the context itself where it has no parent."""
    while context.parent is not None:
        context = context.parent
    return context

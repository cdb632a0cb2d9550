"""Define a context in host memory: a run of blocks. A fork shares the first blocks of its parent."""

from dataclasses import dataclass, field

from transfer.reading import Reading


@dataclass(frozen=True, slots=True)
class RunSize:
    """The size of a run: `num_shared` blocks of a parent, then `num_bulk` offloaded at once, up to `num_blocks`
    later.
    """

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

    size: the blocks that are charged to host memory.
    pages: a page for each written block, the parent's first. The first `num_evicted` are dense pages; `storage` has
        those of them that are the context's own.
    num_landed: how many of its first blocks have landed in host memory, or will before the next draw.
    hashes: of its first blocks, as far as others may find them.
    owner: the number of the conversation that left it.
    used: the number of its last use; higher ones are more recent.
    is_open: whether the device knows it.
    is_written: whether all of it is in host memory once the plans so far are carried out; else a prefill still writes.
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
        """Count the blocks that are this context's own, and not its parent's."""
        return len(self.pages) - self.size.num_shared

    @property
    def num_resident(self) -> int:
        """Count the offloaded blocks that have resident pages as well."""
        return len(self.pages) - self.num_evicted


def owner_of(context: HostContext, block: int) -> HostContext:
    """Return the context that owns this block of the run: the context itself, or an ancestor."""
    while block < context.size.num_shared:
        assert context.parent is not None
        context = context.parent
    return context


def end_of_shared(context: HostContext, owner: HostContext) -> int:
    """Return where the owner's blocks end in the context's run; 0 if the owner is not an ancestor."""
    end = context.num_blocks
    while context is not owner:
        if context.parent is None:
            return 0
        end, context = min(end, context.size.num_shared), context.parent
    return end


def root_of(context: HostContext) -> HostContext:
    """Return the first ancestor; a context without a parent is its own."""
    while context.parent is not None:
        context = context.parent
    return context

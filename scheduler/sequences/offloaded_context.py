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
    """The context of one sequence in host memory. `size`: what is paid for; `pages`: of what is written, the parent's
    in front; those of the first `num_evicted` blocks are dense, in `storage` if they are this context's own.

    `is_written`: whether all of it is in host memory once the plans so far are carried out; else a prefill is at it.
    `num_landed`: of its first blocks, whose rows have landed by now, or will soon.
    `hashes`: of the first blocks, those that others may find and those in front of them.
    `is_open`: the device has been told of it. `used`: the time of its last use, counted in uses. `owner`: the number of
    the conversation that left it.
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
    """Return the context whose own block of the run it is: this one, or one that it stands on."""
    while block < context.size.num_shared:
        assert context.parent is not None
        context = context.parent
    return context


def end_of_shared(context: HostContext, owner: HostContext) -> int:
    """Return where the owner's blocks end in the context's run; 0: it does not stand on it."""
    end = context.num_blocks
    while context is not owner:
        if context.parent is None:
            return 0
        end, context = min(end, context.size.num_shared), context.parent
    return end


def root_of(context: HostContext) -> HostContext:
    """Return the context that it stands on in the end, maybe itself."""
    while context.parent is not None:
        context = context.parent
    return context

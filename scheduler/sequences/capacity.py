"""Limit device and host memory, with two refusals: not now (the queue is full), and never (too large).

Invariant: a request that passes `check` fits when nothing else runs.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from gpu.memory.plan import MemoryPlan
from gpu.page_layout import PageLayout
from gpu.profiles import Profile
from gpu.step import PartId
from scheduler.messages import EngineRequest
from transfer.host_memory import bytes_of_run
from transfer.reading import Reading
from transfer.tier_shape import TierShape

LANDING_TOKENS = 8  # after an offload, its rows count as landed once so many more are drawn: at least about 0.1 s


class QueueFullError(Exception):
    """More requests wait than `max_queue`; try again later."""


class TooLargeError(Exception):
    """The request can never fit; the message says what was asked, what there is, and what to change."""


@dataclass(frozen=True, slots=True)
class HostCapacity:
    """How contexts are divided between device and host memory. A context beyond `resident_tokens` has `[0, sink)` on
    the device, `[sink, end)` in host memory, and a window after that on the device.

    All lengths but `resident_tokens` are whole pages.
    is_adaptive: whether offloaded tokens keep their pages on the device until the pages are needed.
    bytes_of_run(bulk, more, reading, is_fork): the most host memory of `bulk` tokens that are offloaded at once and
        `more` that follow block by block; for a fork, without the shared ones.
    own: by profile, a capacity that differs in the window, for profiles with methods that need a longer one.
    """

    page_tokens: int
    layout: PageLayout
    is_adaptive: bool
    limit_bytes: int
    sink_tokens: int
    window_tokens: int
    offload_block_tokens: int
    resident_tokens: int
    bytes_of_run: Callable[[int, int, Reading, bool], int]
    own: Mapping[str, "HostCapacity"] = field(default_factory=dict)

    def of(self, profile: str) -> "HostCapacity":
        """Return the capacity for contexts of that profile."""
        return self.own.get(profile, self)

    def prompt_end(self, num_tokens: int) -> int:
        """Return where the offloaded run of a prompt ends: it leaves a window. 0: the prompt stays on the device."""
        if num_tokens <= self.resident_tokens:
            return 0
        end = (num_tokens - self.window_tokens) // self.page_tokens * self.page_tokens
        return end if end > self.sink_tokens else 0

    def offload_end(self, num_tokens: int, run_end: int | None) -> int:
        """Return where the run ends after the offload that is due at `num_tokens` tokens; 0: none is due.

        run_end: where the run ends now; None: nothing is offloaded yet.
        """
        if run_end is not None:
            is_due = num_tokens - run_end >= self.window_tokens + self.offload_block_tokens
            return run_end + self.offload_block_tokens if is_due else 0
        if num_tokens < self.most_resident_tokens:
            return 0
        return (num_tokens - self.window_tokens) // self.page_tokens * self.page_tokens

    def run_end(self, num_prompt_tokens: int, num_tokens: int) -> int:
        """Return where the run of a sequence with `num_tokens` (prompt and output) ends; 0: it has none.

        It depends on these counts alone, whether the sequence was preempted in between or not.
        """
        end = self.prompt_end(num_prompt_tokens) or self.offload_end(min(num_tokens, self.most_resident_tokens), None)
        return (
            end + max(0, num_tokens - self.window_tokens - end) // self.offload_block_tokens * self.offload_block_tokens
            if end
            else 0
        )

    def landed_end(self, num_prompt_tokens: int, num_tokens: int) -> int:
        """Return where the landed part of a run ends: the part that was offloaded long enough ago."""
        end = self.run_end(num_prompt_tokens, num_tokens)
        if end == self.prompt_end(num_prompt_tokens) or self.has_landed(num_tokens, end):
            return end
        is_first = num_tokens - self.offload_block_tokens < self.most_resident_tokens and not self.prompt_end(
            num_prompt_tokens
        )
        return self.sink_tokens if is_first else end - self.offload_block_tokens

    def has_landed(self, num_tokens: int, run_end: int) -> bool:
        """Return whether all rows of a run that ends at `run_end` count as landed, by token counts alone."""
        return num_tokens - run_end >= self.window_tokens + LANDING_TOKENS

    def most_run_tokens(self, num_tokens: int) -> int:
        """Return the tokens of the longest run of a sequence with `num_tokens` (prompt and output)."""
        return max(0, self.prompt_end(num_tokens) - self.sink_tokens)

    @property
    def num_sink_blocks(self) -> int:
        return self.sink_tokens // self.page_tokens

    def blocks_of_run(self, run_end: int) -> int:
        """Return the number of blocks of a run that ends at `run_end`."""
        return (run_end - self.sink_tokens) // self.page_tokens

    def end_of_blocks(self, num_blocks: int) -> int:
        """Return the token at which the first `num_blocks` blocks of a run end."""
        return self.sink_tokens + num_blocks * self.page_tokens

    @property
    def most_window_tokens(self) -> int:
        """Return the most tokens that a sequence has in pages of all layers once its landed blocks are evicted.

        One offload block may be due and another on its way to the host.
        """
        return self.sink_tokens + self.window_tokens + 2 * self.offload_block_tokens

    @property
    def most_resident_tokens(self) -> int:
        """Return the most tokens that a sequence may have in pages of all layers before an offload is due."""
        return max(self.resident_tokens, self.sink_tokens + self.window_tokens) + self.offload_block_tokens


@dataclass(frozen=True, slots=True)
class Capacity:
    """KV pages, the longest context, and the tokens whose hidden states fit at once in all prefills together.

    host: how contexts are offloaded; None: every context stays on the device.
    num_rings: rings of each part of profiles that has some.
    ring_pages: shared pages of each part whose rings share some.
    num_windows: windows for layers that keep no more than one; 0: pages hold all layers.
    spare_window_tokens: cells of each window beyond the longest one that a layer sees.
    snapshot_tokens: windows are states of recurrent layers, copied every so many tokens; None: they are not.
    num_host_states: places in host memory for copies of states.
    """

    num_pages: int
    page_tokens: int
    max_context_tokens: int
    max_hidden_tokens: int
    host: HostCapacity | None
    num_rings: Mapping[PartId, int] = field(default_factory=dict)
    num_windows: int = 0
    spare_window_tokens: int = 0
    ring_pages: Mapping[PartId, int] = field(default_factory=dict)
    snapshot_tokens: int | None = None
    num_host_states: int = 0

    def longest_tokens(self, profile: Profile) -> int:
        """Return the longest prompt and output that a request can have when nothing else runs."""
        return min(have for have, _, _ in self._limits(profile))

    def check(self, request: EngineRequest, profile: Profile) -> None:
        """Raise TooLargeError for a request that cannot fit even alone."""
        num_prompt = request.num_prompt_tokens
        asked = num_prompt + request.max_tokens
        for have, what, key in self._limits(profile):
            if asked > have:
                raise TooLargeError(
                    f"prompt and max_tokens: asked {num_prompt} + {request.max_tokens} = {asked} tokens, {what} {have};"
                    f" shorten the request or raise {key}"
                )

    def _limits(self, profile: Profile) -> list[tuple[int, str, str]]:
        """Return the limits of a sequence: its most tokens, what bounds them, and the key to raise."""
        limits = [
            (self.max_context_tokens, "the context is", "scheduler.max_context_tokens"),
            (self.max_hidden_tokens, "hidden states fit", "scheduler.prefill.max_hidden_tokens"),
        ]
        in_pages = self.num_pages * self.page_tokens
        if self.host is None or not profile.offloads:
            return [limits[0], (in_pages, "KV pages hold", "gpu.kv_cache_gib"), limits[1]]
        host = self.host.of(profile.name)
        if in_pages < min(host.most_resident_tokens, self.max_context_tokens):
            limits.append((in_pages, "KV pages hold", "gpu.kv_cache_gib, or lower host.resident_tokens"))
        beside = self.num_pages - host.most_window_tokens // self.page_tokens
        in_dense = self._longest_run(host, lambda run: host.layout.blocks_for(run // self.page_tokens), beside)
        limits.append((in_dense, "pages of dense layers hold", "gpu.kv_cache_gib"))

        def bytes_of(run: int) -> int:
            return host.bytes_of_run(run, host.offload_block_tokens, profile.reading, False)

        in_host = self._longest_run(host, bytes_of, host.limit_bytes)
        return [*limits, (in_host, "host memory holds", "host.memory_limit_gib")]

    def _longest_run(self, host: HostCapacity, cost: Callable[[int], int], limit: int) -> int:
        """Return the most tokens of a sequence whose run costs no more than `limit`."""

        def cost_of(num_tokens: int) -> int:
            run = host.most_run_tokens(num_tokens)
            return cost(run) if run else 0

        return bisect_right(range(self.max_context_tokens + 1), limit, key=cost_of) - 1


def plan_capacity(plan: MemoryPlan, shape: TierShape | None) -> Capacity:
    """Return the capacity for requests of a memory plan. shape: what the model offloads; None: no host tier."""
    return Capacity(
        plan.num_pages,
        plan.page_tokens,
        plan.max_context_tokens,
        plan.max_hidden_tokens,
        None if shape is None else host_capacity(plan, shape),
        plan.num_rings,
        plan.num_windows,
        plan.spare_window_tokens,
        plan.num_ring_pages,
        plan.snapshot_tokens,
        plan.num_host_states,
    )


def host_capacity(plan: MemoryPlan, shape: TierShape) -> HostCapacity:
    """Return how a memory plan divides contexts between device and host; bytes are counted as the store does."""
    num_dense = sum(layer not in plan.window_layers for layer in plan.dense_layers)
    host = HostCapacity(
        page_tokens=plan.page_tokens,
        layout=PageLayout(len(shape.layers) + num_dense, num_dense, plan.num_pages),
        is_adaptive=plan.residency == "adaptive",
        limit_bytes=plan.host_limit_bytes,
        sink_tokens=plan.sink_tokens,
        window_tokens=plan.window_tokens,
        offload_block_tokens=plan.offload_block_tokens,
        resident_tokens=plan.resident_tokens,
        bytes_of_run=partial(bytes_of_run, shape),
    )
    own = {
        name: replace(host, window_tokens=window, resident_tokens=plan.resident_tokens_of(name))
        for name, window in plan.own_windows.items()
    }
    return replace(host, own=own)

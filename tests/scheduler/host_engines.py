"""The engine with a host tier of counted bytes over a runner that keeps tokens in pages; nothing may be left behind."""

from random import Random

from gpu.config import Composition
from gpu.page_layout import PageLayout
from gpu.profiles import resolve_profiles
from gpu.step import Lane
from scheduler.engine.engine import Engine
from scheduler.engine_config import PrefillConfig, SchedulerConfig
from scheduler.messages import EngineRequest
from scheduler.sequences.capacity import Capacity, HostCapacity
from scheduler.steps.scheduler import Device, Scheduler
from tests.scheduler.engines import PAGE, SHAPE, make_request
from tests.scheduler.lane_runner import LaneRunner
from tests.scheduler.page_runner import PageRunner
from tests.scheduler.window_model import TokenStates, TokenWindows
from transfer.host_config import HostConfig
from transfer.reading import Reading

REUSE = {"method": "mac", "min_context_tokens": 100}
COMPOSITIONS = {
    "whole": {"host": "offloaded"},
    "reusing": {"reuse": REUSE},
    "reusing-down": {"reuse": REUSE, "host": "offloaded"},
    "indexed": {"host": {"method": "indexed", "min_context_tokens": 100}},
    "both": {"reuse": REUSE, "host": {"method": "indexed", "min_context_tokens": 100}},
}
PROFILES = resolve_profiles(
    {name: Composition.model_validate(tree) for name, tree in COMPOSITIONS.items()}, HostConfig()
)
RINGS = PROFILES["reusing"].ring_parts[0].id
INDEXES = PROFILES["indexed"].ring_parts[0].id
SINK, WINDOW, OFFLOAD_BLOCK, RESIDENT = 16, 32, 64, 128
BLOCK_BYTES = 1000
TABLE_BYTES = 300  # of a block, where contexts are sampled


def bytes_of_run(bulk_tokens: int, more_tokens: int, reading: Reading, is_fork: bool) -> int:
    """What comes later is dearer, as in the store, and a fork has a tail to copy."""
    blocks = bulk_tokens // PAGE + -(-2 * more_tokens // PAGE) + (is_fork and bulk_tokens + more_tokens > 0)
    return blocks * (BLOCK_BYTES + TABLE_BYTES * reading.has_tables)


def make_engine(
    *,
    num_pages: int = 110,
    is_adaptive: bool = False,
    dense_layers: int = 2,
    limit_blocks: int = 300,
    max_running: int = 6,
    max_jobs: int = 8,
    chunk_tokens: int = 64,
    prefix_cache: bool = True,
    is_pipelined: bool = True,
    order: Random | None = None,
    num_rings: int = 2,
    num_windows: int = 0,
    num_indexes: int = 0,
    index_pages: int = 4,
    num_states: int = 0,
) -> tuple[Engine, PageRunner]:
    """order: of the steps of two lanes; None: there is one lane."""
    prefill = PrefillConfig(chunk_tokens=chunk_tokens, max_jobs=max_jobs)
    config = SchedulerConfig(max_running=max_running, prefix_cache=prefix_cache, prefill=prefill)
    layout = PageLayout(8, dense_layers, num_pages)
    host = HostCapacity(
        page_tokens=PAGE,
        layout=layout,
        is_adaptive=is_adaptive,
        limit_bytes=limit_blocks * BLOCK_BYTES,
        sink_tokens=SINK,
        window_tokens=WINDOW,
        offload_block_tokens=OFFLOAD_BLOCK,
        resident_tokens=RESIDENT,
        bytes_of_run=bytes_of_run,
    )
    spare = 2 * PAGE + WINDOW + 2 * OFFLOAD_BLOCK
    rings = {RINGS: num_rings} | ({INDEXES: num_indexes} if num_indexes else {})
    pages = {INDEXES: index_pages} if num_indexes else {}
    kept = (num_states, 0, pages, 64) if num_states else (num_windows, spare, pages)
    capacity = Capacity(num_pages, PAGE, 4000, 5000, host, rings, *kept)
    lanes = (Lane.DEVICE,) if order is None else (Lane.HOST, Lane.DEVICE)
    scheduler = Scheduler(config, SHAPE, capacity, b"model", PROFILES, Device(lanes))
    if order is not None:
        runner: PageRunner = LaneRunner(SHAPE.num_layers, PAGE, layout, order)
    else:
        runner = PageRunner(SHAPE.num_layers, PAGE, layout=layout)
    if num_windows:
        runner.windows = TokenWindows(num_windows, 40 + spare, 40)
    if num_states:
        runner.windows = TokenStates(num_states)
    return Engine(scheduler, runner, None, is_pipelined), runner


def ask(name: str, prompt: list[int], max_tokens: int = 8, profile: str = "offloaded", **more) -> EngineRequest:
    return make_request(name, prompt, max_tokens=max_tokens, profile=profile, **more)


def check_idle(engine: Engine, runner: PageRunner) -> None:
    """Nothing is held but by idle contexts, they are charged what they have, and all of it comes back."""
    residence = engine.scheduler.residence
    contexts = residence.contexts
    stats = engine.stats()
    assert (stats.num_running, stats.num_prefilling, stats.num_waiting, stats.pages_used) == (0, 0, 0, 0)
    assert contexts.num_held == 0
    assert contexts.used_bytes == sum(context.charged_bytes for context in contexts._contexts.values())
    assert contexts.used_bytes <= contexts.limit_bytes
    assert residence.evictor.holders == {}
    assert engine.scheduler.rings.num_free == residence._capacity.num_rings
    assert engine.scheduler.rings.num_free_pages == residence._capacity.ring_pages
    assert runner.ring_holders == {}
    assert residence.windows.num_free == residence.windows.count
    assert set(contexts._contexts) | set(contexts.closed) == set(runner.contexts)
    while contexts.evict_idle([]):
        pass
    assert (len(contexts), contexts.used_bytes, contexts._owners) == (0, 0, {})
    assert residence.pages.num_held == 0
    assert residence.pages.num_available == residence.pages.num_pages
    assert sorted(contexts.take_closed()) == sorted(runner.contexts)

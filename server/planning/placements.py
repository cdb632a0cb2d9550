"""Compare the placements that a deployment's contexts could have, by the time of a token in each.

Placements are those of the built-in profiles, those of the deployment's profiles, and on a GPU those in which only the
device reads host memory. Each has a memory plan of its own. Each method states what a step reads (`Method.read_cost`).
A step's time is bytes over rates, one after the other, as in the floors of `tandem bench long`; hops, launches and
overlap are left out. Nothing is allocated or measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpu.config import Composition, Profiles
from gpu.memory.demand import PlanError
from gpu.memory.host_demand import HostDemand
from gpu.memory.plan import MemoryPlan
from gpu.methods.method import Method, ProfilePart, ReadCost
from gpu.methods.registry import list_methods
from gpu.model.architecture import Architecture
from gpu.profiles import FULL_ATTENTION, ProfileError, resolve_profiles
from gpu.weights.expert_shares import most_experts
from scheduler.planning.engine_memory import find_expert_shares, find_host_demand, find_tier_shape, plan_engine
from scheduler.planning.expert_choice import ExpertTimes, find_times
from scheduler.planning.step_bytes import StepBytes
from scheduler.sequences.capacity import host_capacity
from server.deployment import Deployment
from server.planning.resolved_plan import ResolvedPlan
from transfer.host_config import HostConfig
from transfer.machine_rates import Rates
from transfer.reading import Reading
from transfer.tier_shape import TierShape

BATCHES = (1, 2, 4, 8, 16)  # of those, what fits anywhere
PAYS = 1.1  # tokens/s of sampling over those of reading all: for less, nobody should give up what it leaves out

# Two codes' bits agree at this rate where 10 bits and 150 tables read 2.5 % of the keys: random weights have 1.6 %,
# real models 2 to 3 (lab/LAB.md).
BIT_AGREEMENT = 0.5257


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """Estimate a step of `batch` rows, each with a whole context, in milliseconds by purpose.

    offloaded_tokens: of each context, read on the host.
    experts_ms: host experts that the rows take, over the link or on the CPU.
    link_ms: queries and partials.
    fetch_ms: rows that the device reads over the link, if each step chooses other ones.
    """

    batch: int
    offloaded_tokens: int
    weights_ms: float
    experts_ms: float
    device_kv_ms: float
    link_ms: float
    host_ms: float
    fetch_ms: float = 0.0

    @property
    def ms(self) -> float:
        """Return the time that each row waits for a token."""
        return self.weights_ms + self.experts_ms + self.device_kv_ms + self.link_ms + self.host_ms + self.fetch_ms

    @property
    def tokens_s(self) -> float:
        return 1e3 * self.batch / self.ms


@dataclass(frozen=True, slots=True)
class Placement:
    """A placement.

    steps: for each batch asked for, None where so many contexts do not fit.
    most_contexts: that fit at once.
    why_not: the reason why none fits or the placement cannot be had.
    method: says what becomes of a context that outgrows the device.
    """

    method: Method
    most_contexts: int
    steps: tuple[StepEstimate | None, ...]
    why_not: str | None

    @property
    def name(self) -> str:
        return self.method.plan_name or self.method.name

    @property
    def words(self) -> str:
        return self.method.plan_words or f"device and host, {self.method.name}"

    @property
    def reads_all(self) -> bool:
        """Return whether no token of a context is left out."""
        return self.method.reading.reads_all

    @property
    def first(self) -> StepEstimate | None:
        return self.steps[0]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Compare placements for contexts of `context_tokens`.

    `share_read`: the share of sampled keys that each query head reads on the host. `taken`: what requests that name no
    profile get. `experts`: the cost of experts in host memory.
    """

    context_tokens: int
    batches: tuple[int, ...]
    share_read: float
    rates: Rates
    placements: tuple[Placement, ...]
    taken: str
    verdict: str
    sampling: str
    experts: str | None

    def get(self, name: str) -> Placement:
        return next(placement for placement in self.placements if placement.name == name)


def compare_placements(deployment: Deployment, plan: ResolvedPlan, rates: Rates) -> Comparison:
    """Compare the placements of a deployment, whose resolved plan is `plan`.

    Settings that the deployment leaves open are chosen for each placement. Only the context length is the plan's for
    all.
    """
    context, running = plan.memory.max_context_tokens, deployment.scheduler.max_running
    batches = tuple(sorted({min(batch, running) for batch in BATCHES}))
    sampled = (deployment.host or HostConfig()).sampled
    share = expected_share(sampled.bits_per_table, sampled.num_tables)
    own = plan.profiles[plan.deployment.default_profile].host_part  # chosen by the plan, if nobody named one
    found = []
    for part in _list_parts(deployment, plan, own):
        try:
            found.append(place(_plan_for(part, part is own, deployment, plan), batches, share, rates))
        except (PlanError, ProfileError) as error:
            found.append(Placement(part.method, 0, (None,) * len(batches), str(error)))
    taken = own.method.plan_name or own.method.name
    fitting = [index for index, batch in enumerate(batches) if index == 0 or any(one.steps[index] for one in found)]
    batches = tuple(batches[index] for index in fitting)
    found = [replace(one, steps=tuple(one.steps[index] for index in fitting)) for one in found]
    best = _find_best(found)
    verdict = _explain(found, taken, best, context, is_asked=plan.deployment.default_profile)
    return Comparison(context, batches, share, rates, tuple(found), taken, verdict, _judge_sampling(found),
                      _tell_experts(plan, batches, rates))  # fmt: skip


def _list_parts(deployment: Deployment, plan: ResolvedPlan, own: ProfilePart) -> list[ProfilePart]:
    """Return a part for each method to compare, built-in ones first. own: the default profile's.

    A method that the deployment uses has the settings of the first profile with it.
    """
    host = deployment.host or HostConfig()
    on_device: Profiles = {}
    if plan.memory.device == "cuda":
        names = [name for name, method in list_methods().items() if method.reading.device_reads_all]
        on_device = {name: _compose(name) for name in names}
    standard = list(resolve_profiles({}, host).values())
    named = [own, *(profile.host_part for profile in plan.profiles.values())]
    chosen = {part.method.name: part for part in reversed(named)}
    order = [*(profile.host_part for profile in standard), *named]
    order += [profile.host_part for profile in resolve_profiles(on_device, host).values()]
    return list({part.method.name: chosen.get(part.method.name, part) for part in order}.values())


def _compose(method: str) -> Composition:
    return Composition.model_validate({"host": {"method": method}})


def _tell_experts(plan: ResolvedPlan, batches: Sequence[int], rates: Rates) -> str | None:
    """Describe the cost of experts in host memory: of a decode step, with experts chosen at random, and of a prompt."""
    moved = StepBytes(plan.architecture, plan.memory, None)
    if not moved.fetched(1):
        return None
    link, shares = rates.of["host_to_device_gb_s"], find_expert_shares(plan.architecture, plan.memory)
    times = find_times(shares, rates, plan.memory.threads)

    def steps(computes: bool) -> str:
        return ", ".join(
            f"batch {batch}: {moved.fetched(batch) / 1e9:.2f} GB, {_experts_ms(moved, times, batch):,.1f} ms"
            for batch in batches
            if moved.computes(batch) == computes
        )

    said = []
    if steps(True):
        bound = f"as fast as its {times.threads} threads make such numbers" if times.is_bound_by_cores(1) else (
            f"read at {times.host_gb_s:g} GB/s"
        )  # fmt: skip
        said += [
            f"what the CPU computes of them in a step, {bound}: {steps(True)}",
            f"fetched over {link:g} GB/s they would take {times.fetch_ms(1):,.1f} ms at batch 1",
        ]
    if steps(False):
        said += [f"what a step fetches of them over {link:g} GB/s: {steps(False)}"]
    return (
        f"experts: {shares.on_host} of each layer's {most_experts(plan.architecture)} lie in host memory; "
        f"{'; '.join(said)}; a prompt of more than a few tokens copies all, {shares.host_bytes / 1e9:.1f} GB, "
        f"{shares.host_bytes / link / 1e9:.1f} s"
    )


def _experts_ms(moved: StepBytes, times: ExpertTimes, batch: int) -> float:
    """Return the milliseconds of host experts in a step of `batch` rows."""
    return times.compute_ms(batch) if moved.computes(batch) else times.fetch_ms(batch)


def expected_share(bits_per_table: int, num_tables: int) -> float:
    """Return the share of keys whose code agrees with a query's in two or more tables (MagicPIG section 4.2).

    Each bit is assumed to agree with probability BIT_AGREEMENT.
    """
    collides = BIT_AGREEMENT**bits_per_table
    none = (1 - collides) ** num_tables
    return 1 - none - num_tables * collides * (1 - collides) ** (num_tables - 1)


@dataclass(frozen=True, slots=True)
class Planned:
    """A deployment with one placement, its memory plan, and the length of its contexts.

    held_parts: parts of whose rings each running context holds one.
    tier, demand: None if the host is not used.
    """

    part: ProfilePart
    held_parts: tuple[ProfilePart, ...]
    config: Deployment
    memory: MemoryPlan
    architecture: Architecture
    context: int

    @property
    def uses_host(self) -> bool:
        return self.part.method.reading is not Reading.NONE

    @property
    def tier(self) -> TierShape | None:
        return find_tier_shape(self.config, self.architecture, self.memory) if self.uses_host else None

    @property
    def demand(self) -> HostDemand | None:
        return find_host_demand(self.config, self.architecture, self.memory) if self.uses_host else None


def _plan_for(part: ProfilePart, is_taken: bool, deployment: Deployment, plan: ResolvedPlan) -> Planned:
    """Plan a placement. The deployment's own placement keeps its plan. Raises PlanError and ProfileError."""
    context = plan.memory.max_context_tokens
    if is_taken:
        held = plan.profiles[plan.deployment.default_profile].held_parts
        return Planned(part, held, plan.deployment, plan.memory, plan.architecture, context)
    scheduler = deployment.scheduler.model_copy(
        update={"max_context_tokens": context, "default_profile": FULL_ATTENTION}
    )
    host: HostConfig | None = deployment.host or HostConfig()
    profiles = deployment.profiles
    if part.method.reading is Reading.NONE:
        host, profiles = None, _without_host(profiles)
    elif part.method.has_rings and part.id not in plan.memory.num_rings:
        profiles = profiles | {part.method.name: _compose(part.method.name)}
    config = deployment.model_copy(update={"host": host, "profiles": profiles, "scheduler": scheduler})
    held, memory = (part,) if part.method.has_rings else (), plan_engine(config, plan.architecture, plan.machine)
    return Planned(part, held, config, memory, plan.architecture, context)


def _without_host(profiles: Profiles) -> Profiles:
    methods = list_methods()
    return {name: one for name, one in profiles.items() if methods[one.host.method].reading is Reading.NONE}


def place(planned: Planned, batches: Sequence[int], share: float, rates: Rates) -> Placement:
    """Return how many contexts a placement holds, and the time of a step of each batch; None where fewer fit.

    share: the share of offloaded tokens that sampling reads. rates: of the machine.
    """
    most, why_not = _count_contexts(planned)
    steps = [_step(planned, batch, share, rates) if batch <= most else None for batch in batches]
    return Placement(planned.part.method, most, tuple(steps), why_not)


def _count_contexts(planned: Planned) -> tuple[int, str | None]:
    """Return how many whole contexts fit at once, and the reason if none does."""
    memory, context = planned.memory, planned.context
    running, pages = planned.config.scheduler.max_running, -(-context // memory.page_tokens)
    tier, demand = planned.tier, planned.demand
    if tier is None or demand is None:
        most = min(running, memory.num_pages // pages)
        if memory.num_windows:
            most = min(most, memory.num_windows)
        tokens = memory.num_pages * memory.page_tokens
        beside = " beside the host tier" if planned.config.host is not None else ""
        return most, None if most else f"KV pages hold {tokens:,} of {context:,} tokens{beside}"
    offloaded = demand.offloaded_tokens(context)
    blocks = -(-demand.running_tokens(context) // memory.page_tokens) + demand.dense_blocks(offloaded)
    in_pages = memory.num_pages // (blocks if offloaded else pages)
    capacity = host_capacity(memory, tier)
    num_bytes = (
        capacity.bytes_of_run(offloaded, memory.offload_block_tokens, planned.part.method.reading, False)
        if offloaded
        else 0
    )
    in_host = capacity.limit_bytes // num_bytes if num_bytes else in_pages
    most = min(running, in_pages, in_host)
    for part in planned.held_parts:
        most = min(most, memory.num_rings.get(part.id, 0))  # none where a plan found no room
        page_tokens = part.method.ring_page_tokens(part.settings)
        if page_tokens:
            most = min(most, memory.num_ring_pages.get(part.id, 0) // -(-context // page_tokens))
    return most, None if most else f"host memory or KV pages do not hold {context:,} tokens"


def _step(planned: Planned, batch: int, share: float, rates: Rates) -> StepEstimate:
    """Estimate a step in which contexts share the pages equally and the CPU reads the rest."""
    memory, context, architecture = planned.memory, planned.context, planned.architecture
    tier, demand = planned.tier, planned.demand
    offloaded = 0 if demand is None else context - demand.resident_tokens_of(context, memory.num_pages // batch)
    moved = StepBytes(architecture, memory, tier)
    is_cuda = memory.device == "cuda"
    device_gb_s = rates.of["device_stream_gb_s" if is_cuda else "host_stream_gb_s"]
    tflop_s = rates.of["bf16_matmul_tflop_s" if is_cuda else "host_matmul_tflop_s"]
    experts_ms = 0.0
    if moved.fetched(batch):
        times = find_times(find_expert_shares(architecture, memory), rates, memory.threads)
        experts_ms = _experts_ms(moved, times, batch)
    products_ms = 2 * batch * architecture.num_weights_read(1) / tflop_s / 1e9
    link_ms = host_ms = fetch_ms = 0.0
    cost, unread = ReadCost(), 0
    if tier is not None and not offloaded:
        middle = max(context - memory.sink_tokens - memory.window_tokens, 0)
        unread = planned.part.method.unread_tokens(planned.part.settings, context, middle)
    if tier is not None and demand is not None and offloaded:
        cost = planned.part.method.read_cost(planned.part.settings, context, offloaded)
        stream_gb_s = rates.of["host_stream_gb_s"]
        link_gb_s = rates.of["host_to_device_gb_s"] if is_cuda else stream_gb_s
        if is_cuda:
            link_ms = batch * len(tier.layers) * demand.slot_row_bytes / link_gb_s / 1e6
        row_bytes = batch * moved.host_row
        fetched_bytes = cost.fetched * moved.host_rows_of_token * row_bytes
        fetch_ms = fetched_bytes / link_gb_s / 1e6
        host_ms = cost.streamed * moved.host_rows_of_token * row_bytes / stream_gb_s / 1e6
        sampled_rows = share * cost.sampled * len(tier.layers) * tier.num_heads
        if sampled_rows:
            host_ms += sampled_rows * row_bytes / rates.of["host_random_rows_gb_s"] / 1e6
    return StepEstimate(
        batch,
        offloaded,
        max(moved.weights(batch) / device_gb_s / 1e6, products_ms),
        experts_ms,
        batch * moved.device_kv(context, offloaded - cost.on_device + unread) / device_gb_s / 1e6,
        link_ms,
        host_ms,
        fetch_ms,
    )


def _find_best(placements: Sequence[Placement]) -> str | None:
    """Return the name of the fastest placement at one context; None: none fits.

    A placement that reads less than everything must be faster by the factor PAYS than one that reads everything.
    """
    best: Placement | None = None
    for placement in placements:
        if placement.first is None:
            continue
        gain = PAYS if not placement.reads_all and (best is None or best.reads_all) else 1.0
        if best is None or best.first is None or best.first.ms > gain * placement.first.ms:
            best = placement
    return None if best is None else best.name


def _explain(placements: Sequence[Placement], taken: str, best: str | None, context: int, is_asked: str) -> str:
    by_name = {placement.name: placement for placement in placements}
    step = by_name[taken].first
    said = f"takes {by_name[taken].words}, as scheduler.default_profile: {is_asked} says"
    if step is None:
        return f"{said}; no context of {context:,} tokens fits there: {by_name[taken].why_not}"
    said += f": {step.ms:,.1f} ms a token at {context:,} tokens"
    if best is not None and best != taken:
        other = by_name[best].first
        assert other is not None, "placements: the best one fits"
        if other.ms < step.ms:
            return f"{said}; {by_name[best].words} would take {other.ms:,.1f}"
        return f"{said}; {by_name[best].words} would take {other.ms:,.1f} and read all there is"
    others = []
    for placement in placements:
        if placement.name == taken:
            continue
        if placement.first is None:
            others.append(f"{placement.words} does not fit")
        else:
            others.append(f"{placement.words} would take {placement.first.ms:,.1f}")
    return f"{said}; {', '.join(others)}"


def _judge_sampling(placements: Sequence[Placement]) -> str:
    """Say for which batches sampling gives more tokens/s than the best placement that reads everything.

    The other placement may use a smaller batch.
    """
    exact = [placement for placement in placements if placement.reads_all]
    sampled = next(one for one in placements if one.method.reading.has_tables)
    if sampled.first is None:
        return "sampling: does not fit this machine"
    pays: list[str] = []
    does_not: list[str] = []
    for index, step in enumerate(sampled.steps):
        if step is None:
            continue
        rivals = [one for placement in exact for one in placement.steps[: index + 1] if one is not None]
        best = max((one.tokens_s for one in rivals), default=0.0)
        numbers = f"batch {step.batch}: {step.tokens_s:,.1f} tokens/s against {best:,.1f}"
        (pays if step.tokens_s >= PAYS * best else does_not).append(numbers)
    said = [f"sampling {word} at {'; '.join(found)}" for word, found in
            (("pays", pays), ("does not pay", does_not)) if found]  # fmt: skip
    return ". ".join(said)

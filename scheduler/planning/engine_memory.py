"""Plan the memory of a configuration on a machine.

The plan is made once and sent to the engine with the configuration, so `tandem plan` prints what is allocated.
"""

from collections.abc import Iterable
from dataclasses import replace
from operator import itemgetter

from gpu.config import GpuConfig, ModelConfig
from gpu.memory.counting import WINDOWS_PER_SEQUENCE
from gpu.memory.draft_model_plan import DraftModelPlan, plan_draft_model
from gpu.memory.host_demand import HostDemand
from gpu.memory.host_shares import resolve_host
from gpu.memory.machine_limits import resolve_device, resolve_dtype, resolve_kv
from gpu.memory.plan import MemoryPlan, MemoryRequest, PlanError, PlannedSizes, plan_memory
from gpu.methods.kept import Kept
from gpu.model.architecture import Architecture, ModelError, load_architecture
from gpu.model.draft_head_shape import with_draft_head
from gpu.model.split import split_over
from gpu.operations.recurrent.state_arrays import MOST_STEP_ROWS
from gpu.profiles import Profile, ProfileError, find_kept, list_states, resolve_profiles
from gpu.weights.expert_shares import ExpertShares, most_experts
from scheduler.engine_config import EngineConfig, SchedulerConfig, read_adapters
from scheduler.planning.devices import check_split, device_share
from scheduler.planning.draft_vocabulary import find_other_vocabulary
from scheduler.planning.expert_choice import captured_rows, choose, configured_rows
from transfer.host_config import DocumentsConfig, HostConfig
from transfer.machine import MachineProfile
from transfer.machine_rates import find_rates
from transfer.measured import measured_path
from transfer.tier_shape import TierShape

_LEAST_PAGES = 0.97  # share of pages that prefill graphs must leave, as evicted pages are read slowly
_LEAST_PAGES_WITH_STATES = 0.8  # the same for a recurrent model's graphs: without them its prompts take twice as long
_GRAPH_SIZES = 128, 256, 512, 1024
_LONGEST_GRAPH = 2048  # tokens of a whole unit that is captured for a recurrent model, whose layers have most launches


def plan_engine(config: EngineConfig, architecture: Architecture, machine: MachineProfile) -> MemoryPlan:
    """Plan the machine's memory. Raises PlanError when the deployment does not fit, and ProfileError.

    On a GPU, larger prefill units are planned if `scheduler.favour` asks for them, they shorten no context, and they
    leave the share of the pages that `SchedulerConfig.larger_chunks` has. The same holds for graphs of short units if
    their sizes are not configured, with their own shares; they may also shorten the longest context by 3 %.

    If the CPU computes a step's experts, no memory is needed to fetch them to. If measured rates choose that for some
    steps, memory is planned again. The chosen number of rows is kept then, although fewer experts are in host memory:
    both ways are faster with fewer.
    """
    profiles = list(resolve_profiles(config.all_profiles, config.host).values())
    architecture = served_shape(config, architecture)
    machine = device_share(config.gpu, machine)
    _check_units(profiles, config.scheduler.prefill.chunk_tokens)
    _check_select_layer(config.documents, architecture.num_layers)
    _check_drafts(profiles, architecture)
    if config.disk is not None and architecture.draft_layers:
        raise PlanError(
            "disk: contexts there have no rows of a head that drafts (`draft: mtp`); leave one of them out, or draft "
            "by `ngram`"
        )
    if config.disk is not None and not config.scheduler.prefix_cache:
        raise PlanError("disk needs scheduler.prefix_cache: true, and it is false; change it, or leave out disk")
    draft = _plan_draft_model(config, profiles, architecture, machine)
    request = MemoryRequest(
        architecture,
        config.gpu,
        host=config.host,
        kept=None if config.host is None else find_kept(profiles, config.host, architecture),
        states=list_states(profiles, architecture),
        sizes=_asked_sizes(config.scheduler),
        machine=machine,
        documents=config.documents,
        disk=config.disk,
        draft=draft,
        adapters=read_adapters(config, architecture),
    )
    request = replace(request, sizes=_choose_sizes(config.scheduler, request))
    request = replace(request, sizes=_with_graphs(config.gpu, request))
    asked, rates = config.gpu.host_experts, find_rates(machine, measured_path())
    max_running = config.scheduler.max_running
    captured = captured_rows(config.gpu, max_running, configured_rows(asked) or 0)
    plan = plan_memory(replace(request, computed_rows=captured))
    known = config.gpu, max_running, architecture
    computed_rows, said = choose(asked, *known, plan, find_expert_shares(architecture, plan), rates)
    if computed_rows != plan.computed_rows:
        plan = plan_memory(replace(request, computed_rows=computed_rows))
        _, said = choose(computed_rows, *known, plan, find_expert_shares(architecture, plan), rates)
    notes: list[str] = []
    if config.host is not None:
        plan = replace(plan, own_windows=_own_windows(profiles, config.host, architecture, plan))
        notes = _say_kept(profiles, config.host, architecture, plan)
        notes += _say_dense(profiles, config, architecture, plan)
    notes += [] if said is None else [said]
    notes += _say_not_captured(config.gpu, request, plan)
    if config.gpu.devices > 1:
        notes.append(
            f"gpu.devices: {config.gpu.devices}: bytes, tokens and threads are of each device; each has its part of "
            "the host's cores and memory"
        )
    most_drafted = max((one.draft.most_tokens for one in profiles if one.draft is not None), default=0)
    if architecture.recurrent is not None and most_drafted >= MOST_STEP_ROWS:
        notes.append(
            f"drafts: of {architecture.name} a step has up to {MOST_STEP_ROWS} rows of a sequence, so it drafts up to "
            f"{MOST_STEP_ROWS - 1} tokens for it and not {most_drafted}"
        )
    sizes = config.gpu.graph_batch_sizes if plan.device == "cuda" else ()
    most_rows = min([max_running, *([max(sizes)] if sizes else [])])
    if most_drafted >= most_rows:
        key = "scheduler.max_running" if most_rows == max_running else "the most of gpu.graph_batch_sizes"
        drafts = f"drafts up to {most_rows - 1} tokens and not {most_drafted}" if most_rows > 1 else "has no drafts"
        notes.append(
            f"drafts: a step has up to {most_rows} rows, {key}, so it {drafts}; raise it to {most_drafted + 1}"
        )
    return replace(plan, notes=(*plan.notes, *notes))


def served_shape(config: EngineConfig, architecture: Architecture) -> Architecture:
    """Return the model's shape as it is served: one device's share if split, or with the draft head if a profile uses
    it.

    Raises PlanError, with the profile or the key, for a model that has no draft head or cannot be split.
    """
    if config.gpu.devices > 1:
        check_split(config)
        try:
            return split_over(architecture, config.gpu.devices)
        except ModelError as error:
            raise PlanError(str(error)) from None
    for name, profile in config.all_profiles.items():
        if profile.draft is not None and profile.draft.uses_head:
            try:
                return with_draft_head(architecture)
            except ModelError as error:
                raise PlanError(f"profiles.{name}.{error}") from None
    return architecture


def _asked_sizes(scheduler: SchedulerConfig) -> PlannedSizes:
    return PlannedSizes(
        scheduler.max_running,
        scheduler.prefill.chunk_tokens,
        scheduler.max_context_tokens,
        scheduler.prefill.max_hidden_tokens,
    )


def _choose_sizes(scheduler: SchedulerConfig, request: MemoryRequest) -> PlannedSizes:
    """Return the configured sizes, with the largest prefill units that cost next to nothing."""
    sizes, wanted = request.sizes, scheduler.larger_chunks(has_experts=most_experts(request.architecture) > 0)
    if not wanted:
        return sizes
    least = plan_memory(request)
    for chunk_tokens, pages_share in wanted.items() if least.device == "cuda" else ():
        larger = replace(sizes, chunk_tokens=chunk_tokens)
        try:
            plan = plan_memory(replace(request, sizes=larger))
        except PlanError:
            continue
        if _has_room_of(plan, least, request.sizes.max_running, pages_share=pages_share):
            return larger
    return sizes


def _with_graphs(gpu: GpuConfig, request: MemoryRequest) -> PlannedSizes:
    """Return the sizes with those of captured prefill units: as configured, or as many as cost next to nothing."""
    sizes = request.sizes
    if gpu.prefill_graph_sizes != "auto":
        asked = tuple(size for size in gpu.prefill_graph_sizes if size <= sizes.chunk_tokens)
        return sizes if gpu.check_coverage else replace(sizes, prefill_graph_sizes=asked)
    least = plan_memory(request)
    if gpu.check_coverage or least.device != "cuda":
        return sizes
    own = _own_graph_sizes(request)
    for count in range(len(own), 0, -1):
        captured = replace(sizes, prefill_graph_sizes=tuple(own[:count]))
        try:
            plan = plan_memory(replace(request, sizes=captured))
        except PlanError:
            continue
        if _has_room_of(plan, least, sizes.max_running, _LEAST_PAGES, _least_pages_of(request)):
            return captured
    return sizes


def _least_pages_of(request: MemoryRequest) -> float:
    """Return the share of the pages that prefill graphs must leave if none are configured."""
    return _LEAST_PAGES if request.architecture.recurrent is None else _LEAST_PAGES_WITH_STATES


def _own_graph_sizes(request: MemoryRequest) -> list[int]:
    """Return the unit sizes to capture by default if there is room: short ones, and a recurrent model's whole unit."""
    chunk_tokens = request.sizes.chunk_tokens
    whole = {chunk_tokens} if request.architecture.recurrent is not None and chunk_tokens <= _LONGEST_GRAPH else set()
    return sorted({size for size in _GRAPH_SIZES if size <= chunk_tokens} | whole)


def _say_not_captured(gpu: GpuConfig, request: MemoryRequest, plan: MemoryPlan) -> list[str]:
    """Name the default prefill graphs for which there is no room."""
    if gpu.prefill_graph_sizes != "auto" or gpu.check_coverage or plan.device != "cuda":
        return []
    left = [f"{size:,}" for size in _own_graph_sizes(request) if size not in plan.prefill_graph_sizes]
    if not left:
        return []
    taken = ", ".join(f"{size:,}" for size in plan.prefill_graph_sizes) or "none"
    return [
        f"gpu.prefill_graph_sizes: auto takes {taken}; {', '.join(left)} would take more than "
        f"{1 - _least_pages_of(request):.0%} of the KV pages, or of the longest context"
    ]


def _has_room_of(
    plan: MemoryPlan, least: MemoryPlan, max_running: int, context_share: float = 1.0, pages_share: float = _LEAST_PAGES
) -> bool:
    """Return whether a plan has nearly all that the plan `least` has.

    It must have the same rings, the same windows apart from spare ones, these shares of the longest context and of the
    pages, and nearly as many experts on the device.
    """
    return (
        plan.max_context_tokens >= context_share * least.max_context_tokens
        and plan.num_pages >= pages_share * least.num_pages
        and (plan.rings, plan.ring_pages) == (least.rings, least.ring_pages)
        and plan.num_windows >= min(least.num_windows, WINDOWS_PER_SEQUENCE * max_running)
        and (plan.experts_on_card or 0) >= _LEAST_PAGES * (least.experts_on_card or 0)
    )


def _say_dense(
    profiles: Iterable[Profile], config: EngineConfig, architecture: Architecture, plan: MemoryPlan
) -> list[str]:
    """Name the layers that stay on the device although the default profile needs none of them, and who keeps them."""
    assert config.host is not None
    kept = {one.name: set(find_kept([one], config.host, architecture).dense_layers) for one in profiles if one.offloads}
    default = config.scheduler.default_profile
    if default not in kept or not (more := set(plan.dense_layers) - kept[default]):
        return []
    who = " and ".join(f"{name!r}" for name, layers in kept.items() if layers & more)
    return [
        f"host.dense_layers: {sorted(more)} stay whole on the device for all profiles, since requests may name {who}; "
        f"{default!r} needs none of them: set host.dense_layers to [] to read them as other layers"
    ]


def _own_windows(
    profiles: Iterable[Profile], host: HostConfig, architecture: Architecture, plan: MemoryPlan
) -> dict[str, int]:
    """Return the window tokens, in whole pages, of each profile whose methods need more than `host.window_tokens`."""
    asked = {one.name: find_kept([one], host, architecture).window_tokens for one in profiles if one.offloads}
    pages = {name: -(-tokens // plan.page_tokens) for name, tokens in asked.items()}
    whole = {name: count * plan.page_tokens for name, count in pages.items()}
    return {name: tokens for name, tokens in whole.items() if tokens > plan.window_tokens}


def _say_kept(profiles: Iterable[Profile], host: HostConfig, architecture: Architecture, plan: MemoryPlan) -> list[str]:
    """Explain where more of each context stays on the device than configured, and which method needs it."""
    notes = []
    kept = [
        (profile.name, part.method.name, one)
        for profile in profiles
        for part in profile.parts
        if (one := part.method.find_kept(part.settings, host, architecture)) is not None
    ]
    needs = [(profile, method, one.sink_tokens) for profile, method, one in kept]
    profile, method, most = max(needs, key=itemgetter(2), default=("", "", 0))
    if most > host.sink_tokens:
        notes.append(
            f"host.sink_tokens: {plan.sink_tokens:,} in place of {host.sink_tokens:,}: {method!r} of the profile "
            f"{profile!r} needs {most:,}"
        )
    for name, window in plan.own_windows.items():
        method = max((one for one in kept if one[0] == name), key=lambda one: one[2].window_tokens)[1]
        note = f"profiles.{name}: a window of {window:,} tokens in place of {plan.window_tokens:,}: {method!r} needs it"
        resident = plan.resident_tokens_of(name)
        if resident > plan.resident_tokens:
            note += f", and contexts of up to {resident:,}, not {plan.resident_tokens:,}, stay on the device"
        notes.append(note)
    if plan.resident_tokens - host.resident_tokens >= plan.page_tokens:
        notes.append(
            f"host.resident_tokens: {plan.resident_tokens:,} in place of {host.resident_tokens:,}: "
            f"{plan.sink_tokens:,} in front, a window of {plan.window_tokens:,} and {plan.offload_block_tokens:,} "
            "that are offloaded at once"
        )
    return notes


def _check_units(profiles: Iterable[Profile], chunk_tokens: int) -> None:
    for profile in profiles:
        if profile.align_tokens > chunk_tokens:
            raise ProfileError(
                f"profiles.{profile.name}: units of '{profile.prefill_method}' end at multiples of "
                f"{profile.align_tokens} tokens, and one has {chunk_tokens} at most; raise "
                "scheduler.prefill.chunk_tokens"
            )


def _check_drafts(profiles: Iterable[Profile], architecture: Architecture) -> None:
    """Raise PlanError if a profile drafts by another profile on a recurrent model: its steps would change states."""
    drafting = [(one.name, one.draft.profile) for one in profiles if one.draft is not None and one.draft.profile]
    if drafting and architecture.recurrent is not None:
        raise PlanError(
            f"profiles.{drafting[0][0]}.draft: {architecture.name} has recurrent layers, whose states steps of "
            f"{drafting[0][1]!r} would change; draft by `ngram`"
        )


def _plan_draft_model(
    config: EngineConfig, profiles: Iterable[Profile], architecture: Architecture, machine: MachineProfile
) -> DraftModelPlan | None:
    """Plan the memory of the draft model; None if no profile has one.

    Raises PlanError, with the profile, for two different draft models, and for one with another vocabulary.
    """
    named = [(one.name, one.draft) for one in profiles if one.draft is not None and one.draft.model is not None]
    if not named:
        return None
    (name, first), scheduler = named[0], config.scheduler
    for other, draft in named:
        if (draft.model, draft.cache_tokens) != (first.model, first.cache_tokens):
            raise PlanError(
                f"profiles.{other}.draft: model {draft.model}, cache_tokens {draft.cache_tokens}; profiles.{name} has "
                f"{first.model}, {first.cache_tokens}: one model drafts for all profiles, with one cache"
            )
    path = first.model
    assert path is not None, "drafts: a profile names a model"
    shape = load_architecture(ModelConfig(path=path))
    why = find_other_vocabulary(config.model, architecture.vocab_size, path, shape.vocab_size)
    if why is not None:
        raise PlanError(f"profiles.{name}.draft.model: {why}; wanted a model of the same vocabulary")
    longest = scheduler.max_context_tokens or architecture.max_context_tokens
    dtype = resolve_dtype(config.gpu, resolve_device(config.gpu, machine))
    leaves_pages = config.host is not None or config.documents is not None
    gpu = config.gpu.model_copy(update={"kv": resolve_kv(config.gpu, machine, dtype, architecture, leaves_pages)})
    try:
        return plan_draft_model(
            path, shape, gpu, machine, max_running=scheduler.max_running,
            chunk_tokens=scheduler.prefill.chunk_tokens, context_tokens=longest, cache_tokens=first.cache_tokens,
        )  # fmt: skip
    except PlanError as error:
        raise PlanError(f"profiles.{name}.{error}") from None


def _check_select_layer(documents: DocumentsConfig | None, num_layers: int) -> None:
    """Raise PlanError for a configured `select_layer` that the model lacks.

    A default beyond a small model's last layer becomes that layer (`fusion_plan.find_select_layer`).
    """
    if documents is None or "select_layer" not in documents.model_fields_set:
        return
    if documents.select_layer >= num_layers:
        raise PlanError(
            f"documents.select_layer: asked {documents.select_layer}, the model has layers 0 to {num_layers - 1}; name "
            "one of them"
        )


def find_host_demand(config: EngineConfig, architecture: Architecture, plan: MemoryPlan) -> HostDemand:
    """Return what the planned deployment's host tier needs."""
    assert config.host is not None
    longest_window = max([plan.window_tokens, *plan.own_windows.values()])
    kept = Kept(plan.sink_tokens, longest_window, plan.dense_layers)
    max_running = config.scheduler.max_running
    demand = resolve_host(config.host, kept, architecture, plan.page_tokens, plan.dtype_bytes, max_running, plan.kv)
    return replace(demand, window_layers=plan.window_layers)


def find_tier_shape(config: EngineConfig, architecture: Architecture, plan: MemoryPlan) -> TierShape:
    """Return the shape of what the model offloads."""
    return find_host_demand(config, architecture, plan).tier_shape


def find_expert_shares(architecture: Architecture, plan: MemoryPlan) -> ExpertShares:
    """Return how the planned deployment's experts are shared between device and host."""
    most = most_experts(architecture)
    return ExpertShares(architecture, plan.dtype_bytes, most if plan.experts_on_card is None else plan.experts_on_card)

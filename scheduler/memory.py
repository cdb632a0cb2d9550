"""What an engine's memory is shared out to: the plan of a configuration on a machine. No torch.

Refuses to know how a plan is made (`gpu.memory`) and what it is printed as.
"""

from gpu.memory.host_shares import resolve_host
from gpu.memory.plan import MemoryPlan, plan_memory
from gpu.model.architecture import Architecture
from gpu.profiles import resolve_profiles, slot_bytes
from scheduler.config import EngineConfig
from transfer.machine import probe_machine
from transfer.tier_shape import TierShape


def plan_engine(config: EngineConfig, architecture: Architecture) -> MemoryPlan:
    """The memory of this machine, shared out. Raises PlanError when the deployment does not fit, and ProfileError."""
    return plan_memory(
        architecture,
        config.gpu,
        host=config.host,
        slot_bytes=slot_bytes(resolve_profiles(config.profiles, config.host).values(), architecture),
        max_running=config.scheduler.max_running,
        chunk_tokens=config.scheduler.prefill.chunk_tokens,
        max_context_tokens=config.scheduler.max_context_tokens,
        max_hidden_tokens=config.scheduler.prefill.max_hidden_tokens,
        machine=probe_machine(),
    )


def find_tier_shape(config: EngineConfig, architecture: Architecture, plan: MemoryPlan) -> TierShape:
    """What of the model goes down. Raises PlanError."""
    assert config.host is not None
    max_running = config.scheduler.max_running
    return resolve_host(config.host, architecture, plan.page_tokens, plan.dtype_bytes, max_running).tier_shape

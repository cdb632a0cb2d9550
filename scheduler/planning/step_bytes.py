"""Count the bytes and FLOPs of a decode step or a prompt, for `tandem plan` and the floors of `tandem bench long`."""

from dataclasses import dataclass

from gpu.memory.plan import MemoryPlan
from gpu.model.architecture import Architecture
from gpu.model.matrix_formats import step_weight_bytes
from gpu.page_layout import row_bytes
from scheduler.planning.engine_memory import find_expert_shares
from transfer.tier_shape import TierShape


def prompt_flops(model: Architecture, begin: int, end: int) -> float:
    """Count the FLOPs of tokens `[begin, end)`: projections, causal attention, and the logits of the last one.

    All layers count for all tokens, although most tokens need only keys and values of the last one.
    """
    products = 2 * ((end - begin) * model.num_layers * model.num_layer_weights + model.num_embedding_weights)
    return products + 4 * model.num_heads * model.num_pair_products(begin, end)


@dataclass(frozen=True, slots=True)
class StepBytes:
    """The bytes that steps of a deployment read. tier: what the model offloads; None: there is no host tier."""

    architecture: Architecture
    plan: MemoryPlan
    tier: TierShape | None

    def weights(self, num_rows: int) -> float:
        """Return the bytes of weights that a step reads on the device; the number of rows matters only with experts."""
        whole = step_weight_bytes(self.architecture, self.plan.dtype_bytes, self.plan.is_packed, num_rows)
        return whole - (self.fetched(num_rows) if self.computes(num_rows) else 0)

    def computes(self, num_rows: int) -> bool:
        """Return whether the CPU computes the experts in host memory in such a step, so that none is fetched."""
        return num_rows <= self.plan.computed_rows

    def fetched(self, num_rows: int) -> float:
        """Return the bytes of experts in host memory that such a step reads, over the link or by the CPU."""
        return find_expert_shares(self.architecture, self.plan).fetched_bytes(num_rows)

    def beside(self, num_rows: int) -> float:
        """Return the bytes of experts that the device reads while the CPU computes those in host memory."""
        shares = find_expert_shares(self.architecture, self.plan)
        return shares.near_bytes(num_rows) if self.computes(num_rows) else 0.0

    @property
    def layer_token(self) -> int:
        """Return the bytes of a token's keys and values in one layer that sees everything, on the device."""
        shape = self.architecture
        return shape.rows_of_head * shape.num_kv_heads * row_bytes(self.plan.kv, shape.dim, shape.latent is not None)

    def device_kv(self, context: int, offloaded_tokens: int) -> int:
        """Return the bytes of keys and values that a step reads on the device for one context.

        offloaded_tokens: tokens of the context that the offloaded layers read on the host instead.
        """
        shape = self.architecture
        offloaded_rows = 0 if self.tier is None else offloaded_tokens * len(self.tier.layers)
        seen = 0
        for spec in shape.layers:
            own, window = shape.heads_of(spec), spec.seen_tokens
            tokens = context if window is None else min(context, window)
            seen += tokens * shape.rows_of_head * own.count * row_bytes(self.plan.kv, own.dim)
        state = 0 if shape.recurrent is None else 2 * self.plan.window_bytes  # read and written
        return seen - offloaded_rows * self.layer_token + state

    @property
    def host_row(self) -> int:
        """Return the bytes of a key and a value of one KV head, as the host keeps them."""
        return 2 * self._present.row_bytes

    @property
    def host_rows_of_token(self) -> int:
        """Count the KV heads of all offloaded layers."""
        return len(self._present.layers) * self._present.num_kv_heads

    def flops(self, begin: int, end: int) -> float:
        """Count what `prompt_flops` does."""
        return prompt_flops(self.architecture, begin, end)

    @property
    def _present(self) -> TierShape:
        assert self.tier is not None, "step bytes: rows on the host, without a host tier"
        return self.tier

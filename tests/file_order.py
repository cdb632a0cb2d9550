"""Which test file comes when, and which of the processes takes it: kernels are compiled once, and neither waits long.

numba compiles the attention of host memory, and the decode step in bf16, for a minute and a half in each process that
needs them. So the files that do come first and the longest of the others last; the first process takes files from the
front, the others from the back, and they meet among short ones. Invariant: a file's tests stay together and in order.
"""

from collections.abc import Iterable
from pathlib import Path

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

# Longest first, as far as they take more than a few seconds (`pytest --durations=20`); others may be in neither.
COMPILING = (
    "tests/bench/test_long_context.py",
    "tests/cpu/test_host_attention.py",
    "tests/cpu/test_shared_reads.py",
    "tests/evals/test_serving.py",
    "tests/cpu/test_packed_experts.py",
    "tests/gpu/test_gguf.py",
    "tests/scheduler/test_host_failures.py",
    "tests/bench/test_engine_benchmark.py",
    "tests/end_to_end/test_long_prompt.py",
    "tests/cpu/test_growth.py",
    "tests/server/test_host_end_to_end.py",
    "tests/gpu/test_cpu_step.py",
    "tests/gpu/test_runner.py",
    "tests/gpu/test_host_read_steps_on_cpu_tier.py",
    "tests/cpu/test_tier.py",
    "tests/cpu/test_tier_sampling.py",
    "tests/gpu/test_computed_experts.py",
    "tests/cpu/test_expert_rates.py",
    "tests/cpu/test_experts.py",
)
LONG = (
    "tests/gpu/test_kernel_targets.py",  # with an empty Triton cache
    "tests/gpu/test_kernels_interpreted.py",
    "tests/scheduler/test_drafts_under_grammars_of_a_model.py",
    "tests/gpu/test_quantised_checkpoints.py",
    "tests/gpu/test_prefill_pieces.py",
    "tests/scheduler/test_disk_and_host.py",
    "tests/scheduler/test_states_of_a_model.py",
    "tests/scheduler/test_grouping.py",
    "tests/gpu/test_families.py",
    "tests/server/test_plan.py",
    "tests/scheduler/test_predicted_soak.py",
    "tests/gpu/test_prefill.py",
    "tests/scheduler/test_expert_choice.py",
    "tests/scheduler/test_drafts_beside_indexed.py",
    "tests/gpu/test_kernels_experts.py",
    "tests/gpu/test_indexed_serving.py",
    "tests/server/test_hostile_calls.py",
    "tests/scheduler/test_disk_of_windows.py",
    "tests/server/test_lifecycle.py",
    "tests/scheduler/test_drafts_by_a_model.py",
    "tests/scheduler/test_epsilon_of_requests.py",
    "tests/scheduler/test_documents.py",
    "tests/scheduler/test_disk_of_a_model.py",
    "tests/gpu/test_hybrids.py",
    "tests/scheduler/test_engine_imports.py",
    "tests/scheduler/test_drafts_beside_mac.py",
    "tests/server/test_large_texts.py",
    "tests/end_to_end/test_lm_eval.py",
    "tests/gpu/test_kernels_attention.py",
    "tests/gpu/test_kernels_mac.py",
    "tests/server/test_held_answers.py",
    "tests/server/test_placements.py",
    "tests/gpu/test_mac_indexed.py",
    "tests/gpu/test_prefill_host.py",
    "tests/scheduler/test_drafts_by_a_head.py",
    "tests/test_conftest.py",
    "tests/gpu/test_split_experts.py",
    "tests/scheduler/test_leaving_jobs.py",
    "tests/gpu/test_kv_codes.py",
    "tests/server/test_several_models.py",
    "tests/gpu/test_predicted_serving.py",
    "tests/scheduler/test_split_engine.py",
    "tests/scheduler/test_scheduler.py",
    "tests/server/test_cli.py",
    "tests/scheduler/test_ring_pages.py",
    "tests/server/test_openapi.py",
    "tests/server/test_renderers.py",
    "tests/scheduler/test_fairness.py",
    "tests/scheduler/test_drafts_under_masks.py",
    "tests/scheduler/test_host.py",
    "tests/gpu/test_kernels_indexed.py",
    "tests/gpu/test_families_host.py",
    "tests/server/test_end_to_end.py",
    "tests/end_to_end/test_responsiveness.py",
    "tests/scheduler/test_residency.py",
    "tests/scheduler/test_disk_of_sessions.py",
    "tests/gpu/test_sampler_race.py",
    "tests/server/test_message_reader.py",
    "tests/transfer/test_threads.py",
    "tests/gpu/test_sampler.py",
    "tests/scheduler/test_texts_of_llama_cpp.py",
    "tests/evals/test_fusion_protocol.py",
    "tests/gpu/test_restoring.py",
)


def in_order(files: Iterable[str]) -> list[str]:
    """Files that compile, those not listed in the order that they came in, then long ones with the longest last."""
    given = list(files)
    known = {*COMPILING, *LONG}
    first, last = ([name for name in listed if name in given] for listed in (COMPILING, LONG[::-1]))
    return first + [name for name in given if name not in known] + last


def sort_items(items: list[pytest.Item], root: Path) -> None:
    """Put them in the order of their files, in place."""
    names = {item.path: str(item.path.relative_to(root)) for item in items}
    places = {name: place for place, name in enumerate(in_order(dict.fromkeys(names.values())))}
    items.sort(key=lambda item: places[names[item.path]])


class FromBothEnds(LoadFileScheduling):
    """File by file; the first process takes the next, the others the last."""

    def _reschedule(self, node: WorkerController) -> None:
        """Give a process its next file with the last but one test: xdist wants to know what comes after each."""
        if self._pending_of(self.assigned_work[node]) <= 1 or not self.workqueue:
            super()._reschedule(node)

    def remove_node(self, node: WorkerController) -> str | None:
        """Return the test, or file, at which a process ended, or None. It does not run again, as it would in xdist."""
        units = self.assigned_work[node]
        crashed = next((test for unit in units.values() for test, is_done in unit.items() if not is_done), None)
        if crashed is not None:
            units[self._split_scope(crashed)][crashed] = True
        self.assigned_work[node] = {scope: unit for scope, unit in units.items() if not all(unit.values())}
        super().remove_node(node)
        return crashed

    def _assign_work_unit(self, node: WorkerController) -> None:
        if self.nodes.index(node) > 0:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)

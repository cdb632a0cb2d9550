"""The tests of decoding, once more, with drafts in every step that has room: no text changes, nothing is left."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = (
    "admission", "block_events", "cache_salt", "constraints", "conversations", "disk_and_host", "disk_of_a_model",
    "disk_of_sessions", "disk_of_windows", "documents", "fairness", "preemption_order", "host", "host_charges", "lanes",
    "latents_of_a_model", "leaving_jobs", "mac_soak", "predicted_soak", "preemption", "priority", "reloads",
    "residency", "residency_soak", "ring_pages", "rings", "scheduler", "states", "states_of_a_model", "waiting_tokens",
    "windows",
)  # fmt: skip
# These say in which step something comes, or how many there are, which drafts change.
OF_STEPS = {
    "constraints": ("a_step_is_launched_before_what_its_rows_are_held_to", "what_depends_on_no_draw_is_drawn_at_once"),
    "documents": (
        "a_prompt_that_is_done_keeps_what_the_question_looks_at", "those_that_wait_for_long_have_no_chunks_computed"
    ),
    "preemption_order": ("idle_contexts_give_their_pages_before", "an_idle_context_whose_pages_others_hold"),
    "host": ("prompts_that_are_offloaded_leave_each_other_the_pages", "who_is_preempted_for_a_lack_of_pages_forks"),
    "lanes": ("rows_that_ask_step_apart", "rows_that_ask_nothing_join", "rows_part_again_where_a_joint_step"),
    "reloads": ("it_comes_back_only_some_steps_after",),
    "residency": (
        "what_fixed_residence_asks_for_depends", "sampled_ones_are_offloaded_first", "one_that_is_preempted_in_the_plan"
    ),
    "scheduler": ("auto_computes_a_short_prompt_between", "a_block_is_found_only_once_its_last_token"),
    "states": ("one_that_is_preempted_finds_its_state", "one_that_is_preempted_goes_on_with_its_own_state"),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("part", range(4))
def test_what_holds_without_drafts_holds_with_them(part: int) -> None:
    modules = MODULES[part::4]
    names = [f"(test_{module} and ({' or '.join(OF_STEPS[module])}))" for module in modules if module in OF_STEPS]
    command = [
        sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "tests.scheduler.draft_everywhere",
        *(f"tests/scheduler/test_{module}.py" for module in modules),
        *(["-k", f"not ({' or '.join(names)})"] if names else []),
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
    (told,) = re.findall(r"drafted (\d+) tokens, drawn (\d+)", done.stdout)
    drafted, drawn = map(int, told)
    assert drafted > drawn > 1000

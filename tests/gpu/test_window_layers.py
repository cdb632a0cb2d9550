"""Layers that keep their window alone: whatever is cut, packed, begun behind a copy or longer than a ring, logits are
those of transformers, which keeps everything.
"""

import numpy as np
import pytest
import torch

from gpu.kv.pool import KvPool, PoolShape
from gpu.kv.windows import WindowShape
from gpu.model.architecture import read_architecture
from gpu.prefill.window_attention import UnitPart
from gpu.runner import Runner
from gpu.sampling_params import SamplingParams
from gpu.step import DecodeGroup, PageWrite, PrefillJob, PrefillPrompt, StepPlan, WindowBranch, WindowWrite
from tests.gpu.family_checkpoints import PAGE_TOKENS, checkpoint, draw_prompt, load
from tests.gpu.poison import poison_pool
from tests.gpu.reference_model import layer_units, units_without
from tests.gpu.test_families import off
from tests.tolerances import FAMILY_LOGITS

GREEDY = SamplingParams(temperature=0.0)
PAGES = 40  # of a slot
NAME = "gemma3"  # windows of 32 tokens, two pages, and one more


class Stand:
    """A runner with four windows, and the logits that each slot was last drawn from."""

    def __init__(self) -> None:
        self.runner: Runner = load(checkpoint(NAME).folder, num_windows=4, spare_pages=1)
        self.logits: dict[int, torch.Tensor] = {}
        sampler = self.runner._sampler
        sample = sampler.sample

        def recording(logits: torch.Tensor, slots: list[int], samples: list[int]):
            self.logits |= zip(slots, logits.cpu().clone(), strict=True)
            return sample(logits, slots, samples)

        sampler.sample = recording

    def prefill(self, prompts: dict[int, np.ndarray], cut: int, begin: int, windows: list[WindowWrite],
                branch: WindowBranch | None = None, shared: list[int] | None = None,
                leaving: tuple[int, int] | None = None) -> list[int]:  # fmt: skip
        """Whole but for their first `begin` tokens, packed, in units of `cut`; the tokens that are drawn. shared: pages
        of these, or None: those that slot 0 had at the start. leaving: a slot that is released behind so many units.
        """
        shared = list(range(begin // PAGE_TOKENS)) if shared is None else shared
        writes = [
            PageWrite(slot, 0, shared + list(range((slot + 1) * PAGES + len(shared), (slot + 2) * PAGES)))
            for slot in prompts
        ]
        if begin == 0:
            writes = [PageWrite(slot, 0, list(range(PAGES)) if slot == 0 else writes[index].page_ids)
                      for index, slot in enumerate(prompts)]  # fmt: skip
        branches = (branch,) if branch else ()
        job = PrefillJob(0, [PrefillPrompt(slot, prompt, begin, len(prompt), GREEDY, "exact", branches=branches)
                             for slot, prompt in prompts.items()])  # fmt: skip
        num_layers = self.runner.architecture.num_layers
        units = layer_units(job, cut, num_layers)
        if leaving is not None:
            slot, num_units = leaving
            first_units, units = units[:num_units], units_without(job, units[num_units:], slot)
            if job.prompts[0].slot == slot and units[0].layer == 0 and first_units[-1].end <= len(prompts[slot]):
                rest = PrefillJob(0, job.prompts[1:])  # of which nothing is computed
                units = layer_units(rest, cut, num_layers)
            plan = StepPlan(page_writes=writes, window_writes=windows, new_jobs=[job], units=first_units)
            self.runner.launch(plan).collect()
            plan = StepPlan(released_slots=[slot], units=units)
        else:
            plan = StepPlan(page_writes=writes, window_writes=windows, new_jobs=[job], units=units)
        return [token.token_id for token in self.runner.launch(plan).collect().tokens]

    def step(self, slot: int, position: int) -> int:
        plan = StepPlan(decode=[DecodeGroup([slot], [position], [1])])
        return self.runner.launch(plan).collect().tokens[0].token_id


def own(slot: int) -> WindowWrite:
    return WindowWrite(slot + 1, None, slot)


def is_right(stand: Stand, slot: int, tokens: np.ndarray) -> bool:
    return off(stand.logits[slot][None], checkpoint(NAME).logits(tokens)[-1:]) < FAMILY_LOGITS


@pytest.mark.parametrize("cut", [7, 40, 400])
def test_prompts_that_are_packed_and_cut_anywhere_are_as_if_all_were_kept(cut: int) -> None:
    stand, prompts = Stand(), {0: draw_prompt(137), 1: draw_prompt(29)}
    stand.prefill(prompts, cut, 0, [own(0), own(1)])
    assert all(is_right(stand, slot, prompt) for slot, prompt in prompts.items())


@pytest.mark.parametrize(("length", "num_units"), [(29, 2), (29, 5), (29, 8), (60, 1)])
def test_a_prompt_that_is_cut_out_leaves_the_others_their_windows(length: int, num_units: int) -> None:
    """In the last case the next unit is of as many tokens as the last one before, which was of the other prompt."""
    stand, prompts = Stand(), {0: draw_prompt(length), 1: draw_prompt(137)}
    stand.prefill(prompts, 50, 0, [own(0), own(1)], leaving=(0, num_units))
    assert stand.logits.keys() == {1}
    assert is_right(stand, 1, prompts[1])


def test_a_prompt_begins_behind_a_copy_of_a_window_while_the_first_goes_on() -> None:
    stand, first = Stand(), draw_prompt(130)
    tokens = stand.prefill({0: first}, 64, 0, [own(0)])
    stand.runner.launch(StepPlan(window_writes=[WindowWrite(3, 1, None)])).collect()
    for position in range(130, 170):
        tokens.append(stand.step(0, position))
    assert is_right(stand, 0, np.concatenate([first, tokens[:-1]]).astype(np.int32))
    second = np.concatenate([first[:128], draw_prompt(90)])
    stand.prefill({1: second}, 48, 128, [WindowWrite(2, 3, 1)])
    assert is_right(stand, 1, second)
    stand.prefill({1: second}, 48, 128, [WindowWrite(2, 1, 1)])
    assert not is_right(stand, 1, second), "the first one's own window is 40 tokens further by now"


@pytest.mark.parametrize("cut", [7, 40, 400])
def test_a_prompt_leaves_a_window_where_another_one_parts_from_it(cut: int) -> None:
    """It begins behind a copy itself, so near that the branch has some of that."""
    stand, first = Stand(), draw_prompt(75)
    stand.prefill({0: first}, cut, 0, [own(0), WindowWrite(3, 1, None)])
    stand.runner.launch(StepPlan(window_writes=[WindowWrite(3, 1, None)])).collect()
    second = np.concatenate([first[:64], draw_prompt(90)])
    begun = [WindowWrite(2, 3, 1), WindowWrite(0, 3, None)]
    stand.prefill({1: second}, cut, 64, begun, WindowBranch(0, 80))
    assert is_right(stand, 1, second)
    third = np.concatenate([second[:80], draw_prompt(60)])
    stand.prefill({0: third}, cut, 80, [WindowWrite(1, 0, 0)], shared=[*range(4), 2 * PAGES + 4])
    assert is_right(stand, 0, third)
    stand.prefill({0: third}, cut, 80, [WindowWrite(1, 2, 0)], shared=[*range(4), 2 * PAGES + 4])
    assert not is_right(stand, 0, third), "the second one's own window is 74 tokens further"


def test_a_branch_has_its_last_cells_of_each_unit_once() -> None:
    """Cells [32, 80) of a ring of 48, of units that begin anywhere in a chunk of packed prompts."""
    branch = WindowBranch(1, 80)
    for begin, first, context, wanted in (
        (0, 0, 100, (32, 80)),
        (7, 0, 60, (39, 67)),
        (5, 60, 90, (5, 25)),
        (0, 40, 70, (0, 30)),
    ):
        kept = UnitPart(0, begin, begin + context - first, context, branch).branched(48)
        assert (kept.start, kept.stop) == wanted
    for first, context in ((80, 100), (0, 20)):
        kept = UnitPart(0, 0, context - first, context, branch).branched(48)
        assert kept.start >= kept.stop
    assert UnitPart(0, 3, 9, 9, None).branched(48) == slice(3, 3)


def test_a_window_is_copied_whole_and_given_to_its_slot_alone() -> None:
    shape = read_architecture(checkpoint(NAME).folder)
    pool = KvPool(
        shape, PoolShape(8, (), PAGE_TOKENS, 2, 160, torch.float32, WindowShape((0, 1, 3), 3, 2)), torch.device("cpu")
    )
    poison_pool(pool)
    for layer in (0, 1, 3):
        pool.key_pages[layer][2:4] = layer + 1.0
        pool.value_pages[layer][2:4] = -layer - 1.0
    pool.windows.write([WindowWrite(2, 1, 1), WindowWrite(1, None, None)])
    assert pool.table_of(3)[1].tolist() == [4, 5] * 5
    assert pool.table_of(2) is pool.page_table
    assert pool.table_of(0)[0].tolist() == [0, 1] * 5
    for layer in (0, 1, 3):
        assert (pool.key_pages[layer][4:] == layer + 1.0).all()
        assert (pool.value_pages[layer][4:] == -layer - 1.0).all()
        assert pool.key_pages[layer][:2].isnan().all()
    assert [len(pages) for pages in pool.key_pages] == [6, 6, 8, 6]
    with pytest.raises(ValueError, match=r"windows: asked \[0, 3\], have 3"):
        pool.windows.write([WindowWrite(0, 3, None)])

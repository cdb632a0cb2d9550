"""What the last layer of a prompt leaves out changes no drawn token, in all families.

A prompt whose tokens are all scored takes the whole layer, so it is the oracle of one that is not scored.
"""

import numpy as np
import pytest

from gpu.config import GpuConfig, ModelConfig
from gpu.model.architecture import NAMED_SHAPES
from gpu.prefill.row_sizes import pad_indices
from gpu.runner import Runner
from gpu.sampling_params import SamplingParams
from gpu.step import DecodeGroup, PrefillJob, PrefillPrompt, StepPlan, TokenLogprob, WindowWrite
from tests.gpu.reference_model import Pages, layer_units
from tests.gpu.small_runner import load_small
from tests.tolerances import CHUNKING_LOGPROB_ATOL

SHAPES = [name for name in NAMED_SHAPES if name.startswith("tiny")]
LENGTHS = (90, 1, 33, 60)
CHUNK_TOKENS = 24  # one unit has the ends of two prompts, two have one each
ROW_SIZES, PADDED = (1, 3, 8), 3 + 1 + 1


def load(shape: str) -> Runner:
    """Return a runner with a window or a state for each prompt, if the model has any."""
    architecture = NAMED_SHAPES[shape]
    windows = [spec.window_tokens for spec in architecture.layers if spec.window_tokens is not None]
    return load_small(
        ModelConfig(random_weights=shape),
        GpuConfig(device="cpu", dtype="float32", graph_batch_sizes=()),
        chunk_tokens=CHUNK_TOKENS,
        num_windows=len(LENGTHS) if windows or architecture.recurrent is not None else 0,
        window_pages=-(-max(windows, default=1) // 16) + 1,
    )


def launch(runner: Runner, num_prompt_logprobs: int | None) -> tuple[dict[int, int], list[TokenLogprob]]:
    """Return the hidden states that left each layer in prefill, and the logprobs of tokens drawn in two steps."""
    decoder, rows = runner._prefill.decoder, dict[int, int]()
    mlp = decoder.mlp

    def counting(index, hidden, *rest, **named):
        rows[index] = rows.get(index, 0) + len(hidden)
        return mlp(index, hidden, *rest, **named)

    decoder.mlp = counting
    sampling = SamplingParams(temperature=0.0, num_logprobs=0, num_prompt_logprobs=num_prompt_logprobs)
    draw, pages = np.random.default_rng(3), Pages(runner)
    prompts = [
        PrefillPrompt(slot, draw.integers(10, 90, length, dtype=np.int32), 0, length, sampling, "exact")
        for slot, length in enumerate(LENGTHS)
    ]
    job = PrefillJob(1, prompts)
    writes = [pages.take(prompt.slot, len(prompt.token_ids) + 2) for prompt in prompts]
    units = layer_units(job, CHUNK_TOKENS, runner.architecture.main_layers)
    numbered = runner.pool.windows.shape.count or runner.pool.states is not None
    windows = [WindowWrite(slot, None, slot) for slot in range(len(LENGTHS))] if numbered else []
    plan = StepPlan(page_writes=writes, window_writes=windows, new_jobs=[job], units=units)
    first = runner.launch(plan).collect()
    decoder.mlp = mlp
    group = DecodeGroup(list(range(len(LENGTHS))), list(LENGTHS), [1] * len(LENGTHS))
    second = runner.launch(StepPlan(decode=[group])).collect()
    runner.launch(StepPlan(released_slots=list(range(len(LENGTHS))))).collect()
    told = sorted(first.tokens, key=lambda one: one.slot) + sorted(second.tokens, key=lambda one: one.slot)
    return rows, [one.logprob for one in told]


@pytest.mark.parametrize(
    ("shape", "row_sizes"), [*((shape, ROW_SIZES) for shape in SHAPES), *((shape, ()) for shape in SHAPES[:3])]
)
def test_prompts_draw_what_they_draw_where_all_tokens_are_scored(shape: str, row_sizes: tuple[int, ...]) -> None:
    runner = load(shape)
    last = runner.architecture.main_layers - 1
    _, wanted = launch(runner, 0)
    runner._prefill.use_row_sizes(row_sizes)
    rows, got = launch(runner, None)
    np.testing.assert_allclose(
        [one.logprob for one in got], [one.logprob for one in wanted], rtol=0, atol=CHUNKING_LOGPROB_ATOL
    )
    spec = runner.architecture.layers[last]
    is_cut = spec.has_mixer and spec.recurrent is None and last not in runner.pool.windows.shape.layers
    assert rows[last] == ((PADDED if row_sizes else len(LENGTHS)) if is_cut else sum(LENGTHS))


@pytest.mark.parametrize(
    ("indices", "padded"),
    [([], []), ([5], [5]), ([5, 7], [5, 7, 7]), ([1, 2, 3], [1, 2, 3]), ([1, 2, 3, 4], [1, 2, 3, 4, 4, 4, 4, 4]),
     (list(range(9)), list(range(9)))],
)  # fmt: skip
def test_rows_are_padded_by_the_last_one_to_the_least_size_that_holds_them(
    indices: list[int], padded: list[int]
) -> None:
    assert pad_indices(indices, ROW_SIZES).tolist() == padded
    assert pad_indices(indices, ()).tolist() == indices

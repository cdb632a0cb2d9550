"""Fused prompts on a GPU, in bf16, by the engine that serves: all computed again is what dense prefill gives."""

import time
from pathlib import Path

import pytest
import torch

from evals.cells import PromptSettings
from evals.fusion import fusion_engine, judge, parse_policies
from evals.fusion_prompts import PromptPlan, fusion_prompts
from evals.stopping import Stop
from gpu.fusion.chunk_copies import Documents
from gpu.fusion.chunk_rows import store_rows
from tests.gpu.reference_model import FOLDER
from tests.tolerances import FUSED_BFLOAT16_KL
from transfer.chunks.chunk_format import ChunkShape, name_chunk
from transfer.chunks.chunk_library import ChunkLibrary
from transfer.chunks.chunk_store import open_chunks
from transfer.host_config import DocumentsConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
TASKS = ("many_needles", "facts_one_hop")


@pytest.mark.parametrize("rows", ["bfloat16", "int8"])
def test_on_a_gpu_all_tokens_computed_again_are_dense_prefill_and_few_are_near_it(rows: str) -> None:
    prompts = {3000: fusion_prompts(PromptPlan(PromptSettings(FOLDER, "reference", 0, ()), TASKS, 6, 512, None), 3000)}
    runs = parse_policies(["a3", "random", "pie"], [0.15, 1.0])
    with fusion_engine(FOLDER, "cuda", 3100, rows, 512) as engine:
        *_, found = judge(engine, FOLDER, prompts, runs, 1, lambda: None, Stop(None), 2)
        *_, again = judge(engine, FOLDER, prompts, runs, 0, lambda: None, Stop(None), 2)
    first = found[3000]
    for one, other in zip(first, again[3000], strict=True):
        assert one.scores == other.scores
        if one.run.fusion is not None and one.run.fusion.ratio == 1.0:
            assert max(one.divergences) < FUSED_BFLOAT16_KL
            assert one.scores == first[0].scores
    means = {(one.run.label, one.run.fusion.ratio): sum(one.divergences) for one in first if one.run.fusion}
    assert means["a3", 0.15] < means["pie", 0.0], "what the question looks at is recovered"
    assert max(one.distances[0].max() for one in first[1:]) < 2.0


@pytest.mark.parametrize("is_broken", [False, True])
def test_on_a_gpu_codes_that_are_no_numbers_reach_nobody(is_broken: bool, tmp_path: Path) -> None:
    """Kernels write them without a look; the thread that waits for the copies looks."""
    shape = ChunkShape(1, 2, 64, "int8")
    config = DocumentsConfig(folder=tmp_path, rows="int8")
    library = ChunkLibrary(open_chunks(config, 2**24, "0" * 32, shape, is_pinned=True))
    documents, key = Documents(library, torch.device("cuda")), name_chunk([1, 2, 3], shape, "")
    assert not library.hold(key)
    rows = torch.ones(3, 2, 64, device="cuda", dtype=torch.bfloat16)
    rows[1, 1, 3] = torch.inf if is_broken else 2.0
    layers = documents.layers_for(3)
    for part in range(2):
        documents.copy_to_host(store_rows(rows, shape), layers[0, part])
    documents.keep(key, layers)
    end = time.monotonic() + 20
    while not (library.is_refused(key) or library.is_there(key)):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert library.is_refused(key) == is_broken
    assert library.is_there(key) != is_broken
    library.release(key)
    documents.shutdown()

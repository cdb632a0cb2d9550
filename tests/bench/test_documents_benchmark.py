"""The benchmark of prompts with stored documents runs whole on the CPU device; its floors count what is computed."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

import bench.documents
from bench.benchmark_rows import GateError, Row
from bench.cli import app
from bench.documents import DocumentsBenchmark, run_documents_benchmark
from bench.documents_floors import fused_cost, plan_bench_prompt
from gpu.model.architecture import named_shape
from scheduler.fusion_labels import parse_fusions
from scheduler.messages import Fusion
from server.deployment import Deployment
from transfer.chunks.chunk_format import ChunkShape
from transfer.chunks.chunk_store import ChunkStore

TINY = named_shape("tiny")
BENCHMARK = DocumentsBenchmark(
    (700, 1200), ("a3:select_layer=2", "pie"), ("memory", "disk", "memory again"), 0.15, 1, "momo", None
)


def make_deployment(folder: Path, kv: str = "auto") -> Deployment:
    return Deployment.model_validate(
        {
            "model": {"random_weights": "tiny"},
            "gpu": {"device": "cpu", "kv_cache_gib": 0.05, "threads": 1, "kv": kv},
            "documents": {"folder": folder / "chunks", "disk_limit_gib": 0.1, "memory_limit_gib": 0.1},
            "profiles": {"momo": {"prefill": {"method": "momo", "dense_until_tokens": 256}}},
            "scheduler": {"max_running": 2, "max_context_tokens": 2048},
        }
    )


def run(benchmark: DocumentsBenchmark, folder: Path) -> tuple[str, list[list[Row]]]:
    """What was printed, and the rows after each part."""
    printed = io.StringIO()
    reported = [
        list(rows) for rows in run_documents_benchmark(benchmark, make_deployment(folder), Console(file=printed))
    ]
    return printed.getvalue(), reported


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> list[list[Row]]:
    return run(BENCHMARK, tmp_path_factory.mktemp("documents"))[1]


def test_what_is_most_wanted_is_measured_first(reported: list[list[Row]]) -> None:
    a3 = "a3:select_layer=2"
    assert [(row.name, row.shape) for row in reported[-1]] == [
        ("selection", "64 over 700"),
        ("selection", "64 over 1,200"),
        *(
            (name, shape)
            for length in ("700", "1,200")
            for name, shape in (
                ("vanilla", f"{length} tokens"), (a3, f"{length} tokens, memory"), ("pie", f"{length} tokens, memory"),
            )
        ),
        *(
            (f"{a3}, {what}", f"{length} tokens, memory")
            for length in ("700", "1,200")
            for what in ("profile momo", "next turn")
        ),
        *(
            (name, f"{length} tokens, {place}")
            for place in ("disk", "memory again")
            for length in ("700", "1,200")
            for name in (a3, "pie")
        ),
    ]  # fmt: skip
    counts = [len(rows) for rows in reported]
    assert counts == sorted(counts), "each part leaves what was before it"
    assert len(counts) == 9


def test_peers_are_the_whole_prompt(reported: list[list[Row]]) -> None:
    rows = {(row.name, row.shape): row for row in reported[-1]}
    for (name, shape), row in rows.items():
        if name not in ("selection", "vanilla"):
            assert row.peer_ms == rows["vanilla", shape.split(",")[0] if "1,200" not in shape else "1,200 tokens"].ms
            assert row.floor_ms is not None


def test_what_one_prompt_has_read_from_files_is_in_memory_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a policy that asks for a part of it."""
    found: list[int] = []
    finish_reads = ChunkStore.finish_reads

    def finish(store: ChunkStore) -> None:
        finish_reads(store)
        found.append(store.bytes_in_memory // store.folder.shape.chunk_bytes(512))

    monkeypatch.setattr(ChunkStore, "finish_reads", finish)
    run(replace(BENCHMARK, lengths=(1200,), policies=("a3:select_layer=2",), places=("memory again",)), tmp_path)
    assert found[-1] == 2


def test_nothing_begins_when_the_time_is_over_and_what_was_measured_is_told(tmp_path: Path) -> None:
    printed, reported = run(replace(BENCHMARK, lengths=(700,), seconds=1e-3), tmp_path)
    assert [[row.name for row in rows] for rows in reported] == [["selection"]]
    assert "--seconds 0.001 are over" in printed


def test_a_chunk_that_is_not_what_was_computed_gives_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.documents._Bench, "_answer", lambda self, *asked: [len(asked[1])])
    with pytest.raises(GateError, match="first token of a whole prefill"):
        run(replace(BENCHMARK, lengths=(700,)), tmp_path)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--policies", "a4"], "unknown policy 'a4'"),
        (["--policies", "a3:layer=1"], "unknown setting 'layer'"),
        (["--policies", "vanilla"], "got 'vanilla'; wanted one that reuses chunks, as 'a3'"),
        (["--places", "tape"], "wanted some of memory, memory again"),
        (["--lengths", "64"], "got 64; wanted at least 608"),
        (["--profile", "fast"], "unknown profile 'fast'"),
    ],
)
def test_what_cannot_be_measured_is_one_line(options: list[str], wanted: str, tmp_path: Path) -> None:
    config = tmp_path / "documents.yaml"
    tree = make_deployment(tmp_path).model_dump(mode="json", exclude_unset=True)
    config.write_text(json.dumps(tree))
    ended = CliRunner().invoke(app, ["documents", str(config), "--lengths", "700", "--repeats", "1", *options])
    assert ended.exit_code in (1, 2)
    assert wanted in " ".join((ended.output + ended.stderr).replace("│", " ").split())


def cost(label: str, ratio: float, num_chunks: int) -> tuple[float, int]:
    (fusion,) = parse_fusions(label, [ratio])
    return cost_of(fusion, num_chunks)


def cost_of(fusion: Fusion | None, num_chunks: int) -> tuple[float, int]:
    num_tokens = 32 + 64 + 512 * num_chunks
    plan = None if fusion is None else plan_bench_prompt(fusion, 32, num_chunks, 512, num_tokens, TINY)
    shape = ChunkShape(TINY.num_layers, TINY.num_kv_heads, TINY.dim, "bfloat16")
    return fused_cost(TINY, num_tokens, plan, shape, 512 * num_chunks)


def test_floors_count_the_layers_in_full_what_is_chosen_and_the_rows_that_are_loaded() -> None:
    whole, no_bytes = cost_of(None, 4)
    assert no_bytes == 0
    weights = 2.0 * (TINY.num_layers * TINY.num_layer_weights * 2144 + TINY.num_embedding_weights)
    pairs = 2.0 * TINY.num_layers * TINY.num_heads * TINY.dim * 2144**2
    assert whole == weights + pairs
    layer_bytes = 2 * 2 * TINY.num_kv_heads * TINY.dim * 2048
    assert cost("pie", 0.0, 4)[1] == TINY.num_layers * layer_bytes
    assert cost("a3:select_layer=1", 0.15, 4)[1] == (TINY.num_layers - 2) * layer_bytes
    assert cost("a3:select_layer=3", 0.15, 4)[1] == (TINY.num_layers - 4) * layer_bytes
    flops = [cost(label, ratio, 4)[0] for label, ratio in (
        ("pie", 0.0), ("a3", 0.05), ("a3", 0.15), ("a3:select_layer=2", 0.15)
    )]  # fmt: skip
    assert [*flops, whole] == sorted([*flops, whole])

"""Serving profiles end to end: through the engine in this process and a server, scored and compared with attention."""

import json
import math
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from evals.cells import Cell, PromptSettings
from evals.cli import app
from evals.distributions import divergence
from evals.end_to_end import Said, compare_profile, ids_of_texts
from evals.forward import load_decoder
from evals.meter import Fractions
from evals.score_rows import FRACTIONS, summarize
from evals.serving import DecodeRequest, load_serving_engine, make_deployment
from evals.session import InProcess, run
from gpu.config import Composition
from gpu.methods.registry import list_shares
from gpu.profiles import ProfileError
from server.deployment import load_deployment
from tests.end_to_end.real_server import running_server
from tests.tolerances import METHOD_FLOAT32

MODEL = Path("deploy/models/reference")
SETTINGS = PromptSettings(MODEL, "reference", 0, ())


def test_the_exact_profile_answers_as_full_attention_does(tmp_path: Path) -> None:
    cells = [Cell("needle", 256, 4, ("full", "profile:exact"), 0)]
    records = run(cells, SETTINGS, InProcess("cpu", 4, 0, tmp_path), None)
    full, served = ([one.prediction for one in records if one.cell["method"] == name] for name in cells[0].methods)
    assert sorted(full) == sorted(served)
    rows = summarize(records)
    assert [row["method"] for row in rows] == ["full", "profile:exact"]
    assert rows[1]["difference"] == 0
    assert {rows[1][name] for name in FRACTIONS} == {1.0}
    assert {rows[1][name] for name in list_shares()} == {None}, "no method has a part in it"
    assert {one.key for one in run(cells, SETTINGS, InProcess("cpu", 4, 0, tmp_path), None)} == {
        one.key for one in records
    }


def test_a_prompt_that_the_engine_refuses_is_a_failure_and_its_neighbours_are_not() -> None:
    asks = [DecodeRequest("long", [7] * 20_000, 4, [], None), DecodeRequest("short", [0, 3, 9], 4, [], None)]
    with load_serving_engine(MODEL, "cpu", 64, None) as engine:
        answers = {answer.key: answer for answer in engine.answer(asks, "exact")}
    assert answers["long"].failure
    assert answers["short"].failure is None
    assert len(answers["short"].token_ids) == 4


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A deployment whose contexts leave the device at once."""
    path = tmp_path / "tier.yaml"
    sampled = {"bits_per_table": 4, "num_tables": 40}
    host = {"memory_limit_gib": 0.25, "threads": 1, "resident_tokens": 0, "residency": "fixed"} | {"sampled": sampled}
    tree = {"model": {"random_weights": "elsewhere"}, "gpu": {"kv_cache_gib": 0.5, "threads": 1}, "host": host}
    path.write_text(json.dumps(tree))
    return path


def test_profiles_of_the_host_tier_run_where_the_deployment_has_one(tmp_path: Path, config: Path) -> None:
    out = tmp_path / "out.json"
    names = ["exact", "offloaded", "sampled"]
    command = ["tasks", "--model", str(MODEL), "--device", "cpu", "--tasks", "needle", "--lengths", "512", "--samples",
               "3", "--config", str(config), "--json", str(out), "--resume", str(tmp_path / "store")]  # fmt: skip
    result = CliRunner().invoke(app, [*command, *(word for name in names for word in ("--method", f"profile:{name}"))])
    assert result.exit_code == 0, result.output
    document = json.loads(out.read_text())
    assert document["configuration"]["config"] == str(config)
    exact, offloaded, sampled = document["rows"]
    assert [row["head_fraction_all_layers"] for row in (exact, offloaded)] == [1.0, 1.0]
    assert (offloaded["failures"], sampled["failures"]) == (0, 0)
    assert offloaded["difference"] == 0, "all of it is read"
    records = [json.loads(line) for line in (tmp_path / "store" / "records.jsonl").read_text().splitlines()]
    told = {record["cell"]["method"]: record["cell"]["settings"] for record in records}
    assert told["profile:exact"]["composition"] == "host: exact", "the same in every deployment"
    assert "bits=4 tables=40" in told["profile:sampled"]["kv_key"], "another deployment is another record"


def test_fidelity_sees_profiles_of_the_host_tier(tmp_path: Path, config: Path) -> None:
    out = tmp_path / "fidelity.json"
    command = ["fidelity", "--model", str(MODEL), "--device", "cpu", "--lengths", "256", "--samples", "1", "--forced",
               "4", "--method", "profile:offloaded", "--config", str(config), "--json", str(out)]  # fmt: skip
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    _, row = json.loads(out.read_text())["rows"]
    assert (row["agreement"], row["agreement_generated"], row["failures"]) == (1.0, 1.0, 0)


def test_a_profile_says_what_it_read_and_dense_layers_count_in_full(config: Path) -> None:
    """Two of the reference model's twelve layers are dense; of 2,300 tokens 16 in front and a window are resident."""
    prompt = torch.randint(8, 8000, (2300,), generator=torch.Generator().manual_seed(0)).tolist()
    found = {}
    with load_serving_engine(MODEL, "cpu", 2400, load_deployment(config)) as engine:
        for profile in ("exact", "offloaded", "sampled"):
            before = engine.reads()
            (answer,) = engine.answer([DecodeRequest("one", prompt, 4, [], None)], profile)
            assert answer.failure is None
            reads, found[profile] = engine.reads() - before, engine.fractions(before, profile)
            assert reads.context_tokens == 2301 + 2302 + 2303, "the first token is the prompt's own"
            down = 0 if profile == "exact" else (2300 - 64) // 16 * 16 - 16
            assert reads.host_tokens == 3 * down * 10 * 8, "three steps, ten layers, eight heads"
    assert found["exact"] == Fractions(1.0, 1.0, 1.0, 1.0)
    assert found["offloaded"] == Fractions(1.0, 1.0, 1.0, 1.0, read=1.0)
    sampled = found["sampled"]
    assert sampled.read == reads.host_keys / (3 * down * 10 * 2), "each head reads what it samples, of two KV heads"
    assert 0.05 < sampled.head_handled < 0.95
    assert sampled.bytes_handled > sampled.head_handled, "four heads of a group read apart"
    assert sampled.head_all == pytest.approx((10 * sampled.head_handled + 2) / 12)
    assert sampled.bytes_all == pytest.approx((10 * sampled.bytes_handled + 2) / 12)


def test_profiles_of_the_host_tier_want_a_deployment(config: Path) -> None:
    method = ["--method", "profile:sampled", "--device", "cpu"]
    result = CliRunner().invoke(app, ["tasks", "--model", str(MODEL), *method])
    assert result.exit_code == 1
    assert "--method profile:sampled: keeps KV in host memory; give --config a deployment" in result.stderr
    url = ["--url", "http://127.0.0.1:1/v1", "--config", str(config)]
    result = CliRunner().invoke(app, ["tasks", "--model", str(MODEL), *method, *url])
    assert result.exit_code == 1
    assert "leave out --url or --config" in result.stderr
    result = CliRunner().invoke(app, ["tasks", "--model", str(MODEL), *method, "--config", "nowhere.yaml"])
    assert result.exit_code == 1
    assert "config: nowhere.yaml is missing" in result.stderr


def test_unknown_profiles_are_named_with_those_that_exist() -> None:
    result = CliRunner().invoke(app, ["tasks", "--model", str(MODEL), "--method", "profile:none", "--device", "cpu"])
    assert result.exit_code == 1
    assert "unknown profile 'none'; known: exact" in result.stderr
    assert issubclass(ProfileError, ValueError)


def test_fidelity_sees_a_profile_from_outside_in_process_and_on_a_server(tmp_path: Path) -> None:
    out, page = tmp_path / "fidelity.json", tmp_path / "page.html"
    command = [
        "fidelity",
        "--model",
        str(MODEL),
        "--device",
        "cpu",
        "--lengths",
        "128",
        "--samples",
        "1",
        "--forced",
        "4",
    ]
    both = [*command, "--method", "profile:exact"]
    inside = CliRunner().invoke(app, [*both, "--method", "topk:budget=0.2", "--json", str(out), "--html", str(page)])
    assert inside.exit_code == 0, inside.output
    document = json.loads(out.read_text())
    assert [row["method"] for row in document["rows"]] == ["full", "profile:exact", "topk:budget=0.2"]
    assert {row["method"] for row in document["layers"]} == {"topk:budget=0.2"}
    assert "Error a layer" in page.read_text()
    assert "Beside full attention" in page.read_text()
    with running_server(tmp_path, {}) as server:
        server.wait_until_healthy()
        outside = CliRunner().invoke(app, [*both, "--url", f"{server.url}/v1", "--json", str(out)])
    assert outside.exit_code == 0, outside.output
    full, profile, _ = document["rows"]
    for row in (profile, json.loads(out.read_text())["rows"][1]):
        assert (row["agreement"], row["agreement_generated"], row["failures"]) == (1.0, 1.0, 0)
        assert row["perplexity"] == pytest.approx(full["perplexity"], rel=METHOD_FLOAT32)
        assert abs(row["kl"]) < METHOD_FLOAT32
        assert row["tokens_generated"] > 0
    assert profile["head_fraction"] == 1.0
    assert json.loads(out.read_text())["rows"][1]["head_fraction"] is None, "of a server it is not known"


def test_failed_texts_count_as_not_agreeing() -> None:
    decoder = load_decoder(MODEL, torch.device("cpu"), torch.float32)
    texts = [[0, 5, 6, 7, 8], [0, 9, 10, 11, 12]]
    row = compare_profile(decoder, texts, "profile:x", {}, lambda *_: [Said([], [], [], "no")] * 2, 2, lambda: None)
    assert (row["failures"], row["agreement"], row["agreement_generated"]) == (2, 0.0, 0.0)
    assert math.isnan(row["kl"])


def test_divergence_over_listed_tokens_bounds_the_whole_one_from_below() -> None:
    draw = torch.Generator().manual_seed(0)
    full, mine = (torch.randn(50, generator=draw, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    whole = float((full.exp() * (full - mine)).sum())
    assert divergence(full, dict(enumerate(mine.tolist()))) == pytest.approx(whole, abs=METHOD_FLOAT32)
    part = divergence(full, {token: float(mine[token]) for token in mine.topk(10).indices.tolist()})
    assert 0 < part < whole


def test_tokens_are_known_by_texts_that_only_they_have() -> None:
    ids = ids_of_texts(MODEL)
    assert len(ids) > 8000
    assert len(set(ids.values())) == len(ids)


def test_a_profile_that_reuses_says_how_much_it_took_over() -> None:
    reuse = {"method": "mac", "capacity": 64, "band": 32, "min_context_tokens": 0, "tau": 0.3,
             "max_prefix_share": 1.0, "rings": 2}  # fmt: skip
    profiles = {"mac": Composition.model_validate({"reuse": reuse})}
    settings = make_deployment(MODEL, "cpu", 700, None).model_copy(update={"profiles": profiles})
    prompt = torch.randint(8, 8000, (500,), generator=torch.Generator().manual_seed(0)).tolist()
    with load_serving_engine(MODEL, "cpu", 700, settings) as engine:
        before = engine.reads()
        (answer,) = engine.answer([DecodeRequest("one", prompt, 40, [], None)], "mac")
        assert answer.failure is None
        reads, found = engine.reads() - before, engine.fractions(before, "mac")
        assert engine.settings_of("mac")["kv_key"].startswith("mac tau=0.3")
    assert sum(reads.methods["reuse_tries"]) == 12 * 8 * 39
    acceptance, skipped = found.shares["acceptance"], found.shares["skipped_fraction"]
    assert 0 < skipped < acceptance < 1
    assert found.head_all == pytest.approx(1 - skipped, abs=1e-9)


def test_weights_and_rows_are_those_of_the_deployment_and_are_said() -> None:
    plain = make_deployment(MODEL, "cpu", 64, None)
    model, gpu = plain.model.model_copy(update={"weights": "int4"}), plain.gpu.model_copy(update={"kv": "int8"})
    prompt, found, told = list(range(8, 40)), [], []
    for settings in (plain, plain.model_copy(update={"model": model}), plain.model_copy(update={"gpu": gpu})):
        with load_serving_engine(MODEL, "cpu", 64, settings) as engine:
            (answer,) = engine.answer([DecodeRequest("one", prompt, 4, [], 0)], "exact")
            found.append([logprob.logprob for logprob in answer.prompt_logprobs + answer.logprobs])
            told.append(engine.settings_of("exact"))
    exact = {"composition": "host: exact", "kv_key": "exact"}
    assert told == [exact, exact | {"weights": "int4"}, exact | {"kv": "int8"}]
    assert all(max(abs(a - b) for a, b in zip(found[0], other, strict=True)) > 1e-3 for other in found[1:])


def test_an_index_that_is_the_default_is_judged_without_dense_layers_as_it_is_served(config: Path) -> None:
    settings = load_deployment(config)
    assert settings.host is not None
    assert settings.host.dense_layers is None
    scheduler = settings.scheduler.model_copy(update={"default_profile": "indexed"})
    settings = settings.model_copy(update={"scheduler": scheduler, "profiles": {}})
    with load_serving_engine(MODEL, "cpu", 64, settings) as engine:
        assert " dense= " in engine.settings_of("indexed")["kv_key"]

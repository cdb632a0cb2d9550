"""Cells under serving profiles: which engine runs what, answers scored and counted, what a run that is cut keeps."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from evals.cells import Cell
from evals.distributions import NUM_TOP
from evals.meter import Fractions
from evals.run import AGREEMENT, Prompt
from evals.samples import Sample
from evals.score_rows import FRACTIONS, summarize
from evals.served import run_profiles
from evals.served_method import group_by_deployment, served_method
from evals.serving import Answer, DecodeRequest, make_deployment
from evals.stopping import RunCut
from evals.store import Ledger, Record
from gpu.config import Composition, ModelConfig
from gpu.profiles import ProfileError, resolve_profiles
from scheduler.engine_config import SchedulerConfig
from scheduler.messages import Logprob
from server.deployment import Deployment
from tests.evals.test_run import MODEL, SETTINGS
from tests.gpu.toy_method import add_toy
from transfer.host_config import HostConfig
from transfer.reading import Reading

SAMPLED = "profile:sampled:bits_per_table=10,num_tables="
DEPLOYMENT = Deployment(model=ModelConfig(path=MODEL), host=HostConfig(resident_tokens=0))
SHAPE = SimpleNamespace(name="tiny", eos_token_ids=(1,))
READ = Fractions(0.25, 0.5, 0.375, 0.6)
LAYERS = {"acceptance": [0.5, 0.25]}


class Texts:
    """A tokenizer whose ids are code points."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return "".join(map(chr, ids))


@dataclass
class FakeEngine:
    """Answers prompt n with its right answer, but number 1 wrongly, and fails number 2."""

    answers: list[str]
    asked: list[tuple[str, list[int]]] = field(default_factory=list)
    applied: bool | None = True

    def settings_of(self, profile: str) -> dict[str, str]:
        return {"host": "settings"}

    def reads(self) -> str:
        return "before"

    def fractions(self, before: str, profile: str) -> Fractions | None:
        return READ if before == "before" else None

    def did_apply(self, before: str, profile: str, longest_tokens: int) -> bool | None:
        assert longest_tokens == 1
        return self.applied

    def layers(self, before: str, profile: str) -> dict[str, list[float]]:
        return LAYERS if before == "before" else {}

    def answer(self, asks: Sequence[DecodeRequest], profile: str) -> Iterator[Answer]:
        for ask in asks:
            self.asked.append((profile, ask.stop_token_ids))
            number = ask.token_ids[0]
            if number == 2:
                yield Answer(ask.key, failure="too long by far")
            else:
                yield Answer(ask.key, token_ids=[ord(one) for one in ("9" if number == 1 else self.answers[number])])


def make_ledger(records: dict[str, Record], cut_after: int | None = None) -> Ledger:
    def put(record: Record) -> None:
        records[record.key] = record

    def check() -> None:
        if cut_after is not None and len(records) >= cut_after:
            raise RunCut("enough")

    return Ledger(records, lambda _: None, put, put, check, lambda _: None)


def answer_cell(ledger: Ledger, count: int, profiles: Mapping[str, str] | None = None) -> FakeEngine:
    answers = ["1234567", "7654321", "3", "4"][:count]
    prompts = [
        Prompt(
            Sample("needle", str(n), f"prompt {n}", [answer], "string_match_all", 8, 4, None), np.array([n], np.int32)
        )
        for n, answer in enumerate(answers)
    ]
    engine: Any = FakeEngine(answers)
    named = profiles or {"profile:x": "x"}
    cell = Cell("needle", 256, count, tuple(named), 0)
    shape: Any = SHAPE
    run_profiles(engine, Texts(), shape, [(cell, prompts)], named, SETTINGS, ledger, None)
    return engine


def test_answers_are_scored_and_failures_counted_with_what_was_read() -> None:
    records: dict[str, Record] = {}
    engine = answer_cell(make_ledger(records), 4)
    assert [one.score for one in records.values()] == [1.0, 0.0, 0.0, 1.0]
    assert [one.failure for one in records.values()] == [None, None, "too long by far", None]
    assert engine.asked == [("x", [1])] * 4
    (row,) = summarize(records.values())
    assert (row["samples"], row["failures"], row["score"]) == (4, 1, 50.0)
    assert row["reasons"] == {"too long by far": 1}
    read = READ.to_json()
    assert {name: row[name] for name in FRACTIONS} == dict.fromkeys(FRACTIONS) | read
    assert [one.measured for one in records.values() if one.failure] == [{}], "nothing is known of a failure"


def test_answers_that_are_compared_say_their_kl_from_full_attention() -> None:
    """Three tokens, the last of them a stop token; full attention parts with the profile at the second."""

    class Choosing(FakeEngine):
        def answer(self, asks: Sequence[DecodeRequest], profile: str) -> Iterator[Answer]:
            assert [(ask.max_new_tokens, ask.num_top) for ask in asks] == [(16, NUM_TOP)]
            said = [Logprob(math.log(0.5), [(token, math.log(0.5)), (3, math.log(0.5))]) for token in (7, 8, 1)]
            yield Answer(asks[0].key, token_ids=[7, 8], logprobs=said)

    fed: list[list[int]] = []

    def exact(prompt: list[int], tokens: list[int]) -> torch.Tensor:
        fed.append(tokens)
        shares = torch.full((3, 10), 1e-30, dtype=torch.float64)
        shares[0, 7], shares[1, 3], shares[2, 1] = 1, 1, 1
        return shares.log()

    records: dict[str, Record] = {}
    prompts = [Prompt(Sample("vt", "0", "prompt", ["x"], "string_match_all", 8, 4, None), np.array([5], np.int32))]
    engine, shape = Choosing([]), SHAPE
    for _ in range(2):
        cell = Cell("vt", 256, 1, ("profile:x",), 16)
        arguments: Any = (engine, Texts(), shape, [(cell, prompts)], {"profile:x": "x"}, SETTINGS,
                          make_ledger(records), exact)  # fmt: skip
        run_profiles(*arguments)
    (record,) = records.values()
    assert fed == [[7, 8, 1]], "once: the record is kept"
    assert record.cell["metric"] == AGREEMENT
    assert record.score == pytest.approx(2 / 3), "the first of two that are level is said to be the likeliest"
    assert record.measured["kl"] == pytest.approx(math.log(2), abs=1e-6)
    (row,) = summarize([record])
    assert row["kl"] == record.measured["kl"]


def test_a_cell_that_is_cut_keeps_its_answers_and_what_they_read() -> None:
    records: dict[str, Record] = {}
    with pytest.raises(RunCut):
        answer_cell(make_ledger(records, cut_after=2), 4)
    assert [one.measured for one in records.values()] == [READ.to_json() | {"applied": 1.0}] * 2
    assert [one.layers for one in records.values()] == [LAYERS] * 2
    engine = answer_cell(make_ledger(records), 4)
    assert len(engine.asked) == 2, "those that were answered are not asked again"
    assert len(records) == 4


def test_profiles_take_turns_so_that_a_cell_that_is_cut_has_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evals.served.IN_TURNS", 2)
    records: dict[str, Record] = {}
    both = {"profile:x": "x", "profile:y": "y"}
    with pytest.raises(RunCut):
        answer_cell(make_ledger(records, cut_after=5), 4, both)
    assert [(one.cell["method"], one.sample_id) for one in records.values()] == [
        ("profile:x", "0"), ("profile:x", "1"), ("profile:y", "0"), ("profile:y", "1"), ("profile:x", "2")
    ]  # fmt: skip
    answer_cell(make_ledger(records), 4, both)
    assert len(records) == 8


def test_settings_in_a_methods_name_make_their_own_deployment() -> None:
    found = served_method(SAMPLED + "200", DEPLOYMENT)
    assert found.deployment.host.sampled.num_tables == 200
    assert found.deployment.host.resident_tokens == 0
    assert served_method("topk:budget=0.1", DEPLOYMENT) is None
    groups = group_by_deployment(["profile:exact", SAMPLED + "150", SAMPLED + "200", "profile:sampled"], DEPLOYMENT)
    assert [sorted(members.values()) for _, members in groups] == [["exact", "sampled", "sampled"], ["sampled"]]
    (alone,) = group_by_deployment(["profile:exact"], None)
    assert alone == (None, {"profile:exact": "exact"})


def test_a_setting_that_is_one_of_several_numbers_is_read_as_a_number() -> None:
    named = {"near": Composition.model_validate({"host": {"method": "indexed"}})}
    found = served_method(
        "profile:near:key_bits=3,budget_share=0.02", DEPLOYMENT.model_copy(update={"profiles": named})
    )
    settings = found.profile.host_part.settings
    assert (settings.key_bits, settings.budget_share) == (3, 0.02)


def test_settings_of_the_host_section_are_taken_beside_the_methods_own() -> None:
    named = {"near": Composition.model_validate({"host": {"method": "indexed"}})}
    deployment = DEPLOYMENT.model_copy(update={"profiles": named})
    found = served_method("profile:near:budget_share=0.02,dense_layers=none", deployment)
    assert found.deployment.host == deployment.host.model_copy(update={"dense_layers": ()})
    assert found.profile.host_part.settings.budget_share == 0.02
    assert " dense= " in found.profile.kv_key
    wanted = {"near:dense_layers=0+15": (0, 15), "sampled:dense_layers=3": (3,), "offloaded:dense_layers=none": ()}
    for name, layers in wanted.items():
        assert served_method(f"profile:{name}", deployment).deployment.host.dense_layers == layers
    assert served_method("profile:near:rows=int4,window_tokens=128", deployment).deployment.host.rows == "int4"
    groups = group_by_deployment(["profile:exact", "profile:near", "profile:near:dense_layers=none"], deployment)
    assert [len(members) for _, members in groups] == [2, 1]


def test_settings_of_a_named_profile_are_those_of_all_that_share_them() -> None:
    named = {"careful": Composition.model_validate({"host": {"method": "sampled", "num_tables": 150}})}
    whole = {"whole": Composition.model_validate({"host": "offloaded"})}
    deployment = DEPLOYMENT.model_copy(update={"profiles": named | whole})
    found = served_method("profile:careful:num_tables=40", deployment)
    assert (found.profile.name, found.profile.reading) == ("careful", Reading.SAMPLE)
    profiles = resolve_profiles(found.deployment.profiles, found.deployment.host)
    assert "tables=40" in profiles["careful"].kv_key
    assert profiles["careful"].kv_key == profiles["sampled"].kv_key
    assert profiles["whole"].parts == profiles["offloaded"].parts
    (alone,) = group_by_deployment(["profile:exact", "profile:whole", "profile:careful"], deployment)
    assert sorted(alone[1].values()) == ["careful", "exact", "whole"]


def test_settings_that_a_profile_has_for_itself_change_that_profile_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_toy(tmp_path, monkeypatch, "prefill", Reading.NONE)
    toys = {name: Composition.model_validate({"prefill": "toy"}) for name in ("one", "other")}
    deployment = DEPLOYMENT.model_copy(update={"profiles": toys})
    found = served_method("profile:one:size=8", deployment)
    profiles = resolve_profiles(found.deployment.profiles, found.deployment.host)
    assert [profiles[name].kv_key for name in toys] == ["toy size=8", "toy size=3"]
    groups = group_by_deployment(["profile:one:size=8", "profile:one", "profile:sampled", "profile:exact"], deployment)
    assert [sorted(members) for _, members in groups] == [
        ["profile:exact", "profile:one", "profile:sampled"],
        ["profile:one:size=8"],
    ]


@pytest.mark.parametrize(("method", "told"), [
    ("profile:exact:num_tables=3", "profile 'exact' takes no settings; leave out `:num_tables=3`"),
    ("profile:sampled:tables=3", "tables: unknown key"),
    ("profile:exact:dense_layers=none", "profile 'exact' takes no settings"),
    ("profile:sampled:dense_layers=half", r"host.dense_layers(\.0)?: Input should be a valid integer"),
    ("profile:sampled:threads=2", "threads: unknown key"),
    ("profile:sampled:num_tables=1", "num_tables: Input should be greater than or equal to 2"),
])  # fmt: skip
def test_settings_that_a_profile_has_not_are_refused(method: str, told: str) -> None:
    with pytest.raises(ProfileError, match=told):
        served_method(method, DEPLOYMENT)


def test_a_deployment_for_a_run_holds_its_prompts_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    roomy = SimpleNamespace(memory_bytes=128 * 2**30)
    monkeypatch.setattr("evals.serving.probe_machine", lambda: roomy)
    short, long = (make_deployment(MODEL, "cuda", tokens, HostConfig(resident_tokens=0)) for tokens in (4096, 16384))
    assert short.scheduler.max_running == long.scheduler.max_running == 32
    assert short.host.memory_limit_gib is not None
    assert long.host.memory_limit_gib is not None
    assert 2.0 < long.host.memory_limit_gib / short.host.memory_limit_gib < 4.0
    roomy.memory_bytes = 2**30
    few = make_deployment(MODEL, "cuda", 16384, HostConfig(resident_tokens=0))
    assert few.scheduler.max_running == 2, "half of the memory, 0.23 GiB a prompt"
    assert json.loads(few.model_dump_json())["host"]["resident_tokens"] == 0
    assert Path(str(few.model.path)) == MODEL


def test_a_default_profile_that_no_profile_names_is_a_method_and_takes_settings() -> None:
    deployment = DEPLOYMENT.model_copy(update={"profiles": {}, "scheduler": SchedulerConfig(default_profile="indexed")})
    found = served_method("profile:indexed", deployment)
    assert found is not None
    assert (found.profile.name, found.deployment) == ("indexed", deployment)
    varied = served_method("profile:indexed:budget_share=0.05", deployment)
    assert varied is not None
    assert "budget_share 0.05" in varied.profile.composition

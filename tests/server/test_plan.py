"""A resolved plan: complete, stable, and possible for a machine and a model that are not here."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from gpu.config import Composition, ModelConfig
from gpu.memory.plan import PlanError
from gpu.methods.registry import list_methods
from gpu.model.architecture import ModelError, load_architecture, named_shape
from gpu.model.humming_formats import products_key
from gpu.model.matrix_formats import widened_bytes
from server.commands.plan_page import describe_plan, describe_token, print_plan
from server.deployment import Deployment, load_deployment
from server.planning.deployment_plan import find_architecture, resolve_plan
from server.planning.placements import compare_placements
from server.planning.resolved_plan import ResolvedPlan
from tests.gpu.family_checkpoints import CONFIGS, SIZES
from tests.gpu.toy_method import add_toy
from transfer.machine import GIB, load_machine
from transfer.machine_rates import find_rates
from transfer.reading import Reading

DEPLOY = Path(__file__).parents[2] / "deploy"
PAIRS = [("laptop", "laptop"), ("reference", "laptop"), ("rtx4090", "rtx4090"), ("rtx4090-32b", "rtx4090"),
         ("rtx4090-30b-a3b", "rtx4090"), ("a100", "a100-80g"), ("gpt-oss-20b-16g", "rtx4090"),
         ("gpt-oss-20b-24g", "rtx4090"), ("gpt-oss-120b", "rtx4090"),
         ("gemma-4-26b-a4b-24g", "rtx4090"), ("glm-4.7-flash-24g", "rtx4090"), ("qwen3.5-27b-24g", "rtx4090"),
         ("qwen3.5-35b-a3b-24g", "rtx4090"), ("nemotron-3-nano-30b-a3b-24g", "rtx4090")]  # fmt: skip


def plan_recorded(config: str, machine: str) -> ResolvedPlan:
    return resolve_plan(
        load_deployment(DEPLOY / f"{config}.yaml"), load_machine(DEPLOY / "machines" / f"{machine}.json")
    )


@pytest.mark.parametrize(("config", "machine"), PAIRS)
def test_a_shipped_configuration_fits_its_recorded_machine(config: str, machine: str) -> None:
    plan = plan_recorded(config, machine)
    for place, limit in plan.memory.limit_bytes.items():
        assert 0 < plan.memory.used_bytes(place) <= limit
    assert plan.memory.max_context_tokens - plan.memory.resident_tokens >= 8192
    if plan.deployment.host is None:
        assert plan.memory.num_pages * plan.memory.page_tokens >= plan.memory.max_context_tokens


@pytest.mark.parametrize(("config", "machine"), PAIRS)
def test_resolving_twice_changes_nothing(config: str, machine: str) -> None:
    once = plan_recorded(config, machine)
    twice = resolve_plan(once.deployment, once.machine)
    assert twice.deployment == once.deployment
    assert twice.memory.items == once.memory.items


@pytest.mark.parametrize(
    ("family", "changes", "gpu", "kv"),
    [
        ("deepseek_v3", {}, {}, ("bfloat16", "float32")),  # latents have no rows in halves
        ("deepseek_v3", {}, {"kv": "bfloat16"}, ("bfloat16", "float32")),
        ("deepseek_v3", {}, {"kv": "int8"}, ("int8", "int8")),
        ("llama2", {}, {}, ("bfloat16", "float32")),  # heads of 16
        ("llama2", {"head_dim": 64}, {}, ("bfloat16", "bfloat16")),
        ("llama2", {"head_dim": 64}, {"dtype": "float32"}, ("float32", "float32")),
    ],
)
def test_resolving_twice_changes_nothing_of_a_model_that_drafts(
    family: str, changes: dict[str, int], gpu: dict[str, str], kv: tuple[str, str], tmp_path: Path
) -> None:
    draft = SIZES | CONFIGS[family] | {"vocab_size": named_shape("tiny").vocab_size} | changes
    (tmp_path / "config.json").write_text(json.dumps(draft))
    tree = {
        "model": {"random_weights": "tiny"},
        "gpu": {"device": "cpu"} | gpu,
        "profiles": {"drafting": {"draft": {"model": str(tmp_path)}}},
    }
    laptop = load_machine(DEPLOY / "machines" / "laptop.json")
    once = resolve_plan(Deployment.model_validate(tree), laptop)
    twice = resolve_plan(Deployment.model_validate(once.deployment.model_dump(mode="json")), laptop)
    for plan in (once, twice):
        assert plan.memory.draft is not None
        assert (plan.memory.kv, plan.memory.draft.kv) == kv
    assert twice.deployment == once.deployment
    assert twice.memory.items == once.memory.items


@pytest.mark.parametrize(("config", "machine"), PAIRS)
def test_resolving_leaves_nothing_of_the_machine_open(config: str, machine: str) -> None:
    deployment = plan_recorded(config, machine).deployment
    assert deployment.gpu.device in ("cuda", "cpu")
    assert deployment.gpu.dtype in ("bfloat16", "float32")
    assert None not in (deployment.gpu.memory_limit_gib, deployment.gpu.kv_cache_gib, deployment.gpu.threads)
    assert None not in (deployment.scheduler.max_context_tokens, deployment.scheduler.prefill.max_hidden_tokens)
    assert deployment.model.name


def test_a_layer_to_choose_in_that_the_model_has_not_is_refused_and_a_default_behind_its_last_one_is_that_one() -> None:
    laptop = load_machine(DEPLOY / "machines" / "laptop.json")

    def select_layer(**documents: int) -> int:
        tree = {"model": {"random_weights": "tiny"}, "documents": documents}
        plan = resolve_plan(Deployment.model_validate(tree), laptop)
        again = Deployment.model_validate(plan.deployment.model_dump(mode="json"))
        assert resolve_plan(again, laptop).deployment.documents == plan.deployment.documents
        return plan.deployment.documents.select_layer

    assert (select_layer(), select_layer(select_layer=2), select_layer(select_layer=3)) == (3, 2, 3)
    with pytest.raises(PlanError, match=r"documents\.select_layer: asked 4, the model has layers 0 to 3; name one"):
        select_layer(select_layer=4)


@pytest.mark.parametrize(("documents", "is_told"), [({}, True), ({"policy": "vanilla"}, False), ({"ratio": 1}, False)])
def test_a_plan_tells_what_fused_documents_cost_in_quality(documents: dict[str, object], is_told: bool) -> None:
    tree = {"model": {"random_weights": "tiny"}, "documents": documents}
    plan = resolve_plan(Deployment.model_validate(tree), load_machine(DEPLOY / "machines" / "laptop.json"))
    assert any("lose 3 points with 3 chunks and 11 with 9" in note for note in plan.notes) == is_told


def test_the_asked_limit_is_the_limit() -> None:
    plan = plan_recorded("rtx4090", "rtx4090")
    assert plan.memory.limit_bytes["gpu"] == int(22.5 * GIB)


@pytest.mark.parametrize(("config", "machine"), PAIRS)
def test_described_bytes_add_up_to_what_is_used(config: str, machine: str) -> None:
    tree = json.loads(json.dumps(describe_plan(plan_recorded(config, machine))))
    for place, sums in tree["memory"]["places"].items():
        items = [item["bytes"] for item in tree["memory"]["items"] if item["place"] == place]
        assert sum(items) == sums["used_bytes"] <= sums["limit_bytes"]


def test_printing_names_every_item_and_note() -> None:
    plan = plan_recorded("rtx4090", "rtx4090")
    page = io.StringIO()
    print_plan(plan, Console(width=200, file=page))
    text = page.getvalue()
    for item in plan.memory.items:
        assert item.name in text
    for note in plan.notes:
        assert note[:60] in text


def test_a_host_tier_is_described_with_the_bytes_of_a_token() -> None:
    assert describe_plan(plan_recorded("reference", "laptop"))["host"] is None
    plan = plan_recorded("rtx4090", "rtx4090")
    host = describe_plan(plan)["host"]
    assert host["sampled_token_bytes"] > host["offloaded_token_bytes"] >= 30 * 8 * 2 * 128
    assert host["tokens"] * host["sampled_token_bytes"] <= plan.memory.host_limit_bytes
    assert host["tokens"] >= plan.memory.max_context_tokens == plan.architecture.max_context_tokens
    down_tokens = plan.memory.max_context_tokens - host["sink_tokens"] - host["window_tokens"]
    assert host["longest_table_bytes"] > down_tokens * 30 * 8 * 150 * 2
    assert host["longest_bytes"] > host["longest_table_bytes"] + down_tokens * 30 * 8 * 2 * 128
    page = io.StringIO()
    print_plan(plan, Console(width=500, file=page))
    assert f"{host['longest_table_bytes'] / 2**30:.2f} of them hash tables" in page.getvalue()
    assert f"{host['sampled_token_bytes']:,} bytes a token with hash tables" in page.getvalue()
    assert f"{host['tokens']:,} tokens with hash tables fit" in page.getvalue()


def test_each_profile_is_shown_with_what_it_is_made_of_and_its_longest_context() -> None:
    deployment = load_deployment(DEPLOY / "rtx4090-32b.yaml")
    named = {"whole": Composition.model_validate({"host": "offloaded"})}
    plan = resolve_plan(
        deployment.model_copy(update={"profiles": named}), load_machine(DEPLOY / "machines/rtx4090.json")
    )
    profiles = json.loads(json.dumps(describe_plan(plan)))["profiles"]
    assert profiles.keys() >= {"exact", "offloaded", "sampled", "whole"}
    assert profiles["whole"] == profiles["offloaded"]
    assert profiles["sampled"]["composition"] == "host: sampled (bits_per_table 10, num_tables 150)"
    in_pages = plan.memory.num_pages * plan.memory.page_tokens
    assert profiles["exact"]["longest_tokens"] == in_pages < plan.memory.max_context_tokens
    assert profiles["sampled"]["longest_tokens"] == plan.memory.max_context_tokens
    page = io.StringIO()
    print_plan(plan, Console(width=200, file=page))
    rows = [[cell.strip() for cell in line.split("│")] for line in page.getvalue().splitlines()]
    for name, profile in profiles.items():
        assert ["", name, profile["composition"], f"{profile['longest_tokens']:,}", ""] in rows


def test_a_methods_state_for_what_runs_is_in_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_toy(tmp_path, monkeypatch, "reuse", Reading.NONE)
    tree = {
        "model": {"random_weights": "tiny"},
        "scheduler": {"max_running": 7},
        "profiles": {"x": {"reuse": {"method": "toy", "size": 5_000_000}}},
    }
    plan = resolve_plan(Deployment.model_validate(tree), load_machine(DEPLOY / "machines" / "laptop.json"))
    (state,) = [item for item in plan.memory.items if item.name == "state of toy"]
    assert state.bytes == 7 * 5_000_000 * plan.architecture.num_layers
    page = io.StringIO()
    print_plan(plan, Console(width=200, file=page))
    assert f"{state.bytes / GIB:.3f}" in next(line for line in page.getvalue().splitlines() if "state of toy" in line)


def test_what_a_method_keeps_beyond_what_was_asked_for_is_noted_with_the_profile_that_has_it() -> None:
    def notes(host: dict[str, int], **profiles: dict[str, str]) -> list[str]:
        tree = {
            "model": {"random_weights": "tiny"},
            "host": {"memory_limit_gib": 0.1, **host},
            "profiles": profiles,
            "scheduler": {"max_running": 2, "max_context_tokens": 16_384},
        }
        plan = resolve_plan(Deployment.model_validate(tree), load_machine(DEPLOY / "machines" / "laptop.json"))
        again = resolve_plan(plan.deployment, plan.machine)
        assert again.memory.own_windows == plan.memory.own_windows
        assert again.memory.resident_tokens == plan.memory.resident_tokens
        page = io.StringIO()
        print_plan(plan, Console(width=200, file=page))
        found = [note for note in plan.notes if " in place of " in note]
        assert page.getvalue().count(" in place of ") == len(found)
        return found

    small = {"window_tokens": 60, "resident_tokens": 1030}
    assert notes(small) == [], "rounded up to whole pages"
    window = "profiles.quick: a window of 1,280 tokens in place of 64: 'mac' needs it"
    resident = ", and contexts of up to 1,424, not 1,040, stay on the device"
    quick = {"reuse": "mac", "host": "offloaded"}
    assert notes(small, plain={"host": "sampled"}, quick=quick) == [window + resident]
    assert notes({"window_tokens": 60}, quick=quick) == [window]
    assert notes({"window_tokens": 1280}, quick=quick) == []
    front = "host.sink_tokens: 112 in place of 4: 'mac' of the profile 'deep' needs 100"
    deep = {"reuse": {"method": "mac", "sink_tokens": 100, "capacity": 16, "band": 16}, "host": "offloaded"}
    block = "host.resident_tokens: 304 in place of 0: 112 in front, a window of 64 and 128 that are offloaded at once"
    assert notes({"resident_tokens": 0}, deep=deep) == [front, block]


@pytest.mark.parametrize(
    ("machine", "profile", "is_slower"),
    [
        ("laptop", {"host": "sampled"}, True),
        ("laptop", {"host": {"method": "predicted", "weights": "predictor.safetensors"}}, True),
        ("laptop", {"prefill": "momo"}, True),
        ("laptop", {"host": "offloaded"}, False),
        ("rtx4090", {"host": "sampled"}, False),
    ],
)
def test_profiles_that_gain_nothing_on_the_cpu_device_are_named(machine: str, profile: dict, is_slower: bool) -> None:
    tree = {
        "model": {"random_weights": "tiny"}, "profiles": {"own": profile},
        "host": {"memory_limit_gib": 0.1}, "scheduler": {"max_running": 2, "max_context_tokens": 16_384},
    }  # fmt: skip
    plan = resolve_plan(Deployment.model_validate(tree), load_machine(DEPLOY / "machines" / f"{machine}.json"))
    (told, *more) = [note for note in plan.notes if "for demonstration only" in note] or [""]
    assert not more
    assert ("own" in told.split(":")[0].removeprefix("profiles ").split(", ")) == is_slower
    assert "exact" not in told.split(":")[0]
    assert ("sampled" in told) == (machine == "laptop")


@pytest.mark.parametrize("host", ["indexed", "toy"])
def test_a_method_without_figures_of_a_cpu_is_not_said_to_be_slower(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_toy(tmp_path, monkeypatch, "host", Reading.BLOCKS)
    tree = {
        "model": {"random_weights": "tiny"}, "profiles": {"own": {"host": host}, "deep": {"prefill": "momo"}},
        "host": {"memory_limit_gib": 0.1}, "scheduler": {"max_running": 2, "max_context_tokens": 16_384},
    }  # fmt: skip
    plan = resolve_plan(Deployment.model_validate(tree), load_machine(DEPLOY / "machines" / "laptop.json"))
    (told,) = [note for note in plan.notes if "for demonstration only" in note]
    named = told.split(":")[0].removeprefix("profiles ").split(", ")
    assert {"deep", "sampled"} == {*named}
    assert "momo took 53 s for a prompt of 3,072 tokens (dense: 29)" in told
    assert "sampled took 290 ms a token at 5,900 tokens (exact: 60)" in told
    assert "predicted" not in told


@pytest.mark.parametrize(("slot", "reading", "is_told"), [("host", Reading.BLOCKS, True), ("reuse", Reading.NONE, True),
                                                         ("host", Reading.WHOLE, False)])  # fmt: skip
def test_a_method_that_nobody_judged_is_told_to_be_so(
    slot: str, reading: Reading, is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_toy(tmp_path, monkeypatch, slot, reading)
    tree = {
        "model": {"random_weights": "tiny"}, "profiles": {"own": {slot: "toy"}},
        "host": {"memory_limit_gib": 0.1}, "scheduler": {"max_running": 2, "max_context_tokens": 16_384},
    }  # fmt: skip
    plan = resolve_plan(Deployment.model_validate(tree), load_machine(DEPLOY / "machines" / "rtx4090.json"))
    (told, *more) = [note for note in plan.notes if "not judged on a pretrained model" in note] or [""]
    assert not more
    own = "toy, own" if slot == "host" else "own"  # a host method is a profile by its own name, too
    wanted = f"toy (profile {own}): not judged on a pretrained model; `tandem eval tasks` measures one"
    assert told == (wanted if is_told else "")


def test_methods_that_read_less_than_everything_are_told_with_what_they_lost() -> None:
    tree = {
        "model": {"random_weights": "tiny"}, "host": {"memory_limit_gib": 0.1},
        "profiles": {"near": {"reuse": "mac"}, "both": {"reuse": "mac", "host": "offloaded"}},
        "scheduler": {"max_running": 2, "max_context_tokens": 16_384},
    }  # fmt: skip
    plan = resolve_plan(Deployment.model_validate(tree), load_machine(DEPLOY / "machines" / "rtx4090.json"))
    told = [note for note in plan.notes if "SmolLM2-135M-Instruct" in note]
    assert [note.partition(":")[0] for note in told] == ["sampled (profile sampled)", "mac (profile near, both)"]
    assert "loses 9.4 points" in told[0]


def test_every_method_reads_everything_or_says_what_it_lost() -> None:
    for method in list_methods().values():
        reads_all = method.slot == "host" and (method.reading is Reading.NONE or method.reading is Reading.WHOLE)
        assert bool(method.measured) != reads_all, method.name


def test_api_keys_are_counted_and_not_shown() -> None:
    tree = {"model": {"random_weights": "tiny"}, "server": {"api_keys": ["secret-1", "secret-2"]}}
    plan = resolve_plan(Deployment.model_validate(tree), load_machine(DEPLOY / "machines" / "laptop.json"))
    text = json.dumps(describe_plan(plan))
    assert "secret" not in text
    assert "2 keys" in text


def test_a_folder_that_is_there_decides_over_the_named_shape(tmp_path: Path) -> None:
    reference = DEPLOY / "models" / "reference"
    with pytest.raises(ModelError, match=r"model\.shape: tiny has"):
        find_architecture(ModelConfig(path=reference, shape="tiny"))
    for path in (reference, tmp_path / "no"):
        with pytest.raises(ModelError, match=r"^model\.shape: unknown shape 'huge'; known: .*\btiny, "):
            find_architecture(ModelConfig(path=path, shape="huge"))
    architecture, notes = find_architecture(ModelConfig(path=reference))
    assert architecture.vocab_size == 8192
    assert notes == ()


def test_what_is_planned_is_the_shape_that_is_loaded(tmp_path: Path) -> None:
    config = json.loads((DEPLOY / "models" / "reference" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"of_nobodys": 1}))
    positions = config["max_position_embeddings"]
    model = ModelConfig(
        path=tmp_path, ignore_config_keys=("of_nobodys",),
        rope={"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": positions},
    )  # fmt: skip
    architecture, _ = find_architecture(model)
    assert architecture == load_architecture(model)
    assert architecture.max_context_tokens == 2 * positions


def test_a_missing_folder_is_an_error_without_a_shape_and_a_note_with_one(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is missing"):
        find_architecture(ModelConfig(path=tmp_path / "no"))
    architecture, notes = find_architecture(ModelConfig(path=tmp_path / "no", shape="llama-3.1-8b"))
    assert architecture == named_shape("llama-3.1-8b")
    assert "serving needs the folder" in notes[0]


def test_a_named_shape_is_planned_with_the_rotation_that_the_folder_would_be_served_with(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    architecture, _ = find_architecture(ModelConfig(path=tmp_path / "no", shape="qwen2.5-32b", rope=rope))
    assert architecture.max_context_tokens == 131_072
    assert architecture.rope.kind == "yarn"


def test_random_weights_turn_as_the_deployment_asks() -> None:
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 262_144}
    model = ModelConfig(random_weights="tiny", rope=rope)
    architecture, _ = find_architecture(model)
    assert architecture.max_context_tokens == 524_288
    assert load_architecture(model) == architecture
    with pytest.raises(ModelError, match="tiny"):
        find_architecture(ModelConfig(random_weights="tiny", rope={"rope_type": "spiral"}))


def test_the_shipped_plans_hold_what_the_pages_about_them_say() -> None:
    small, large = plan_recorded("rtx4090", "rtx4090").memory, plan_recorded("rtx4090-32b", "rtx4090").memory
    assert small.max_context_tokens == large.max_context_tokens == 131_072
    assert round(small.num_pages * small.page_tokens / 1000) == 192, "deploy/rtx4090.yaml and docs/HOST_MEMORY.md"
    weights = next(item.bytes for item in large.items if item.name == "weights")
    assert round(weights / GIB, 1) == 17.4, "deploy/rtx4090-32b.yaml"
    assert large.host_tokens >= large.max_context_tokens


def test_who_multiplies_is_planned_as_it_is_loaded_and_noted_where_it_is_not_all() -> None:
    model = ModelConfig.model_validate({"random_weights": "llama-3.1-8b", "weights": "int4", "products": "humming"})
    architecture, notes = find_architecture(model)
    assert architecture == load_architecture(model)
    assert notes[-1] == "model.products: humming, but for output matrix: logits are float32"
    own, notes = find_architecture(model.model_copy(update={"products": "own"}))
    assert own != architecture
    assert not any("humming" in note for note in notes)


def test_tokens_in_fp8_are_planned_without_widened_matrices_and_where_no_matrix_takes_them_refused() -> None:
    model = ModelConfig.model_validate({"random_weights": "llama-3.1-8b", "weights": "fp8", "products": "fp8"})
    architecture, notes = find_architecture(model)
    assert architecture == load_architecture(model)
    assert notes[-1] == "model.products: fp8, but for output matrix: logits are float32"
    assert widened_bytes(architecture, 2) == 0
    own, _ = find_architecture(model.model_copy(update={"products": "own"}))
    assert widened_bytes(own, 2) > 0
    assert {products_key(shape, "cuda", True) for shape in (own, architecture)} == {"", "fp8"}
    with pytest.raises(ModelError, match=r"asked fp8, which multiplies none .*numbers of int4"):
        find_architecture(model.model_copy(update={"weights": "int4"}))


def test_a_gemma4_in_4_bits_has_contexts_of_128k_on_24_gib() -> None:
    plan = plan_recorded("gemma-4-26b-a4b-24g", "rtx4090").memory
    assert (plan.max_context_tokens, plan.num_windows, plan.experts_on_card) == (131_072, 16, None)
    assert plan.num_pages * plan.page_tokens > 2 * plan.max_context_tokens


def test_a_gemma4s_contexts_and_documents_are_kept_where_they_can_be_or_refused_by_name() -> None:
    """Heads of 512 are read by no host tier, and chunks of layers that differ are not kept."""
    deployment = load_deployment(DEPLOY / "gemma-4-26b-a4b-24g.yaml").model_dump(mode="json")
    machine = load_machine(DEPLOY / "machines" / "rtx4090.json")
    for beside, words in (
        ({"host": {"memory_limit_gib": 8}}, "host: .* has heads of 512, 8 to a KV head; the host reads heads of 64"),
        ({"documents": {"folder": "chunks"}}, "documents: layers with a window have KV heads of their own in"),
    ):
        with pytest.raises(PlanError, match=words):
            resolve_plan(Deployment.model_validate(deployment | beside), machine)


@pytest.mark.parametrize(
    ("name", "weights", "kib", "mib", "states"),
    [
        ("qwen3.5-27b-24g", 15.5, 32.5, 152, 4),
        ("qwen3.5-35b-a3b-24g", 17.9, 10.2, 64, 8),
        ("nemotron-3-nano-30b-a3b-24g", 16.3, 3.1, 48, 10),
    ],
)
def test_hybrids_in_4_bits_hold_what_their_files_say(
    name: str, weights: float, kib: float, mib: int, states: int
) -> None:
    plan, said = plan_recorded(name, "rtx4090").memory, (DEPLOY / f"{name}.yaml").read_text()
    took = {item.name: item.bytes for item in plan.items}
    assert f"Weights take {weights} GiB" in said
    assert round(took["weights"] / GIB, 1) == weights
    assert f"A token takes {kib} KiB" in said
    assert round(took["KV pages"] / (plan.num_pages * plan.page_tokens) / 1024, 1) == kib
    assert f"a state of {mib} MiB" in " ".join(said.replace("#", "").split())
    assert round(plan.window_bytes / 2**20) == mib
    assert plan.num_windows == states
    assert took["recurrent states"] == states * plan.window_bytes


@pytest.mark.parametrize(("name", "context", "taken"), [
    ("qwen3.5-27b-24g", 90_112, "indexed"), ("qwen3.5-35b-a3b-24g", 131_072, "offloaded"),
])  # fmt: skip
def test_host_memory_holds_contexts_of_a_model_with_states(name: str, context: int, taken: str, tmp_path: Path) -> None:
    """Its recurrent layers have no pages, so none of them keeps a context on the card."""
    deployment = load_deployment(DEPLOY / f"{name}.yaml").model_dump(mode="json") | {"host": {}}
    machine = load_machine(DEPLOY / "machines" / "rtx4090.json")
    given = Deployment.model_validate(deployment)
    plan = resolve_plan(given, machine)
    assert plan.memory.max_context_tokens == context
    assert plan.deployment.default_profile == taken
    found = compare_placements(given, plan, find_rates(machine, tmp_path / "none"))
    assert found.get("offloaded").most_contexts == 2
    assert found.taken == taken
    assert found.get("indexed").most_contexts == (1 if taken == "indexed" else 0)


def test_documents_of_a_model_with_states_are_refused_by_name() -> None:
    deployment = load_deployment(DEPLOY / "qwen3.5-27b-24g.yaml").model_dump(mode="json")
    machine = load_machine(DEPLOY / "machines" / "rtx4090.json")
    with pytest.raises(PlanError, match="documents: layers are recurrent, and the state behind a chunk"):
        resolve_plan(Deployment.model_validate(deployment | {"documents": {"folder": "chunks"}}), machine)


def test_rows_of_latents_are_counted_and_what_knows_keys_and_values_alone_is_refused() -> None:
    """As the file says of itself."""
    plan = plan_recorded("glm-4.7-flash-24g", "rtx4090")
    weights, said = plan.memory.items[0].bytes / GIB, (DEPLOY / "glm-4.7-flash-24g.yaml").read_text()
    assert describe_token(plan) == {"device": 47 * 1152}
    assert f"Weights take {weights:.1f} GiB." in said
    assert f"hold {plan.memory.num_pages * plan.memory.page_tokens // 1000}K tokens" in said
    machine = load_machine(DEPLOY / "machines" / "rtx4090.json")
    tree = {"model": {"random_weights": "glm-4.7-flash", "weights": "int4"},
            "gpu": {"device": "cuda", "memory_limit_gib": 23}, "scheduler": {"max_running": 4}}  # fmt: skip
    coded = resolve_plan(Deployment.model_validate(tree | {"gpu": tree["gpu"] | {"kv": "int8"}}), machine)
    assert describe_token(coded) == {"device": 47 * (512 + 64 + 8)}
    profile = {"profiles": {"own": {"reuse": {"method": "mac"}}}}
    for beside, words in (
        ({"host": {"memory_limit_gib": 8}}, "host: glm-4.7-flash keeps one row of 512 \\+ 64 numbers a token, "),
        ({"documents": {"folder": "chunks"}}, "documents: a token leaves a latent row, not keys and values in"),
        (profile, "profiles: 'mac' reads keys and values of heads"),
        ({"profiles": {"own": {"prefill": {"method": "momo"}}}}, "profiles: 'momo' reads keys and values of heads"),
    ):
        with pytest.raises(PlanError, match=words):
            resolve_plan(Deployment.model_validate(tree | beside), machine)


def test_a_mixture_in_mxfp4_has_most_experts_in_host_memory_and_the_cpu_computes_them() -> None:
    """As the file says of itself; 45 GiB of experts and the copies of their biases leave room in 64."""
    plan = plan_recorded("gpt-oss-120b", "rtx4090").memory
    said = (DEPLOY / "gpt-oss-120b.yaml").read_text()
    assert f"keeps {plan.experts_on_card} of its 128 experts" in said
    (note,) = [note for note in plan.notes if note.startswith("experts in host memory are computed")]
    assert "in decode steps of up to 2 rows: by rates 31.9 ms a token" in note
    assert "31.9 ms" in said
    biases = next(item for item in plan.items if item.name == "experts' biases")
    assert (biases.place, biases.bytes) == ("host", 36 * 100 * 3 * 2880 * 4)
    assert plan.used_bytes("host") < 48 * 2**30


@pytest.mark.parametrize(("max_running", "contexts"), [(1, 1), (3, 3), (64, 4)])
def test_without_a_card_the_limit_is_what_the_contexts_that_run_want(max_running: int, contexts: int) -> None:
    tree = {"model": {"random_weights": "tiny"}, "gpu": {"device": "cpu"},
            "scheduler": {"max_running": max_running, "max_context_tokens": 8192}}  # fmt: skip
    laptop = load_machine(DEPLOY / "machines" / "laptop.json")
    plan = resolve_plan(Deployment.model_validate(tree), laptop)
    memory = plan.memory
    assert memory.num_pages * memory.page_tokens == contexts * memory.max_context_tokens
    assert memory.limit_bytes["host"] == memory.used_bytes("host") < laptop.memory_bytes // 4
    assert any("memory is limited to what" in note for note in plan.notes)
    again = resolve_plan(plan.deployment, laptop)
    assert (again.deployment, again.memory.items) == (plan.deployment, memory.items)
    more = resolve_plan(Deployment.model_validate(tree | {"gpu": {"device": "cpu", "memory_limit_gib": 4}}), laptop)
    assert more.memory.num_pages > memory.num_pages

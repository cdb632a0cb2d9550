"""Profiles are compositions of methods: which there are, which can be named, which are refused and in what words."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

import gpu.methods
from gpu.config import Composition, DraftConfig, GpuConfig
from gpu.memory.plan import MemoryPlan, MemoryRequest, PlannedSizes, plan_memory
from gpu.methods.kept import Kept
from gpu.methods.registry import list_methods
from gpu.model.architecture import named_shape
from gpu.profiles import (
    Profile,
    ProfileError,
    add_by_name,
    find_kept,
    get_profile,
    list_states,
    resolve_profiles,
    served_parts,
    why_unknown,
)
from tests.gpu.toy_method import add_toy
from transfer.host_config import ErrorsConfig, HostConfig, SampledConfig
from transfer.machine import load_machine
from transfer.reading import Reading

HOST = HostConfig()
LAPTOP = Path(__file__).parents[2] / "deploy" / "machines" / "laptop.json"

# Methods of two slots, and those of them that are profiles of their own names.
HOSTS = [name for name, method in list_methods().items() if method.slot == "host"]
REUSES = [name for name, method in list_methods().items() if method.slot == "reuse"]
BUILT_IN = [name for name in HOSTS if not list_methods()[name].has_rings]


def resolve(named: dict[str, Any], host: HostConfig | None = HOST) -> dict[str, Profile]:
    return resolve_profiles({name: Composition.model_validate(tree) for name, tree in named.items()}, host)


# --- what there is ----------------------------------------------------------------------------------------------------


def test_what_may_draft_and_what_is_refused_says_why() -> None:
    profiles = resolve_profiles(
        {"fast": Composition(draft="ngram"), "own": Composition(draft={"most_tokens": 3})}, None
    )
    assert profiles["fast"].draft == DraftConfig()
    assert profiles["own"].draft == DraftConfig(most_tokens=3)
    assert profiles["fast"].kv_key == profiles["exact"].kv_key, "they share prefixes"
    assert "draft: ngram" in profiles["fast"].composition
    assert profiles["exact"].draft is None
    with pytest.raises(ProfileError, match=r"profiles\.fast\.draft: is not served with 'mac': .* set min_gap to 8 and"):
        resolve_profiles({"fast": Composition(draft="ngram", reuse={"method": "mac"})}, None)
    reuse = {"method": "mac", "min_gap": 8, "max_gap": 1016}
    assert resolve_profiles({"fast": Composition(draft="ngram", reuse=reuse)}, None)["fast"].ring_parts
    verified = Composition(host="offloaded", draft={"profile": "indexed"}, reuse=reuse)
    with pytest.raises(ProfileError, match=r"is not served with 'mac': a sequence that holds a ring for drafts"):
        resolve_profiles({"fast": verified}, HostConfig())
    for host in ("offloaded", "sampled", "indexed"):
        fast = Composition(draft="ngram", host={"method": host})
        assert resolve_profiles({"fast": fast}, HostConfig())["fast"].draft == DraftConfig()
    errors = HostConfig(sampled=SampledConfig(errors=ErrorsConfig()))
    with pytest.raises(ProfileError, match=r"fast\.draft: is not served with 'sampled': host\.sampled\.errors chooses"):
        resolve_profiles({"fast": Composition(draft="ngram", host="sampled")}, errors)
    for wrong in ("ngrams", {"source": "ngram", "least_match": 1}, {"modle": "x"}, 7):
        with pytest.raises(ValidationError):
            Composition(draft=wrong)


def test_a_profile_may_reuse_over_an_index_of_what_is_in_host_memory() -> None:
    index = {"method": "indexed", "min_context_tokens": 0}
    both = resolve_profiles({"both": Composition(reuse="mac", host=index)}, HostConfig())["both"]
    assert [part.method.name for part in both.ring_parts] == ["mac", "indexed"]
    assert both.held_parts == both.ring_parts
    assert both.reading is Reading.INDEXED
    predicted = {"method": "predicted", "weights": "some.safetensors"}
    for resident in ("indexed", "auto"):
        with pytest.raises(ProfileError, match=rf"'indexed' is not served with 'mac': .*{resident}.*; set `resident:"):
            resolve_profiles({"both": Composition(reuse="mac", host=index | {"resident": resident})}, HostConfig())
    with pytest.raises(ProfileError, match="'mac' is not served with 'predicted'"):
        resolve_profiles({"both": Composition(reuse="mac", host=predicted)}, HostConfig())


def test_a_profile_may_draft_for_another_that_reads_the_same_context() -> None:
    named = {
        "rough": Composition(host={"method": "indexed", "budget_share": 0.002}),
        "fast": Composition(host="offloaded", draft={"profile": "rough", "most_tokens": 3}),
    }
    profiles = resolve_profiles(add_by_name(named, "verified"), HostConfig())
    fast, verified = profiles["fast"], profiles["verified"]
    assert fast.draft_part == profiles["rough"].host_part
    assert verified.draft_part is not None
    assert verified.draft_part.method.name == "indexed"
    assert verified.ring_parts == ()
    assert verified.held_parts == (verified.draft_part,)
    assert {fast.kv_key, verified.kv_key} == {profiles["offloaded"].kv_key}, "what is kept is what verifies wrote"
    assert verified.reading is Reading.WHOLE
    assert verified.composition == "host: offloaded, draft: indexed"
    assert set(served_parts([verified])) == {verified.host_part, verified.draft_part}, "its memory is planned"


@pytest.mark.parametrize(
    ("composition", "why"),
    [
        (
            {"host": "offloaded", "draft": {"profile": "sampled"}},
            "'sampled' does not draft for others: .* no hash tables in host memory; want",
        ),
        (
            {"host": "offloaded", "draft": {"profile": "index"}},
            "'index' is no profile that drafts for others; wanted inde",
        ),
        (
            {"host": "offloaded", "draft": {"profile": "predicted+sampled"}},
            "does not draft for others: .* no hash tables",
        ),
        ({"host": "offloaded", "draft": {"profile": "exact"}}, "'exact' does not draft for others: it reads no less"),
        ({"host": "offloaded", "draft": {"profile": "mac"}}, "'mac' does not draft for others: it keeps no context"),
        ({"draft": {"profile": "indexed"}}, "'exact' has none there; set `host: offloaded`"),
        ({"host": "indexed", "draft": {"profile": "indexed"}}, "a sequence that holds a ring for drafts steps"),
    ],
)
def test_a_profile_that_cannot_draft_is_refused(composition: dict[str, object], why: str) -> None:
    with pytest.raises(ProfileError, match=rf"profiles\.fast\.draft.*{why}"):
        resolve_profiles({"fast": Composition.model_validate(composition)}, HostConfig())


@pytest.mark.parametrize(
    ("composition", "why"),
    [
        ({"host": "indexed"}, ""),
        ({"host": {"method": "indexed", "errors": {"epsilon": 0.1}}}, ""),
        ({"host": {"method": "indexed", "errors": {"audit_steps": 0}}}, "has no audits, by which bounds are set"),
        ({"host": "indexed", "draft": {}}, "has drafts, and budgets would follow errors of tokens that are not drawn"),
        ({"host": "indexed", "reuse": "mac"}, "takes over attention of earlier queries, whose errors nothing bounds"),
        ({"host": "offloaded"}, "bounds no error of a step"),
        ({"host": "sampled"}, "bounds no error of a step"),
    ],
)
def test_a_profile_takes_a_requests_epsilon_only_where_an_index_is_audited(
    composition: dict[str, object], why: str
) -> None:
    profile = resolve_profiles({"own": Composition.model_validate(composition)}, HostConfig())["own"]
    assert profile.why_no_epsilon.startswith(why)
    assert bool(profile.why_no_epsilon) is bool(why)


def test_verified_is_there_where_somebody_names_it() -> None:
    assert "verified" not in resolve_profiles({}, HostConfig())
    assert "name it as scheduler.default_profile" in why_unknown("verified", ["exact"])
    with pytest.raises(ProfileError, match="this deployment has no `host` section"):
        resolve_profiles(add_by_name({}, "verified"), None)
    with pytest.raises(ValidationError, match="least_match: is set together with `profile`"):
        DraftConfig(profile="indexed", least_match=4)


def test_the_methods_of_the_slot_host_are_profiles_of_their_own_names() -> None:
    profiles = resolve({})
    assert list(profiles) == BUILT_IN
    known = {name: profiles[name] for name in ("exact", "offloaded", "sampled")}
    assert {name: (one.offloads, one.reading) for name, one in known.items()} == {
        "exact": (False, Reading.NONE),
        "offloaded": (True, Reading.WHOLE),
        "sampled": (True, Reading.SAMPLE),
    }
    assert [one.composition for one in known.values()] == [
        "host: exact",
        "host: offloaded",
        "host: sampled (bits_per_table 10, num_tables 150)",
    ]


def test_without_a_host_section_nothing_is_offloaded() -> None:
    assert list(resolve({}, None)) == ["exact"]


def test_a_composition_reads_as_its_methods_do() -> None:
    profiles = resolve({"careful": {"host": "sampled"}, "whole": {"host": {"method": "offloaded"}}, "plain": {}})
    assert list(profiles)[3:] == ["careful", "whole", "plain"]
    for name, built_in in (("careful", "sampled"), ("whole", "offloaded"), ("plain", "exact")):
        one, other = profiles[name], profiles[built_in]
        assert (one.offloads, one.reading, one.composition) == (
            other.offloads,
            other.reading,
            other.composition,
        )


def test_a_profile_that_leaves_a_shared_setting_out_has_that_of_the_host_section() -> None:
    host = HostConfig(sampled=SampledConfig(bits_per_table=9, num_tables=120))
    profiles = resolve({"all": {"host": "sampled"}, "one": {"host": {"method": "sampled", "num_tables": 120}}}, host)
    assert [profiles[name].parts for name in ("all", "one")] == [profiles["sampled"].parts] * 2


def test_listing_profiles_needs_no_torch() -> None:
    code = (
        "import sys, gpu.profiles, gpu.step; from transfer.host_config import HostConfig; "
        "gpu.profiles.resolve_profiles({}, HostConfig()); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- what is refused --------------------------------------------------------------------------------------------------


def test_an_unknown_profile_is_refused_with_the_list() -> None:
    with pytest.raises(ProfileError, match=r"^attention_profile: unknown profile 'exakt'; known: exact$"):
        get_profile("exakt", resolve({}, None), "attention_profile")
    with pytest.raises(ProfileError, match=rf"unknown profile 'exakt'; known: {', '.join(BUILT_IN)}, mine$"):
        get_profile("exakt", resolve({"mine": {}}), "attention_profile")


@pytest.mark.parametrize("name", ["offloaded", "sampled"])
def test_a_profile_of_the_host_tier_is_refused_where_there_is_none(name: str) -> None:
    wanted = f"^attention_profile: '{name}' keeps KV in host memory; this deployment has no `host` section$"
    with pytest.raises(ProfileError, match=wanted):
        get_profile(name, resolve({}, None), "attention_profile")


REFUSED = [
    ("sampled", {}, "profiles.sampled: is built in and cannot be changed; choose another name"),
    (
        "x",
        {"host": "sampeld"},
        f"profiles.x.host: unknown method 'sampeld'; the nearest known one is 'sampled' (of {', '.join(HOSTS)})",
    ),
    (
        "x",
        {"reuse": "sampled"},
        "profiles.x.reuse: method 'sampled' fills the slot `host`; write `host: sampled`",
    ),
    (
        "x",
        {"host": "quantised"},
        f"profiles.x.host: unknown method 'quantised' (of {', '.join(HOSTS)})",
    ),
    (
        "x",
        {"reuse": "mak"},
        f"profiles.x.reuse: unknown method 'mak'; the nearest known one is 'mac' (of {', '.join(REUSES)})",
    ),
    (
        "x",
        {"host": {"method": "sampled", "bits": 9}},
        "profiles.x.host: unknown setting 'bits' of 'sampled'; the nearest known one is 'bits_per_table'",
    ),
    (
        "x",
        {"host": {"method": "offloaded", "bits": 9}},
        "profiles.x.host: unknown setting 'bits' of 'offloaded'; it has none",
    ),
    (
        "x",
        {"host": {"method": "sampled", "num_tables": 1}},
        "profiles.x.host.num_tables: Input should be greater than or equal to 2 (got 1)",
    ),
    (
        "x",
        {"host": "predicted"},
        "profiles.x.host: 'predicted' needs the setting `weights`: the predictor: `.safetensors` of `tandem train "
        "predictor`, or the authors' .pth",
    ),
    (
        "x",
        {"host": {"method": "predicted", "weights": "x.safetensors", "history": 4}},
        "profiles.x.host.history: Input should be greater than or equal to 5 (got 4)",
    ),
    (
        "x",
        {"host": {"method": "sampled", "bits_per_table": 9}},
        "profiles.x.host: has {bits_per_table: 9, num_tables: 150}, host.sampled has {bits_per_table: 10, num_tables: "
        "150}; all profiles share what 'sampled' keeps in host memory: set host.sampled to the settings of this one",
    ),
    (
        "x",
        {"host": {"method": "predicted", "weights": "w", "calibration": 64}},
        "profiles.x.host: 'calibration' of 'predicted' was renamed; write 'look_stride_blocks'",
    ),
    (
        "x",
        {"host": {"method": "predicted", "weights": "w", "calibrate_every": -1}},
        "profiles.x.host.calibrate_every: Input should be greater than or equal to 0 (got -1)",
    ),
]


@pytest.mark.parametrize(("name", "tree", "words"), REFUSED, ids=range(len(REFUSED)))
def test_an_impossible_composition_is_refused_by_name(name: str, tree: dict[str, Any], words: str) -> None:
    with pytest.raises(ProfileError) as refused:
        resolve({"fine": {"host": "offloaded"}, name: tree})
    assert str(refused.value) == words


def test_a_method_of_host_memory_is_refused_without_a_host_section() -> None:
    with pytest.raises(ProfileError) as refused:
        resolve({"whole": {"host": "offloaded"}}, None)
    assert str(refused.value) == (
        "profiles.whole.host: 'offloaded' keeps KV in host memory; this deployment has no `host` section: add one, or "
        "take the profile out"
    )


def test_built_in_names_are_taken_also_where_there_is_no_host_section() -> None:
    with pytest.raises(ProfileError, match=r"profiles\.sampled: is built in"):
        resolve({"sampled": {}}, None)


# --- whose KV is whose ------------------------------------------------------------------------------------------------

OTHER_HOSTS = [
    {"rows": "int8"},
    {"sink_tokens": 5},
    {"window_tokens": 65},
    {"dense_layers": ()},
    {"dense_layers": (0,)},
    {"resident_tokens": 1},
    {"sampled": SampledConfig(bits_per_table=9)},
    {"sampled": SampledConfig(num_tables=149)},
]


def key(name: str, host: HostConfig | None) -> str:
    return resolve({}, host)[name].kv_key


@pytest.mark.parametrize("change", OTHER_HOSTS, ids=lambda change: next(iter(change)))
def test_every_setting_that_decides_sampled_kv_is_in_its_key(change: dict[str, Any]) -> None:
    assert key("sampled", HostConfig(**change)) != key("sampled", HOST)


def test_where_the_kv_lies_and_how_many_threads_read_it_is_not_in_the_key() -> None:
    moved = HostConfig(memory_limit_gib=1, threads=3)
    assert [one.kv_key for one in resolve({}, moved).values()] == [one.kv_key for one in resolve({}, HOST).values()]
    assert key("exact", HOST) == key("exact", None)
    assert key("offloaded", HOST) == key("offloaded", HostConfig(sampled=SampledConfig(num_tables=149)))


@given(
    hosts=st.tuples(*[
        st.builds(
            HostConfig,
            rows=st.sampled_from(["bfloat16", "int8"]),
            sink_tokens=st.sampled_from([4, 12]),
            dense_layers=st.sampled_from([None, (), (1,), (1, 2), (12,)]),
            threads=st.sampled_from([None, 2]),
            sampled=st.builds(SampledConfig, num_tables=st.sampled_from([2, 40])),
        )
    ] * 2),
    names=st.tuples(*[st.sampled_from(["exact", "offloaded", "sampled"])] * 2),
)  # fmt: skip
def test_two_profiles_share_kv_exactly_if_nothing_that_changes_it_differs(
    hosts: tuple[HostConfig, HostConfig], names: tuple[str, str]
) -> None:
    def deciding(name: str, host: HostConfig) -> tuple[object, ...]:
        if name == "exact":
            return (name,)
        offload = (name, host.rows, host.sink_tokens, host.window_tokens, host.dense_layers, host.resident_tokens)
        return (*offload, host.sampled) if name == "sampled" else offload

    keys = [resolve({"named": {"host": name}}, host)["named"].kv_key for name, host in zip(names, hosts, strict=True)]
    assert (keys[0] == keys[1]) == (deciding(names[0], hosts[0]) == deciding(names[1], hosts[1]))


def test_what_methods_write_is_marked_by_their_names() -> None:
    """`offloaded` reads what `sampled` samples: one token later their KV differs."""
    kv_keys = [one.kv_key for one in resolve({}).values()]
    assert [words.split()[0] for words in kv_keys] == BUILT_IN


def test_a_profile_that_is_a_built_in_one_by_another_name_shares_its_kv() -> None:
    profiles = resolve({"mine": {"host": "sampled"}, "plain": {}})
    assert profiles["mine"].kv_key == profiles["sampled"].kv_key
    assert profiles["plain"].kv_key == profiles["exact"].kv_key


# --- a method of one's own --------------------------------------------------------------------------------------------


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method in a folder of its own, for prompts; no list names it."""
    add_toy(tmp_path, monkeypatch, "prefill", Reading.NONE)


def plan_with(profiles: dict[str, Profile]) -> MemoryPlan:
    shape = named_shape("tiny")
    return plan_memory(
        MemoryRequest(
            shape,
            GpuConfig(device="cpu", memory_limit_gib=4),
            host=None,
            kept=None,
            states=list_states(profiles.values(), shape),
            sizes=PlannedSizes(5, 256, None, None),
            machine=load_machine(LAPTOP),
        )
    )


@pytest.mark.usefixtures("toy")
def test_a_folder_is_all_that_a_method_takes() -> None:
    folders = [path.parent.name for path in Path(gpu.methods.__file__).parent.glob("*/__init__.py")]
    assert list(list_methods()) == [name.replace("_", "+") for name in sorted([*folders, "toy"])]
    profiles = resolve(
        {"fast": {"prefill": {"method": "toy", "size": 7}, "host": "sampled"}, "small": {"prefill": "toy"}}
    )
    assert "toy" not in profiles, "it fills no slot that makes a profile by itself"
    assert profiles["fast"].composition == (
        "prefill: toy (size 7, colour red), host: sampled (bits_per_table 10, num_tables 150)"
    )
    assert profiles["fast"].reading is Reading.SAMPLE
    assert profiles["fast"].kv_key == f"toy size=7 + {profiles['sampled'].kv_key}"
    assert profiles["small"].kv_key == "toy size=3"
    with pytest.raises(ProfileError, match=r"profiles\.x\.prefill\.size: Input should be greater .* \(got 0\)"):
        resolve({"x": {"prefill": {"method": "toy", "size": 0}}})


def test_nobody_who_serves_imports_a_method() -> None:
    root = Path(__file__).parents[2]
    named = re.compile(rf"gpu\.methods\.({'|'.join(list_methods())})\b")
    sources = [path for package in ("gpu", "scheduler", "server") for path in (root / package).rglob("*.py")]
    importing = [path.relative_to(root) for path in sources if named.search(path.read_text())]
    assert importing, "their own files do"
    assert {path.parts[:2] for path in importing} == {("gpu", "methods")}


@pytest.mark.usefixtures("toy")
def test_what_changes_no_kv_is_in_no_key() -> None:
    trees = {name: {"prefill": {"method": "toy", "colour": name}} for name in ("red", "blue")}
    red, blue = (resolve(trees)[name] for name in trees)
    assert red.kv_key == blue.kv_key
    assert red.parts != blue.parts


def test_a_method_of_the_slot_host_is_a_profile_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_toy(tmp_path, monkeypatch, "host", Reading.WHOLE)
    profiles = resolve({"big": {"host": {"method": "toy", "size": 9}}})
    assert list(profiles) == [*sorted([*BUILT_IN, "toy"]), "big"]
    assert (profiles["toy"].offloads, profiles["toy"].reading, profiles["toy"].kv_key) == (
        True,
        Reading.WHOLE,
        "toy size=3",
    )
    assert "toy" not in resolve({}, None)


@pytest.mark.usefixtures("toy")
def test_the_plan_charges_what_methods_say_that_a_running_sequence_needs() -> None:
    layers = named_shape("tiny").num_layers
    named = {name: {"prefill": {"method": "toy", "size": size}} for name, size in (("a", 7), ("b", 7), ("c", 1000))}
    without, charged = plan_with(resolve({}, None)), plan_with(resolve(named, None))
    assert [item.name for item in without.items if item.name.startswith("state of")] == []
    states = [item for item in charged.items if item.name.startswith("state of")]
    wanted = [("state of toy", 5 * size * layers) for size in (7, 1000)]
    assert [(state.name, state.bytes) for state in states] == wanted, "one state for two profiles alike"
    assert charged.used_bytes("host") <= charged.limit_bytes["host"]


@pytest.mark.usefixtures("toy")
def test_what_stays_on_the_device_is_what_all_methods_need_together() -> None:
    shape = named_shape("tiny")
    alone = resolve({}).values()
    assert find_kept(alone, HostConfig(), shape) == Kept(4, 64, (0, shape.num_layers // 2))
    assert find_kept(alone, HostConfig(sink_tokens=9, window_tokens=70, dense_layers=(3, 0, 3)), shape) == (
        Kept(9, 70, (0, 3))
    )
    both = resolve({"x": {"prefill": "toy", "host": "sampled"}}).values()
    assert find_kept(both, HostConfig(dense_layers=(2,)), shape) == Kept(4, 93, (1, 2))
    plan = plan_memory(
        MemoryRequest(
            shape,
            GpuConfig(device="cpu", memory_limit_gib=4),
            host=HostConfig(),
            kept=find_kept(both, HostConfig(dense_layers=(2,)), shape),
            states=(),
            sizes=PlannedSizes(5, 256, None, None),
            machine=load_machine(LAPTOP),
        )
    )
    kept = plan.sink_tokens, plan.window_tokens, plan.dense_layers
    assert kept == (16, 64, (1, 2)), "a longer window is its profile's own"


def test_an_index_keeps_no_layer_whole_and_profiles_served_beside_it_keep_theirs() -> None:
    shape = named_shape("tiny")
    profiles, usual = resolve({"own": {"host": "indexed"}}), (0, shape.num_layers // 2)
    own = profiles["own"]
    assert find_kept([own], HostConfig(), shape).dense_layers == ()
    assert find_kept([own], HostConfig(dense_layers=(2,)), shape).dense_layers == (2,)
    for name in ("offloaded", "sampled"):
        for served in ([profiles[name]], [profiles[name], own]):
            assert find_kept(served, HostConfig(), shape).dense_layers == usual
    assert find_kept(profiles.values(), HostConfig(), shape).dense_layers == usual, "built-in profiles are served, too"
    assert find_kept(profiles.values(), HostConfig(dense_layers=()), shape).dense_layers == ()


def test_methods_that_cannot_be_together_are_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_toy(tmp_path, monkeypatch, "prefill", Reading.NONE, refuses={"offl": "it was not measured"})
    assert resolve({"x": {"prefill": "toy", "host": "sampled"}})["x"].reading is Reading.SAMPLE
    with pytest.raises(ProfileError) as refused:
        resolve({"x": {"prefill": "toy", "host": "offloaded"}})
    assert str(refused.value) == (
        "profiles.x: 'toy' is not served with 'offloaded': it was not measured; leave out `prefill` or `host`"
    )


# --- late blocks ------------------------------------------------------------------------------------------------------


def test_blocks_of_rows_in_four_bits_are_not_fetched() -> None:
    host = HOST.model_copy(update={"rows": "int4"})
    for method in ("predicted", "predicted+sampled"):
        with pytest.raises(ProfileError, match=r"profiles\.own\.host\.method: got host.rows 'int4', and blocks are"):
            resolve({"own": {"host": {"method": method, "weights": "predictor.safetensors"}}}, host)
    assert resolve({"own": {"host": "indexed"}}, host)
    with pytest.raises(ValueError, match=r"link_share: got 0.5 with rows: int4"):
        HostConfig.model_validate({"rows": "int4", "link_share": 0.5})


def test_late_blocks_are_left_to_a_sample_where_text_may_depend_on_load_alone() -> None:
    blocks = {"method": "predicted+sampled", "weights": "predictor.safetensors"}
    waits, leaves = (resolve({"both": {"host": {**blocks, "late": late}}})["both"] for late in ("wait", "sample"))
    assert resolve({"both": {"host": blocks}})["both"] == waits
    assert waits.kv_key != leaves.kv_key
    fixed = HOST.model_copy(update={"residency": "fixed"})
    assert resolve({"both": {"host": blocks}}, fixed)
    wanted = r"profiles\.both\.host\.late: got 'sample' beside host\.residency 'fixed'.*wanted 'wait', or .* 'adaptive'"
    with pytest.raises(ProfileError, match=wanted):
        resolve({"both": {"host": {**blocks, "late": "sample"}}}, fixed)
    with pytest.raises(ProfileError, match="unknown setting 'late' of 'predicted'"):
        resolve({"blocks": {"host": {**blocks, "method": "predicted", "late": "sample"}}})

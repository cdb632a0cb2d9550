"""Placements held against one another: numbers by hand, what must never be the other way round, and the verdict."""

import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from server.commands.placements_page import describe_comparison, print_comparison
from server.deployment import Deployment, load_deployment
from server.planning.deployment_plan import resolve_plan
from server.planning.placements import PAYS, Comparison, compare_placements, expected_share
from tests.tolerances import PLACEMENT_MS
from transfer.machine import load_machine
from transfer.machine_rates import find_rates

ALWAYS = ("device", "offloaded", "sampled")

DEPLOY = Path(__file__).parents[2] / "deploy"
NOWHERE = Path("/nonexistent/measured.json")
ROUND = {
    "device_stream_gb_s": 1000.0,
    "bf16_matmul_tflop_s": 1000.0,
    "host_to_device_gb_s": 10.0,
    "host_stream_gb_s": 50.0,
    "host_random_rows_gb_s": 25.0,
}
CONTEXT = 98_304
OFFLOADED = CONTEXT - 16 - 64  # without sink and window


def compare(tree: dict[str, Any], rates: dict[str, float] | None = None, machine: str = "a100-80g") -> Comparison:
    deployment = Deployment.model_validate(tree)
    profile = load_machine(DEPLOY / "machines" / f"{machine}.json")
    profile = profile.model_copy(update={"rates": ROUND if rates is None else rates, "rates_from": "a test"})
    return compare_placements(deployment, resolve_plan(deployment, profile), find_rates(profile, NOWHERE))


def eight_b(context: int = CONTEXT, **host: Any) -> dict[str, Any]:
    return {
        "model": {"random_weights": "llama-3.1-8b"},
        "gpu": {"device": "cuda", "memory_limit_gib": 76},
        "host": {"residency": "fixed", "memory_limit_gib": 200, "resident_tokens": 256, **host},
        "scheduler": {"max_running": 16, "max_context_tokens": context, "default_profile": "sampled"},
    }


def mixture(**gpu: Any) -> dict[str, Any]:
    """Of 30B; each layer keeps 40 of its experts on the card."""
    return {
        "model": {"random_weights": "qwen3-30b-a3b"},
        "gpu": {"device": "cuda", "experts_gib": 40 * 48 * 3 * 2048 * 768 * 2 / 2**30, **gpu},
        "scheduler": {"max_running": 2, "max_context_tokens": 4096},
    }


@pytest.mark.parametrize(("rows", "row_bytes"), [("bfloat16", 512), ("int8", 256)])
def test_an_8b_shape_over_round_rates_is_what_a_pencil_says(rows: str, row_bytes: int) -> None:
    found = compare(eight_b(rows=rows))
    layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14_336 + 2 * 4096
    weights_ms = 2 * (32 * layer + 128_256 * 4096 + 4096) / 1e9
    layer_token = 2 * 8 * 128 * 2
    device, exact, sampled = (found.get(name).first for name in ALWAYS)
    assert device.ms == pytest.approx(weights_ms + CONTEXT * 32 * layer_token / 1e9, rel=PLACEMENT_MS)
    kept_ms = (CONTEXT * 32 - OFFLOADED * 30) * layer_token / 1e9
    link_ms = 30 * (32 * (128 * (2 + 4) + 4 + 150 * 2 + 1) + 4) / 10 / 1e6
    read_ms = OFFLOADED * 30 * 8 * row_bytes / 50 / 1e6
    assert exact.offloaded_tokens == sampled.offloaded_tokens == OFFLOADED
    assert exact.ms == pytest.approx(weights_ms + kept_ms + link_ms + read_ms, rel=PLACEMENT_MS)
    drawn_ms = found.share_read * OFFLOADED * 30 * 32 * row_bytes / 25 / 1e6
    assert sampled.ms == pytest.approx(weights_ms + kept_ms + link_ms + drawn_ms, rel=PLACEMENT_MS)
    assert sampled.tokens_s == pytest.approx(1e3 / sampled.ms)


def test_many_rows_are_bound_by_products_where_weights_are_read_faster() -> None:
    slow = compare(eight_b(context=4096), ROUND | {"bf16_matmul_tflop_s": 1.0})
    device = slow.get("device")
    step = device.steps[-1]
    assert step.batch == 16
    assert step.weights_ms == pytest.approx(2 * 16 * 7_504_924_672 / 1e9, rel=PLACEMENT_MS)
    assert device.first.weights_ms == pytest.approx(2 * 7_504_924_672 / 1e9, rel=PLACEMENT_MS)


def test_the_share_that_is_read_is_that_of_two_tables_or_more() -> None:
    assert 0.02 < expected_share(10, 150) < 0.03
    agrees = 0.5257**3
    assert expected_share(3, 2) == pytest.approx(agrees**2)
    one = 3 * agrees * (1 - agrees) ** 2
    assert expected_share(3, 3) == pytest.approx(1 - (1 - agrees) ** 3 - one)


@given(bits=st.integers(1, 15), tables=st.integers(2, 511))
def test_more_tables_and_fewer_bits_read_more(bits: int, tables: int) -> None:
    share = expected_share(bits, tables)
    assert 0 <= share <= 1
    assert expected_share(bits, tables + 1) >= share - 1e-12
    assert expected_share(bits + 1, tables) <= share + 1e-12


@settings(max_examples=20)
@given(pages=st.integers(100, 8000), more=st.integers(1, 190), name=st.sampled_from(ALWAYS))
def test_a_longer_context_is_never_faster(pages: int, more: int, name: Any) -> None:
    shorter, longer = (compare(eight_b(context=16 * count)).get(name).first for count in (pages, pages + more))
    assert longer.ms >= shorter.ms


@cache
def placed(rows: str) -> Comparison:
    return compare(eight_b(rows=rows))


@settings(max_examples=20)
@given(rate=st.sampled_from(sorted(ROUND)), times=st.floats(1.0, 8.0))
def test_a_faster_part_makes_nothing_slower_and_fewer_bits_of_rows_neither(rate: str, times: float) -> None:
    plain, coded = placed("bfloat16"), placed("int8")
    faster = compare(eight_b(), ROUND | {rate: ROUND[rate] * times})
    for name in ALWAYS:
        for before, after, fewer in zip(*(one.get(name).steps for one in (plain, faster, coded)), strict=False):
            if before is not None and after is not None and fewer is not None:
                assert after.ms <= before.ms
                assert fewer.ms <= before.ms


@pytest.mark.parametrize("residency", ["fixed", "adaptive"])
def test_more_contexts_take_longer_each_and_there_are_as_many_as_fit(residency: str) -> None:
    found = compare(eight_b(residency=residency))
    for placement in found.placements:
        steps = [step for step in placement.steps if step is not None]
        assert [step.ms for step in steps] == sorted(step.ms for step in steps)
        assert [batch for batch in found.batches if batch <= placement.most_contexts] == [one.batch for one in steps]
    device, exact, sampled = (found.get(name).most_contexts for name in ALWAYS)
    assert 1 <= device < sampled < exact, "rows without hash tables leave room for more"


def test_a_link_carries_each_row() -> None:
    steps = [step for step in compare(eight_b()).get("sampled").steps if step is not None]
    assert len(steps) > 1
    for step in steps:
        assert step.link_ms == pytest.approx(step.batch * steps[0].link_ms)


def test_the_device_alone_is_planned_without_the_tier() -> None:
    tree = eight_b(context=40_960)
    tree["gpu"]["memory_limit_gib"] = 22.5
    assert compare(tree).get("device").most_contexts == 1
    tree["scheduler"]["default_profile"] = "exact"
    found = compare(tree)
    assert found.get("device").most_contexts == 0, "what the tier takes of the card, `exact` has not"
    assert "of 40,960 tokens beside the host tier" in found.verdict


def test_what_stays_on_the_device_while_there_is_room_is_not_read_on_the_host() -> None:
    found = compare(eight_b(residency="adaptive"))
    alone, sampled = found.get("device").first, found.get("sampled").first
    assert (sampled.offloaded_tokens, sampled.host_ms, sampled.link_ms) == (0, 0, 0)
    assert sampled.ms == alone.ms
    assert "does not pay at batch 1" in found.sampling
    assert f"{found.get('device').words} would take {alone.ms:,.1f} and read all there is" in found.verdict
    crowded = [step.offloaded_tokens for step in found.get("sampled").steps if step is not None]
    assert crowded == sorted(crowded)
    assert crowded[-1] > 0


def test_sampling_is_said_to_pay_where_it_gives_a_tenth_more_than_all_of_it_read() -> None:
    fast, slow = compare(eight_b()), compare(eight_b(), ROUND | {"device_stream_gb_s": 100.0})
    for found in (fast, slow):
        device, sampled = found.get("device").first, found.get("sampled").first
        pays = sampled.tokens_s >= PAYS * device.tokens_s
        assert found.sampling.startswith("sampling pays at batch 1" if pays else "sampling does not pay") or (
            not pays and "does not pay at batch 1" in found.sampling
        )
        assert pays == (found is slow), "a fast card reads all of it sooner than a slow host a part"


def test_a_deployment_without_a_host_tier_is_held_against_one_that_has_it() -> None:
    tree = eight_b()
    tree["host"], tree["scheduler"]["default_profile"] = None, "exact"
    tree["profiles"] = {"reused": {"reuse": "mac"}}
    found = compare(tree)
    assert found.taken == "device"
    assert all(placement.first is not None for placement in found.placements)


def test_profiles_that_need_the_host_do_not_keep_the_device_from_being_tried() -> None:
    tree = eight_b()
    tree["profiles"] = {"whole": {"host": "offloaded"}}
    assert compare(tree).get("device").why_not is None


def test_heads_that_the_host_does_not_read_leave_one_placement() -> None:
    tree = {
        "model": {"random_weights": "glm-4-32b", "weights": "int4"},
        "gpu": {"device": "cuda"},
        "scheduler": {"max_running": 2},
    }
    found = compare(tree)
    assert found.get("device").first is not None
    names: tuple[str, ...] = ("offloaded", "sampled")
    for name in names:
        assert "24 to a KV head" in (found.get(name).why_not or "")
        assert f"{found.get(name).words} does not fit" in found.verdict
    assert found.sampling == "sampling: does not fit this machine"


def test_layers_with_a_window_read_no_more_than_it() -> None:
    tree = {"model": {"random_weights": "gemma-3-4b"}, "gpu": {"device": "cuda"}, "scheduler": {"max_running": 1}}
    step = compare(tree).get("device").first
    full = sum(layer % 6 == 5 for layer in range(34))
    tokens = full * 131_072 + (34 - full) * 1024
    assert step.device_kv_ms == pytest.approx(tokens * 2 * 4 * 256 * 2 / 1e9, rel=PLACEMENT_MS)


def test_a_cpu_device_has_no_link() -> None:
    deployment = load_deployment(DEPLOY / "reference.yaml")
    machine = load_machine(DEPLOY / "machines" / "laptop.json")
    found = compare_placements(deployment, resolve_plan(deployment, machine), find_rates(machine, NOWHERE))
    steps = [step for placement in found.placements for step in placement.steps if step is not None]
    assert any(step.host_ms > 0 for step in steps)
    assert all(step.link_ms == 0 for step in steps)


def test_experts_in_host_memory_come_over_the_link() -> None:
    """A layer keeps 40 of 128, of 9.4 MB each, and a token takes 8 at random; a prompt takes all."""
    tree = mixture(host_experts="fetch")
    found = compare(tree)
    one, two = found.get("device").steps
    layer = 88 / 128 * 3 * 2048 * 768 * 2
    assert one.experts_ms == pytest.approx(48 * 8 * layer / 10e6, rel=PLACEMENT_MS)
    assert two.experts_ms == pytest.approx(48 * (8 + 8 * 120 / 128) * layer / 10e6, rel=PLACEMENT_MS)
    assert one.ms == pytest.approx(one.weights_ms + one.experts_ms + one.device_kv_ms, rel=PLACEMENT_MS)
    assert found.experts is not None
    assert "88 of each layer's 128 lie in host memory" in found.experts
    assert "batch 1: 2.49 GB, 249.1 ms, batch 2: 4.83 GB, 482.7 ms" in found.experts
    assert "copies all, 39.9 GB, 4.0 s" in found.experts
    page = io.StringIO()
    print_comparison(found, Console(width=400, file=page))
    assert found.experts in page.getvalue()
    assert f"experts in host memory {one.experts_ms:.1f}" in page.getvalue()
    assert json.loads(json.dumps(describe_comparison(found)))["experts"] == found.experts
    assert "core_int4_gflop_s 10" in page.getvalue()
    tree["gpu"] = {"device": "cuda"}
    whole = compare(tree)
    page = io.StringIO()
    print_comparison(whole, Console(width=400, file=page))
    assert "core_int4_gflop_s 10" not in page.getvalue(), "of no use without experts in host memory"
    first = whole.get("device").first
    assert (first.experts_ms, whole.experts) == (0, None)


def test_experts_that_the_cpu_computes_are_read_at_the_hosts_rate() -> None:
    """85 % of 50 GB/s and 0.06 ms a layer, beside 10 GB/s of link; of steps beyond 32 rows they are fetched."""
    found = compare(mixture())
    one, two = found.get("device").steps
    layer = 88 / 128 * 3 * 2048 * 768 * 2
    assert one.experts_ms == pytest.approx(48 * (8 * layer / (0.85 * 50e6) + 0.06), rel=PLACEMENT_MS)
    assert two.experts_ms == pytest.approx(48 * ((8 + 7.5) * layer / (0.85 * 50e6) + 0.06), rel=PLACEMENT_MS)
    fetched = compare(mixture(host_experts="fetch")).get("device").first
    assert fetched.weights_ms - one.weights_ms == pytest.approx(48 * 8 * layer / 1000e6, rel=PLACEMENT_MS)
    assert found.experts is not None
    assert "what the CPU computes of them in a step, read at 50 GB/s: batch 1: 2.49 GB, 61.5 ms, batch 2: 4.83 GB" in (
        found.experts
    )
    assert "fetched over 10 GB/s they would take 249.1 ms at batch 1; a prompt of more than" in found.experts
    slow = compare(mixture(), rates=ROUND | {"core_bf16_gflop_s": 0.9})
    assert slow.experts is not None
    ms = 48 * (8 * layer / 32 / 0.9e6 + 0.06)  # two operations a number of two bytes
    assert f"in a step, as fast as its 32 threads make such numbers: batch 1: 2.49 GB, {ms:,.1f}" in slow.experts


def test_steps_of_more_rows_than_are_computed_are_told_to_fetch() -> None:
    tree = mixture(host_experts=4) | {"scheduler": {"max_running": 8, "max_context_tokens": 4096}}
    found, fetching = compare(tree), compare(tree | {"gpu": mixture(host_experts="fetch")["gpu"]})
    steps, others = found.get("device").steps, fetching.get("device").steps
    for step, other in zip(steps, others, strict=True):
        is_computed = step.batch <= 4
        assert (step.experts_ms < other.experts_ms) == is_computed
        assert (step.weights_ms < other.weights_ms) == is_computed
    computed, fetched = found.experts.split("what a step fetches of them over 10 GB/s: ")
    assert [f"batch {batch}:" in computed for batch in (1, 2, 4, 8)] == [True, True, True, False]
    assert fetched.startswith("batch 8: 16.0")


def test_the_docs_and_the_file_have_the_plan_of_a_mixture() -> None:
    machine = load_machine(DEPLOY / "machines" / "rtx4090.json")
    deployment = load_deployment(DEPLOY / "rtx4090-30b-a3b.yaml")
    plan, rates = resolve_plan(deployment, machine), find_rates(machine, NOWHERE)
    step = compare_placements(deployment, plan, rates).get("device").first
    model = deployment.model.model_copy(update={"weights": "int4"})
    gpu = deployment.gpu.model_copy(update={"experts_gib": None})
    small = deployment.model_copy(update={"model": model, "gpu": gpu})
    fits = compare_placements(small, resolve_plan(small, machine), rates).get("device").first
    page_text = " ".join((DEPLOY.parent / "docs" / "HOST_MEMORY.md").read_text().split())
    assert plan.memory.experts_on_card is not None
    fetching = deployment.model_copy(update={"gpu": deployment.gpu.model_copy(update={"host_experts": "fetch"})})
    slow = compare_placements(fetching, resolve_plan(fetching, machine), rates).get("device").first
    on_card = f"{plan.memory.experts_on_card} of each layer's 128 experts"
    row = f"{on_card} | {step.ms:.0f}, of which the CPU {step.experts_ms:.0f} | {slow.experts_ms:.0f} over the link"
    assert f"at 40K tokens (`deploy/rtx4090-30b-a3b.yaml`) | {row} |" in page_text
    assert f"| the same in int4 | all | {fits.ms:.1f} |" in page_text
    said = " ".join((DEPLOY / "rtx4090-30b-a3b.yaml").read_text().replace("#", "").split())
    assert f"keeps {plan.memory.experts_on_card} of its 128 experts" in said
    assert f"{step.experts_ms:.0f} ms a token at 60 GB/s" in said
    assert f"{slow.experts_ms:.0f} if they were fetched over PCIe 4" in said
    assert f"weights {fits.weights_ms:.1f} ms a token" in said


def test_the_page_and_the_json_say_the_same() -> None:
    deployment = load_deployment(DEPLOY / "rtx4090-32b.yaml")
    scheduler = deployment.scheduler.model_copy(update={"default_profile": "sampled"})
    deployment = deployment.model_copy(update={"scheduler": scheduler})
    machine = load_machine(DEPLOY / "machines" / "rtx4090.json")
    found = compare_placements(deployment, resolve_plan(deployment, machine), find_rates(machine, NOWHERE))
    tree = json.loads(json.dumps(describe_comparison(found)))
    assert tree["taken"] == "sampled"
    device, exact, sampled, indexed = tree["placements"]
    assert indexed["name"] == "indexed"
    assert device["most_contexts"] == 0
    assert "gpu.memory_limit_gib" in device["why_not"]
    assert device["steps"][0] is None
    assert exact["steps"][0]["ms"] > 3 * sampled["steps"][0]["ms"]
    assert "all on the device does not fit" in tree["verdict"]
    assert tree["sampling"].startswith("sampling pays at batch 1")
    assert tree["rates"]["device_stream_gb_s"] == {"rate": 930.0, "source": "profile"}
    page = io.StringIO()
    print_comparison(found, Console(width=400, file=page))
    text = page.getvalue()
    for said in (
        tree["verdict"],
        tree["sampling"],
        tree["rates_from"],
        device["why_not"],
        f"{sampled['steps'][0]['ms']:,.1f}",
    ):
        assert said in text
    assert "sampled (taken)" in text
    narrow = io.StringIO()
    print_comparison(found, Console(width=80, file=narrow))
    table = narrow.getvalue().split("takes device and host")[0]
    assert "…" not in table, "a terminal of 80 characters has room for all of it"
    assert all(len(line) <= 80 for line in table.splitlines())


def test_the_docs_have_the_plans_of_both_deployments() -> None:
    page_text = " ".join((DEPLOY.parent / "docs" / "HOST_MEMORY.md").read_text().split())
    machine = load_machine(DEPLOY / "machines" / "rtx4090.json")
    small, large = (load_deployment(DEPLOY / f"{name}.yaml") for name in ("rtx4090", "rtx4090-32b"))
    rates = find_rates(machine, NOWHERE)
    found = compare_placements(small, resolve_plan(small, machine), rates)
    device, exact, sampled = (
        [None if step is None else f"{step.ms:,.1f}" for step in found.get(name).steps] for name in ALWAYS
    )
    assert f"reads all of its 128K there, in {device[0]} ms a token, and sampling would not pay" in page_text
    assert f"Two such contexts take {sampled[1]} ms a step sampled and {exact[1]} exact" in page_text
    assert "sampling does not pay at batch 1" in found.sampling
    assert "batch 2" in found.sampling
    assert "sampling pays" not in found.sampling
    found = compare_placements(large, resolve_plan(large, machine), rates)
    exact, sampled = ([f"{step.ms:,.1f}" for step in found.get(name).steps if step] for name in ALWAYS[1:])
    assert f"it serves 128K: {exact[0]} ms a token if all of it is read, {sampled[0]} sampled" in page_text


PREDICTED = {"weights": "predictor.safetensors", "rings": 16}
KINDS = {
    "exact": ("device", None), "offloaded": ("offloaded", None), "sampled": ("sampled", None),
    "reused": ("device", {"reuse": "mac"}), "reused-sample": ("sampled", {"reuse": "mac", "host": "sampled"}),
    "thinned": ("offloaded", {"prefill": "momo", "host": "offloaded"}),
    "blocks": ("predicted", {"host": {"method": "predicted", **PREDICTED}}),
    "blocks-and-sample": ("predicted+sampled", {"host": {"method": "predicted+sampled", **PREDICTED}}),
}  # fmt: skip


def compare_default(name: str, context: int = CONTEXT, **settings: int) -> Comparison:
    """With that one of KINDS as the profile of requests that name none."""
    tree = eight_b(context)
    tree["scheduler"] |= {"default_profile": name, "max_running": 2}
    composition = KINDS[name][1]
    if composition is not None:
        tree["profiles"] = {name: composition}
        if settings:
            tree["profiles"][name] = {"host": composition["host"] | settings}
    return compare(tree)


@pytest.mark.parametrize("name", list(KINDS))
def test_a_default_profile_is_priced_as_what_it_reads(name: str) -> None:
    kind, _ = KINDS[name]
    found = compare_default(name)
    assert found.taken == kind
    names = [placement.name for placement in found.placements]
    assert {*names} >= {*ALWAYS, kind}
    assert len(names) == len({*names})
    step = found.get(found.taken).first
    read = 2048 if kind.startswith("predicted") else 0
    layer_token, row = 2 * 8 * 128 * 2, 512
    layers = 29 if read else 30  # offloaded: two are dense in the reference deployment, of predictions one more
    offloaded = step.offloaded_tokens
    whole_ms = (CONTEXT * 32 - (offloaded - read) * layers) * layer_token / 1e9
    assert step.device_kv_ms == pytest.approx(whole_ms, rel=PLACEMENT_MS)
    fetched = read / 4 + offloaded / 256 / 2 if read else 0
    assert step.fetch_ms == pytest.approx(layers * 8 * fetched * row / 10 / 1e6, rel=PLACEMENT_MS)
    host_ms = {
        "device": 0.0,
        "offloaded": offloaded * layers * 8 * row / 50 / 1e6,
        "sampled": found.share_read * offloaded * layers * 32 * row / 25 / 1e6,
        "predicted": 0.0,
        "predicted+sampled": found.share_read * (offloaded - 2048) * layers * 32 * row / 25 / 1e6,
    }[kind]
    assert step.host_ms == pytest.approx(host_ms, rel=PLACEMENT_MS)
    assert (step.link_ms > 0) == (kind != "device")
    page = io.StringIO()
    print_comparison(found, Console(width=400, file=page))
    assert f"{found.get(found.taken).words} (taken)" in page.getvalue()
    words = found.get(found.taken).words
    made_of = next(line for line in page.getvalue().splitlines() if line.startswith(f"{words}, batch 1"))
    assert ("rows fetched" in made_of) == bool(read)


def test_an_index_is_priced_beside_what_the_cpu_reads_and_with_the_settings_of_a_profile_that_names_it() -> None:
    found = compare(eight_b()).get("indexed").first
    read = -(-OFFLOADED // 50)
    on_card = (CONTEXT * 32 - OFFLOADED * 30) * 4096 + 30 * 4096 * (read + OFFLOADED * 6 // 32)
    assert found.device_kv_ms == pytest.approx(on_card / 1e9, rel=2e-3)
    assert found.fetch_ms == pytest.approx(30 * 8 * read * 512 / 10 / 1e6, rel=2e-3)
    assert found.host_ms == 0.0
    tree = eight_b() | {"profiles": {"more": {"host": {"method": "indexed", "budget_share": 0.005, "rings": 2}}}}
    more = compare(tree).get("indexed")
    assert more.first.fetch_ms == pytest.approx(found.fetch_ms / 4, rel=4e-3)
    assert more.most_contexts == 2


def test_no_more_contexts_fit_than_each_of_a_profiles_methods_has_rings() -> None:
    both = {"reuse": {"method": "mac", "rings": 1}, "host": {"method": "indexed", "rings": 4}}
    tree = eight_b() | {"profiles": {"both": both}}
    tree["scheduler"] = tree.get("scheduler", {}) | {"default_profile": "both"}
    assert compare(tree).get("indexed").most_contexts == 1


def test_steps_that_attend_to_everything_are_priced_by_their_share() -> None:
    """Keys of all blocks over the link, and all rows but the fetched ones on the host, in one step of four."""
    plain = compare_default("blocks", look_stride_blocks=0).get("predicted").first
    full = compare_default("blocks", look_stride_blocks=0, calibrate_every=4).get("predicted").first
    offloaded, row, heads = full.offloaded_tokens, 512, 29 * 8
    assert full.fetch_ms - plain.fetch_ms == pytest.approx(offloaded / 4 / 2 * heads * row / 10 / 1e6, rel=PLACEMENT_MS)
    assert (full.host_ms, plain.host_ms) == (pytest.approx((offloaded - 2048) / 4 * heads * row / 50 / 1e6), 0)


def test_a_context_that_is_too_short_for_predictions_is_read_as_without() -> None:
    for name, other in (("blocks", "offloaded"), ("blocks-and-sample", "sampled")):
        found = compare_default(name, context=4096, min_context_tokens=5000)
        step, plain = found.get(found.taken).first, found.get(other).first
        assert (step.fetch_ms, step.host_ms, step.device_kv_ms) == (0, plain.host_ms, plain.device_kv_ms)


def test_no_more_contexts_predict_than_there_are_rings() -> None:
    found = compare_default("blocks", rings=1)
    assert found.get("predicted").most_contexts == 1
    assert found.get("predicted").steps[1:] == (None,) * (len(found.batches) - 1)

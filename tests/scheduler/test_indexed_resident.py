"""Requests whose contexts are whole on the device and are read there by an index, through the engine that serves."""

from scheduler.engine_config import SchedulerConfig
from tests.scheduler.tiered_engine import (
    ask,
    check_idle,
    check_rings,
    leave_and_preempt,
    prompt_of,
    run,
    running_engine,
    text,
    tiered_config,
)

ALL = {
    "method": "indexed", "resident": "indexed", "budget_share": 1.0, "budget_tokens": 1024, "min_context_tokens": 100,
    "rings": 2,
}  # fmt: skip
TOKENS = 90  # of an answer, in which the index grows


def test_served_answers_with_a_budget_of_everything_are_exact_ones_across_preemption_and_shared_prefixes() -> None:
    """Each step checks that it covers its contexts."""
    scheduler = SchedulerConfig(max_running=4, max_context_tokens=1024)
    config = tiered_config(0.125, {"resident_tokens": 1024}, scheduler, {"own": {"host": ALL}})
    prompts = [prompt_of(300, 1), prompt_of(260, 2)]
    prompts.append(prompts[0][:200] + prompt_of(60, 3))  # waits for a ring, and begins behind a prefix
    with running_engine(config) as engine:
        exact = run(engine, [ask(f"exact {n}", prompt, TOKENS, "exact") for n, prompt in enumerate(prompts)])
        own = [ask(f"own {n}", prompt, TOKENS, "own") for n, prompt in enumerate(prompts)]
        left = [ask("left", prompts[1], TOKENS, "own")]
        answers = run(engine, own + left, leave_and_preempt(engine, ["left"], ["own 0"]))
        for number in range(len(prompts)):
            assert text(answers[f"own {number}"]) == text(exact[f"exact {number}"])
        counts = next(one for one in engine._runner.method_counts().values() if "index_read_tokens" in one)
        assert sum(counts["index_read_tokens"]) == sum(counts["index_offloaded_tokens"]) > 0
        assert sum(counts["index_fetched_rows"]) == 0
        check_rings(engine)
        check_idle(engine)


def test_served_answers_from_host_memory_are_exact_with_late_rings_and_shared_pages() -> None:
    """Two rings, and pages for one of the longest contexts; each step checks that it covers its contexts."""
    scheduler = SchedulerConfig(max_running=4, max_context_tokens=2048)
    own_settings = ALL | {"resident": "full", "index_tokens": 2048}
    host = {"resident_tokens": 256, "residency": "fixed"}
    config = tiered_config(0.125, host, scheduler, {"own": {"host": own_settings}})
    prompts = [prompt_of(980, 1), prompt_of(330, 2), prompt_of(700, 3)]
    with running_engine(config) as engine:
        assert set(engine.scheduler.rings.num_free_pages.values()) == {2}
        exact = run(engine, [ask(f"exact {n}", prompt, TOKENS, "offloaded") for n, prompt in enumerate(prompts)])
        answers = run(engine, [ask(f"own {n}", prompt, TOKENS, "own") for n, prompt in enumerate(prompts)])
        assert engine.scheduler.roster.num_preemptions == 1, "two contexts, and the first needs a page more"
        for number in range(len(prompts)):
            assert text(answers[f"own {number}"]) == text(exact[f"exact {number}"])
        counts = next(one for one in engine._runner.method_counts().values() if "index_read_tokens" in one)
        assert sum(counts["index_read_tokens"]) == sum(counts["index_offloaded_tokens"]) > 0
        assert set(engine.scheduler.rings.num_free_pages.values()) == {2}


def test_served_answers_that_reuse_over_an_index_are_exact_where_nothing_matches_and_covered_where_much_does() -> None:
    """Two rings of each method, a late one of the index, and a sequence that is preempted and begins again."""
    scheduler = SchedulerConfig(max_running=4, max_context_tokens=1024)
    reuse = {"method": "mac", "capacity": 32, "band": 16, "max_prefix_share": 1.0, "min_context_tokens": 0,
             "stops_matching": False, "rings": 2}  # fmt: skip
    index = ALL | {"resident": "full"}
    strict, loose = reuse | {"tau": 0.999, "layer_tau": {0: "off"}}, reuse | {"tau": 0.0}
    profiles = {"strict": {"reuse": strict, "host": index}, "loose": {"reuse": loose, "host": index}}
    config = tiered_config(0.125, {"resident_tokens": 256, "residency": "fixed"}, scheduler, profiles)
    prompts = [prompt_of(330, 1), prompt_of(240, 2)]
    with running_engine(config) as engine:
        exact = run(engine, [ask(f"exact {n}", prompt, 60, "offloaded") for n, prompt in enumerate(prompts)])
        own = [ask(f"strict {n}", prompt, 60, "strict") for n, prompt in enumerate(prompts)]
        answers = run(engine, own, leave_and_preempt(engine, [], ["strict 0"]))
        for number in range(len(prompts)):
            assert text(answers[f"strict {number}"]) == text(exact[f"exact {number}"])
        run(engine, [ask("loose", prompts[0], 30, "loose")])
        counts = engine._runner.method_counts()
        of_index = next(one for one in counts.values() if "index_read_tokens" in one)
        hits = {sum(one["reuse_hits"]) > 0 for one in counts.values() if "reuse_hits" in one}
        assert hits == {False, True}
        assert sum(of_index["index_read_tokens"]) == sum(of_index["index_offloaded_tokens"]) > 0
        check_rings(engine)
        check_idle(engine)


def test_prompts_whose_attention_was_pruned_are_decoded_by_an_index_as_they_are_read_in_full() -> None:
    """What `prefill: momo` has written is indexed like any other prompt."""
    scheduler = SchedulerConfig(max_running=4, max_context_tokens=1024)
    momo = {"method": "momo", "gamma": 16, "key_block": 16, "query_block": 16, "dense_until_tokens": 128}
    profiles = {
        "full": {"prefill": momo, "host": "offloaded"},
        "own": {"prefill": momo, "host": ALL | {"resident": "full"}},
    }
    config = tiered_config(0.125, {"resident_tokens": 256, "residency": "fixed"}, scheduler, profiles)
    prompt = prompt_of(460, 1)
    with running_engine(config) as engine:
        full, own = (text(run(engine, [ask(name, prompt, 12, name)])[name]) for name in ("full", "own"))
        assert own == full
        counts = next(one for one in engine._runner.method_counts().values() if "index_read_tokens" in one)
        assert sum(counts["index_read_tokens"]) == sum(counts["index_offloaded_tokens"]) > 0

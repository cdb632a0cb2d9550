"""A preemption says whom it met, for whom, why and what to change; and what it cost when the request is resumed."""

import logging
import re

import pytest
from msgspec import structs

from scheduler.engine.engine import Engine
from scheduler.messages import PREEMPTED_AGAIN, PREEMPTIONS
from tests.scheduler import host_engines
from tests.scheduler.engines import check_output, drain, make_engine, make_request, prompt_of
from tests.scheduler.host_engines import RESIDENT, ask
from tests.scheduler.test_given_memory import Host, make
from tests.scheduler.test_preemption_order import run

PAGES = 14
NAMES = [f"r{i}" for i in range(4)]


def lines(caplog: pytest.LogCaptureFixture, word: str) -> list[dict[str, str]]:
    """Return the fields of the log lines of one event."""
    found = [record.getMessage() for record in caplog.records]
    return [dict(re.findall(r"(\w+)=(\S+)", line)) for line in found if line.startswith(f"{word} ")]


def outgrow(engine: Engine) -> dict:
    """Let four requests grow, together, beyond the pages."""
    requests = [make_request(name, prompt_of(30, salt=i + 1), max_tokens=90) for i, name in enumerate(NAMES)]
    engine.submit(requests)
    deltas = drain(engine)
    for request in requests:
        check_output(request, deltas[request.request_id])
    return deltas


def test_a_preemption_names_victim_taker_shortage_and_setting(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="scheduler")
    engine, _ = make_engine(num_pages=PAGES, max_running=4)
    outgrow(engine)
    preempted = lines(caplog, "preempted")
    assert len(preempted) == engine.stats().preemptions > 1
    first = preempted[0]
    assert (first["request"], first["short"], first["raise"]) == ("r3", "pages", "gpu.kv_cache_gib")
    assert first["for"] in NAMES
    assert (first["priority"], first["for_priority"]) == ("0", "0")
    assert int(first["pages_free"]) == 0
    assert 30 < int(first["context_tokens"]) < 120


def test_a_preemption_says_whose_priority_decided(caplog: pytest.LogCaptureFixture) -> None:
    """The victim is not the latest arrival."""
    engine, _ = make_engine(num_pages=PAGES, max_running=4)
    ranks = dict(zip(NAMES, (3, 7, 0, 0), strict=True))
    requests = [
        structs.replace(make_request(name, prompt_of(30, salt=i), max_tokens=90), priority=rank)
        for i, (name, rank) in enumerate(ranks.items())
    ]
    engine.submit(requests)
    drain(engine)
    first = lines(caplog, "preempted")[0]
    assert (first["request"], first["priority"]) == ("r1", "7")
    assert int(first["for_priority"]) == ranks[first["for"]]


def test_a_preemption_for_host_memory_names_that(caplog: pytest.LogCaptureFixture) -> None:
    engine, _ = host_engines.make_engine(limit_blocks=44, num_pages=200)
    older = ask("older", prompt_of(500), max_tokens=130)
    run(engine, [older, ask("younger", prompt_of(RESIDENT, salt=1), max_tokens=100)])
    (line,) = lines(caplog, "preempted")
    assert (line["request"], line["short"], line["raise"]) == ("younger", "host", "host.memory_limit_gib")
    assert int(line["pages_free"]) > 0


def test_where_the_host_refuses_pages_a_preemption_asks_for_fewer(caplog: pytest.LogCaptureFixture) -> None:
    outgrow(make(Host(PAGES), max_running=4))
    settings = [line.keys() & {"raise", "lower"} for line in lines(caplog, "preempted")]
    assert settings
    assert all(named == {"lower"} for named in settings)


def test_a_resumed_request_says_how_long_it_waited_and_what_it_found(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="scheduler")
    engine, runner = make_engine(num_pages=PAGES, max_running=4)
    outgrow(engine)
    preempted, resumed = lines(caplog, "preempted"), lines(caplog, "resumed")
    assert sorted(line["request"] for line in resumed) == sorted(line["request"] for line in preempted)
    starts = [prompt for plan in runner.plans for job in plan.new_jobs for prompt in job.prompts if prompt.samples]
    assert [(int(line["found_tokens"]), int(line["of"])) for line in resumed] == [
        (prompt.begin, len(prompt.token_ids)) for prompt in starts
    ]
    assert all(0.0 <= float(line["waited_s"]) < 60.0 for line in resumed)


def test_tokens_that_are_computed_again_are_counted_and_new_ones_are_not(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="scheduler")
    engine, _ = make_engine(num_pages=PAGES, max_running=4, prefix_cache=False)
    outgrow(engine)
    stats, resumed = engine.stats(), lines(caplog, "resumed")
    again = [(int(line["of"]) - 1, int(line["computed_again"])) for line in resumed]
    assert all(found == wanted for wanted, found in again), "all but the token that it was to feed next"
    assert stats.recomputed_tokens == sum(found for _, found in again) > 0
    assert stats.prefix_queries_tokens == 4 * 30, "a resumed request looks for its tokens, and is counted once"


def test_a_prefill_that_is_preempted_counts_the_share_that_was_done() -> None:
    engine, _ = make_engine(chunk_tokens=100, prefix_cache=False)
    engine.submit([make_request("a", prompt_of(100), max_tokens=2)])
    for _ in range(2):
        engine.step()
    (job,) = engine.scheduler._prefill.jobs
    done = 100 * job.layer // job.num_layers
    assert 0 < done < 100
    engine.scheduler.roster.preempt_last(job.sequences)
    drain(engine)
    assert engine.stats().recomputed_tokens == done


def test_each_request_reports_its_own_preemptions() -> None:
    engine, _ = make_engine(num_pages=PAGES, max_running=4, prefix_cache=False)
    deltas = outgrow(engine)
    again = [deltas[name][-1].figures.get(PREEMPTED_AGAIN, 0) for name in NAMES]
    assert sum(again) == engine.stats().recomputed_tokens > 0
    told = {name: deltas[name][-1].figures.get(PREEMPTIONS, 0) for name in NAMES}
    assert told["r0"] == 0
    assert sum(told.values()) == engine.stats().preemptions > 1

"""What routers read in /metrics: vLLM's names, with this engine's numbers."""

import asyncio

from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from scheduler.messages import Stats
from server.engine.prometheus import Metrics
from server.engine.router_metrics import RouterMetrics
from tests.server.live_server import fake_command, make_deployment, plan_of, running_server
from tests.server.test_engine_metrics import STATS

NAMES = {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"}


def read(text: str) -> dict[str, tuple[dict[str, str], float]]:
    """Return the labels and the value of each of vLLM's metrics."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {one.name[5:]: (one.labels, one.value) for one in samples if one.name.startswith("vllm:")}


def test_vllms_gauges_have_the_engines_numbers_and_the_caches_sizes() -> None:
    memory, metrics = plan_of(make_deployment()), Metrics()
    metrics.show_more(
        RouterMetrics("some/model", memory, ["first", "second", "third"], True, lambda: metrics.stats.latest, lambda: 0)
    )
    idle = read(metrics.text().decode())
    of_model = {"model_name": "some/model", "engine": "0"}
    assert idle.keys() == NAMES | {"lora_requests_info"}
    assert idle["num_requests_running"] == (of_model, 0)
    stats: Stats = replace(STATS, running_adapters=[1, 3], waiting_adapters=[2])
    metrics.stats.take(stats)
    told = read(metrics.text().decode())
    assert told["num_requests_running"] == (of_model, STATS.num_running + STATS.num_prefilling)
    assert told["num_requests_waiting"] == (of_model, STATS.num_waiting)
    assert told["kv_cache_usage_perc"] == (of_model, STATS.pages_used / STATS.pages_total)
    labels, value = told["cache_config_info"]
    assert value == 1
    assert labels["block_size"] == str(memory.page_tokens)
    assert labels["num_gpu_blocks"] == str(memory.num_pages)
    assert labels["enable_prefix_caching"] == "True"
    labels, seconds = told["lora_requests_info"]
    assert labels == {"max_lora": "3", "running_lora_adapters": "first,third", "waiting_lora_adapters": "second"}
    assert seconds >= idle["lora_requests_info"][1] > 0


async def test_requests_that_wait_for_a_load_are_among_those_that_wait() -> None:
    first, other = make_deployment(), make_deployment()
    other = other.model_copy(update={"model": other.model.model_copy(update={"name": "other"})})
    models = {"reference": {}, "other": {"load_s": 1.0}}
    async with running_server(first, fake_command(models=models), others=[other]) as live:
        bodies = [{"model": "other", "prompt": "hello", "max_tokens": 2}] * 3
        calls = [asyncio.create_task(live.http.post("/v1/completions", json=body)) for body in bodies]

        async def waiting() -> float:
            text = (await live.http.get("/metrics")).text
            return max(
                sample.value for family in text_string_to_metric_families(text) for sample in family.samples
                if sample.name == "vllm:num_requests_waiting" and sample.labels["model_name"] == "other"
            )  # fmt: skip

        async def all_wait() -> bool:
            return await waiting() == 3

        await live.until(all_wait)
        assert {answer.status_code for answer in await asyncio.gather(*calls)} == {200}
        assert await waiting() == 0


async def test_a_server_has_both_families_and_of_several_models_each_has_its_own() -> None:
    first, other = make_deployment(), make_deployment()
    other = other.model_copy(update={"model": other.model.model_copy(update={"name": "other"})})
    async with running_server(first, fake_command(), others=[other]) as live:
        text = (await live.http.get("/metrics")).text
    assert read(text).keys() == NAMES
    models = [
        (sample.labels["model"], sample.labels["model_name"])
        for family in text_string_to_metric_families(text) for sample in family.samples
        if sample.name == "vllm:num_requests_waiting"
    ]  # fmt: skip
    assert models == [("reference", "reference"), ("other", "other")]
    assert "\ntandem_requests_waiting" in text

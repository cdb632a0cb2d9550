"""A plan with every field set, for tests to change one of."""

from dataclasses import replace
from typing import Any

from bench.load.load_plan import LoadPlan, parse_lengths

PLAN = LoadPlan(
    url="http://127.0.0.1:1",
    api_key=None,
    model=None,
    endpoint="completions",
    concurrency=4,
    rate=None,
    burstiness=1.0,
    requests=8,
    duration_s=None,
    input_tokens=parse_lengths("--input-tokens", "50"),
    output_tokens=parse_lengths("--output-tokens", "4"),
    shared_prefix_share=0.0,
    cache="as it comes",
    text_files=(),
    tokenizer=None,
    conversations=None,
    corpus=None,
    ignore_eos=False,
    include_usage=True,
    attention_profile=None,
    extra_body={},
    temperature=0.0,
    seed=0,
    slo={},
    timeout_s=20.0,
    retries=0,
    warmup=0,
)


def make_plan(**changes: Any) -> LoadPlan:
    return replace(PLAN, **changes)

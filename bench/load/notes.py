"""List the notes that a reader of the numbers needs, and the settings of the run."""

from bench.load.load_figures import Summary
from bench.load.load_plan import LoadPlan

_LATE_MS = 20.0
"""If half of the requests were sent later than this, arrivals were not as asked for."""


def list_notes(plan: LoadPlan, summary: Summary, counting: str, interrupted: bool) -> list[str]:
    """Return the notes that a reader of the numbers needs."""
    notes = []
    if interrupted:
        notes.append(f"interrupted: this is what was measured until then; {summary.unfinished} requests were open")
    lost = summary.failed + summary.unfinished + summary.skipped
    if lost:
        notes.append(
            f"{lost} of {summary.due} requests did not complete: "
            f"latencies and tokens are of the other {summary.completed}"
        )
    if "ESTIMATED" in counting:
        notes.append(f"prompt lengths are {counting}")
    if summary.mean_length_error_tokens is not None and abs(summary.mean_length_error_tokens) >= 1:
        notes.append(
            f"the server counts {summary.mean_length_error_tokens:+.1f} tokens a prompt against what was asked "
            "(chat templates add some)"
        )
    guessed = {source: count for source, count in summary.output_sources.items() if source != "usage"}
    for source, count in guessed.items():
        notes.append(f"{count} answers came without usage: their tokens are counted from {source}")
    if summary.num_chunk_mismatches:
        notes.append(
            f"{summary.num_chunk_mismatches} of {summary.completed} answers have not as many tokens as chunks "
            f"({summary.tokens_per_chunk:.2f} tokens a chunk): inter-token latency is the gap between chunks"
        )
    if plan.is_open_loop and summary.send_lag.p50 > _LATE_MS:
        why = "--concurrency holds requests back" if plan.concurrency else "the client cannot keep up"
        late = f"half of the requests were sent {summary.send_lag.p50:.0f} ms late or more"
        notes.append(f"{late}: {why}; latencies include it")
    return notes


def describe_settings(plan: LoadPlan, model: str, counting: str) -> dict[str, str]:
    """Return the run's settings as label to value, without the API key."""
    rate = f"open loop, {plan.rate:g} per second, gamma shape {plan.burstiness:g}" if plan.rate else "closed loop"
    limit = f", at most {plan.concurrency} open" if plan.concurrency else ""
    length = f"{plan.requests} requests" if plan.requests is not None else f"{plan.duration_s:g} s"
    settings = {"server": plan.base_url, "model": model, "shape": plan.shape}
    settings |= {"arrival": rate + limit, "length": length}
    if plan.corpus is not None:
        settings["documents"] = f"{plan.corpus.shape}, written by the client"
        settings["token counts"] = counting
    elif plan.conversations is None:
        settings["text"] = ", ".join(path.name for path in plan.text_files) or "written by the client"
        settings["token counts"] = counting
    else:
        settings["conversations"] = plan.conversations.name
    settings["prefix cache"] = plan.cache
    settings["shared prefix"] = f"{plan.shared_prefix_share:.0%} of a prompt's tokens"
    settings["sampling"] = f"temperature {plan.temperature:g}" + (", ignore_eos" if plan.ignore_eos else "")
    settings["attention profile"] = plan.attention_profile or "the server's default"
    if plan.extra_body:
        settings["extra body"] = str(plan.extra_body)
    settings["seed"] = str(plan.seed)
    settings["timeout, retries of 429"] = f"{plan.timeout_s:g} s, {plan.retries}"
    settings["warm-up requests"] = str(plan.warmup)
    return settings

"""Run `tandem bench serve`: make a plan of the options, measure, and write files. Heavy imports happen when it runs."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from bench.load.load_plan import LoadPlan
    from bench.load.measure import LoadResult

_INTERRUPTED = 130
_STDOUT = Path("-")


def serve(
    url: Annotated[str, typer.Option(help="server, with or without http:// and /v1")] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="bearer key")] = None,
    model: Annotated[str | None, typer.Option(help="default: the first of /v1/models")] = None,
    kind: Annotated[
        Literal["prompts", "rag"], typer.Option(help="rag: chats with documents of a corpus, in new orders")
    ] = "prompts",
    endpoint: Annotated[
        Literal["completions", "chat"] | None, typer.Option(help="route to measure; default: completions, of rag chat")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="closed loop: requests open at once (8); with --rate: at most so many")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="open loop: requests per second, Poisson")] = None,
    burstiness: Annotated[float, typer.Option(help="gamma shape of the gaps: 1 Poisson, less in bursts")] = 1.0,
    requests: Annotated[int | None, typer.Option(min=1, help="prompts or conversations to send (64)")] = None,
    duration: Annotated[float | None, typer.Option(min=0.1, help="or: send for so many seconds")] = None,
    input_tokens: Annotated[
        str | None, typer.Option(help="1000, 500-2000, 500,2000 or 500:0.8,2000:0.2; of rag: the question's (32)")
    ] = None,
    output_tokens: Annotated[str, typer.Option(help="max_tokens, in the same forms")] = "128",
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="ask the server to write all of them")] = False,
    shared_prefix_share: Annotated[float, typer.Option(help="share of each prompt common to all, 0 to 1")] = 0.0,
    warm: Annotated[bool, typer.Option("--warm", help="send the shared prefix once before measuring")] = False,
    cold: Annotated[bool, typer.Option("--cold", help="a new salt before each prompt: nothing is cached")] = False,
    text: Annotated[
        list[Path] | None, typer.Option(help="text files to cut prompts from (their first 8 M characters)")
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="model folder, to count tokens exactly")] = None,
    conversations: Annotated[Path | None, typer.Option(help="JSONL of messages or ShareGPT (chat)")] = None,
    documents: Annotated[int, typer.Option(min=1, help="rag: documents of the corpus")] = 100,
    document_tokens: Annotated[str, typer.Option(help="rag: of a document, in the same forms")] = "500-2000",
    documents_per_prompt: Annotated[int, typer.Option(min=1, help="rag: different ones of each prompt")] = 8,
    zipf: Annotated[float, typer.Option(help="rag: popularity of rank r is r^-ZIPF; 0: all alike")] = 1.0,
    documents_as: Annotated[
        Literal["ids", "inline", "text"],
        typer.Option(help="rag: stored before and named, sent with each prompt, or as plain text of the message"),
    ] = "ids",
    turns: Annotated[int, typer.Option(min=1, help="rag: questions about the documents of a prompt, in turn")] = 1,
    attention_profile: Annotated[str | None, typer.Option(help="extension field of requests")] = None,
    extra_body: Annotated[str, typer.Option(help="JSON object merged into each request")] = "{}",
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="of prompts, arrivals and sampling")] = 0,
    slo: Annotated[str, typer.Option(help="limits in ms for goodput: ttft:2000,tpot:100,gap:500,e2el:30000")] = "",
    timeout: Annotated[float, typer.Option(min=0.01, help="seconds for a request, retries included")] = 600.0,
    retry: Annotated[int, typer.Option(min=0, help="send a 429 again so often, after its Retry-After")] = 0,
    warmup: Annotated[int, typer.Option(min=0, help="requests to send unmeasured first")] = 0,
    usage: Annotated[bool, typer.Option(help="ask for usage in the stream")] = True,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="write benchmark rows; -: print them, and all else on stderr")
    ] = None,
    raw: Annotated[Path | None, typer.Option(help="write a JSON line for each request")] = None,
    html: Annotated[Path | None, typer.Option(help="write the report as one page")] = None,
) -> None:
    """Send load to any OpenAI-compatible server, and measure what its users would experience.

    Latencies start when a request was due. Exit status: 1 if nothing completed, 2 for options that cannot be run,
    130 after Ctrl-C (with a report of what was measured).
    """
    from bench.load.load_plan import Corpus, LoadPlan, PlanError, parse_lengths, parse_slo

    try:
        corpus = None
        if kind == "rag":
            lengths = parse_lengths("--document-tokens", document_tokens)
            corpus = Corpus(documents, lengths, documents_per_prompt, zipf, documents_as, turns)
        plan = LoadPlan(
            url=url,
            api_key=api_key,
            model=model,
            endpoint=endpoint or ("completions" if corpus is None else "chat"),
            concurrency=concurrency if concurrency or rate is not None else 8,
            rate=rate,
            burstiness=burstiness,
            requests=requests if requests or duration is not None else 64,
            duration_s=duration,
            input_tokens=parse_lengths("--input-tokens", input_tokens or ("1000" if corpus is None else "32")),
            output_tokens=parse_lengths("--output-tokens", output_tokens),
            shared_prefix_share=shared_prefix_share,
            cache=_pick_cache(warm, cold),
            text_files=tuple(text or ()),
            tokenizer=tokenizer,
            conversations=conversations,
            corpus=corpus,
            ignore_eos=ignore_eos,
            include_usage=usage,
            attention_profile=attention_profile,
            extra_body=_parse_body(extra_body),
            temperature=temperature,
            seed=seed,
            slo=parse_slo(slo),
            timeout_s=timeout,
            retries=retry,
            warmup=warmup,
        )
        result = _measure(plan, json_file == _STDOUT)
    except PlanError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    _write(result, json_file, raw, html)
    if result.interrupted:
        raise typer.Exit(_INTERRUPTED)
    if result.summary.completed == 0:
        raise typer.Exit(1)


def _measure(plan: "LoadPlan", only_json: bool) -> "LoadResult":
    import uvloop
    from rich.console import Console

    from bench.load.client import StreamFault
    from bench.load.console import print_summary
    from bench.load.measure import measure

    plan.check()
    console = Console(stderr=only_json)
    console.print(f"[bold]{plan.base_url}[/bold]  {plan.shape}", highlight=False)
    try:
        result = uvloop.run(measure(plan, console))
    except StreamFault as fault:
        typer.echo(str(fault), err=True)
        raise typer.Exit(1) from None
    print_summary(result.summary, result.notes, console)
    return result


def _write(result: "LoadResult", json_file: Path | None, raw: Path | None, html: Path | None) -> None:
    from bench.load.row import make_row, write_raw

    if json_file == _STDOUT:
        typer.echo(json.dumps([make_row(result)]))
    elif json_file is not None:
        json_file.write_text(json.dumps([make_row(result)], indent=2) + "\n", encoding="utf-8")
    if raw is not None:
        write_raw(raw, result)
    if html is not None:
        from bench.load.notes import describe_settings
        from bench.load.report_page import write_page

        title = f"Load test of {result.model}"
        settings = describe_settings(result.plan, result.model, result.counting)
        write_page(html, title, result.plan.shape, result.summary, result.records, settings, result.notes)


def _pick_cache(warm: bool, cold: bool) -> Literal["warm", "cold", "as it comes"]:
    from bench.load.load_plan import PlanError

    if warm and cold:
        raise PlanError("--warm and --cold: got both; wanted one of them or neither")
    return "warm" if warm else "cold" if cold else "as it comes"


def _parse_body(text: str) -> dict[str, Any]:
    from bench.load.load_plan import PlanError

    try:
        tree = json.loads(text)
    except ValueError:
        tree = None
    if not isinstance(tree, dict):
        raise PlanError(f"--extra-body: got {text!r}; wanted a JSON object")
    return tree

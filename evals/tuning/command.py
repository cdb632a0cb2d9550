"""Run `tandem tune`: measure over the options' grid, print the table, and the configuration to paste."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evals.cells import CHOOSING_SEED, Cell, PromptSettings
from evals.options import Device, Json, Seed, Text, one_line_errors, parse_numbers, parse_tasks
from evals.score_rows import Row

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(no_args_is_help=True, help="Choose settings by measuring them on your own model.")

MODELS = Path("deploy/models")
DEAR = 2.0  # keys read, as a multiple of what even buckets would read
WRONG = 0.3  # relative error of attention's output, as a mean over layers


@app.callback()
def group() -> None:
    """Choose settings by measuring them on your own model."""


@app.command()
def lsh(
    model: Annotated[Path, typer.Option("--model", help="folder, its name in deploy/models, or GGUF file")],
    budget: Annotated[float, typer.Option(min=1e-5, max=1, help="share of the offloaded keys that a query head may "
                                          "read")] = 0.02,
    memory_gib: Annotated[float | None, typer.Option(min=0, help="hash tables of one context, at most")] = None,
    context: Annotated[int, typer.Option(min=256, help="tokens of the text that is measured")] = 4096,
    table_tokens: Annotated[int | None, typer.Option(min=256, help="tokens whose tables must fit memory_gib; default: "
                                                     "the context")] = None,
    queries: Annotated[int, typer.Option(min=1, help="positions of the text that are measured")] = 64,
    bits: Annotated[str, typer.Option("--bits", help="bits a table (the paper's K), commas between")] = "7,8,9,10,11",
    tables: Annotated[str, typer.Option("--tables", help="tables (the paper's L), commas between")] =
        "75,100,120,150,200,300",
    dense_layers: Annotated[str, typer.Option(help="layers read in full: ids, ranges and half joined by +")] = "0+half",
    text: Text = [],  # noqa: B006
    seed: Seed = CHOOSING_SEED,
    device: Device = "auto",
    json_path: Json = None,
    write: Annotated[Path | None, typer.Option("--write", metavar="FILE", help="a new deployment's file, which samples "
                                               "with what was chosen")] = None,
) -> None:  # fmt: skip
    """Choose bits_per_table and num_tables of LSH sampling for a budget of reads and of table memory.

    Prints the keys read and the error of each pair, from one pass of the model, and the lines of the configuration.
    """
    with one_line_errors():
        if write is not None and write.exists():
            raise FileExistsError(f"--write: {write} is there already; name another file")

        import torch

        from evals.fidelity import text_prompts
        from evals.forward import load_decoder
        from evals.methods.attention_method import parse_layers
        from evals.report.document import finite, write_document
        from evals.report.table import open_console
        from evals.session import progress_bar, resolve_device
        from evals.tasks.text import text_source
        from evals.tokenizer import load_tokenizer
        from evals.tuning.grid import Resident, Setting
        from evals.tuning.lsh import Budget, choose_setting, measure_grid, summarize_grid

        folder = model if model.exists() else MODELS / model
        grid = [
            Setting(one, many) for one in parse_numbers("--bits", bits) for many in parse_numbers("--tables", tables)
        ]
        on = resolve_device(device)
        dtype = torch.bfloat16 if on.startswith("cuda") else torch.float32
        decoder = load_decoder(folder, torch.device(on), dtype)
        prompts = text_prompts(load_tokenizer(folder), text_source(tuple(text), {}), context, 1, seed)
        resident = Resident(4, 64)
        with progress_bar(decoder.architecture.num_layers, "layers") as advance:
            found = measure_grid(decoder, prompts[0], grid, queries, resident, dense_layers, 0, advance)
        limit = None if memory_gib is None else memory_gib * 2**30
        rows = summarize_grid(found, decoder.architecture.num_kv_heads, table_tokens or context)
        console = open_console()
        print_grid(rows, table_tokens or context, console)
        configuration = {
            "model": str(folder), "context": len(prompts[0]), "queries": queries, "dense_layers": dense_layers,
            "budget": budget, "memory_gib": memory_gib, "table_tokens": table_tokens or context, "device": on,
            "text": [str(path) for path in text],
        }  # fmt: skip
        document = {"configuration": configuration, "seeds": {"text": seed, "projections": 0}, "rows": rows}
        if json_path is not None:
            write_document(json_path, finite(document))
        chosen = choose_setting(rows, Budget(budget, limit))
        print_choice(chosen, budget)
        if write is not None:
            write.write_text(deployment_of(folder, chosen, parse_layers(dense_layers, decoder.architecture.num_layers)))
            print(f"wrote {write}: tandem serve {write}")


def deployment_of(folder: Path, row: Row, dense_layers: set[int]) -> str:
    """Return the text of a deployment's file that samples with the chosen settings and leaves the rest to defaults."""
    import yaml

    sampled = {key: row[key] for key in ("bits_per_table", "num_tables")}
    warnings = "".join(f"# {warning}\n" for warning in warnings_of(row))
    host = {"dense_layers": sorted(dense_layers), "sampled": sampled}
    sections = {"model": {"path": str(folder.resolve())}, "scheduler": {"default_profile": "sampled"}, "host": host}
    return warnings + yaml.safe_dump(sections, sort_keys=False)


def print_grid(rows: list[Row], table_tokens: int, console: "Console") -> None:
    from rich.table import Table

    from evals.report.table import percent

    table = Table("K (bits)", "L (tables)", "keys read", "by equation 21", f"tables of {table_tokens:,} tokens",
                  "error", "worst layer")  # fmt: skip
    for row in rows:
        table.add_row(str(row["bits_per_table"]), str(row["num_tables"]), f"{row['read']:.2%}",
                      f"{row['read_even_buckets']:.2%}", f"{row['memory_bytes'] / 2**30:.3f} GiB",
                      percent(row["error"]), f"{percent(row['worst_error'])} ({row['worst_layer']})")  # fmt: skip
    console.print(table)


def print_choice(row: Row, budget: float) -> None:
    pair = f"K {row['bits_per_table']}, L {row['num_tables']}"
    print(f"least error within {budget:.2%} of the keys: {pair}, reads {row['read']:.2%}, error {row['error']:.1%}, "
          f"tables {row['memory_bytes'] / 2**30:.3f} GiB a context")  # fmt: skip
    for warning in warnings_of(row):
        print(f"warning: {warning}")
    print(f"host:\n  sampled: {{bits_per_table: {row['bits_per_table']}, num_tables: {row['num_tables']}}}")


def warnings_of(row: Row) -> list[str]:
    """Return warnings if sampling reads too much or errs too much for this model, even at its best setting."""
    found = []
    if row["read"] > DEAR * row["read_even_buckets"]:
        found.append(
            f"sampling is expensive for this model: it reads {row['read']:.2%} of the keys, even buckets would take "
            f"{row['read_even_buckets']:.2%}; its keys crowd in few buckets; `offloaded` reads all keys, exactly"
        )
    if row["error"] > WRONG or row["worst_error"] > 2 * WRONG:
        found.append(
            f"sampling is inaccurate for this model: attention is off by {row['error']:.1%}, and by "
            f"{row['worst_error']:.1%} in layer {row['worst_layer']}; allow a larger --budget, keep that "
            "layer in host.dense_layers, or use `offloaded`"
        )
    return found


@app.command()
def indexed(
    model: Annotated[Path, typer.Option("--model", help="folder, its name in deploy/models, or GGUF file")],
    kl: Annotated[float, typer.Option("--kl", min=0, help="of the next token against full attention, at most, in "
                                      "nats")] = 0.003,
    key_bits: Annotated[str, typer.Option("--key-bits", help="commas between")] = "4",
    value_bits: Annotated[str, typer.Option("--value-bits", help="commas between")] = "2,4",
    shares: Annotated[str, typer.Option("--shares", help="budget_share, commas between")] = "0.002,0.005,0.02",
    context: Annotated[int, typer.Option(min=256, help="tokens of each text that is measured")] = 4096,
    steps: Annotated[int, typer.Option(min=8, help="of these, tokens at its end that are decoded")] = 64,
    samples: Annotated[int, typer.Option(min=1, help="texts")] = 2,
    names: Annotated[str, typer.Option("--tasks", help="whose score is measured as well, commas between; empty: "
                                       "none")] = "niah_single_2,niah_multikey_1,niah_multivalue",
    prompts: Annotated[int, typer.Option(min=1, help="of each task, at most")] = 8,
    seconds: Annotated[float, typer.Option(min=0, help="for tasks, which end after so long with what is "
                                           "finished")] = 120.0,
    text: Text = [],  # noqa: B006
    seed: Seed = CHOOSING_SEED,
    device: Device = "auto",
    json_path: Json = None,
) -> None:  # fmt: skip
    """Choose the bits and the budget of the index of `host: indexed`: the fewest bytes that keep the KL of the next
    token within a limit and do not certainly lose points on tasks.

    Prints for each setting its bytes, attention's error, the KL along full attention's tokens, and its score on tasks
    beside full attention's; then the lines of the configuration.
    """
    with one_line_errors():
        import torch

        from evals.fidelity import text_prompts
        from evals.forward import load_decoder
        from evals.report.document import finite, write_document
        from evals.report.table import open_console
        from evals.run import form_of
        from evals.session import progress_bar, resolve_device
        from evals.stopping import stopping
        from evals.tasks.text import text_source
        from evals.tokenizer import load_tokenizer
        from evals.tuning.index import KEPT, choose_index, make_grid, measure_index
        from evals.tuning.index_tasks import add_scores, describe_gate, run_tasks

        tasks = parse_tasks(names)
        folder = model if model.exists() else MODELS / model
        bits = parse_numbers("--key-bits", key_bits), parse_numbers("--value-bits", value_bits)
        grid = make_grid(*bits, [float(share) for share in shares.split(",")])
        on = resolve_device(device)
        decoder = load_decoder(folder, torch.device(on), torch.bfloat16 if on.startswith("cuda") else torch.float32)
        texts = text_prompts(load_tokenizer(folder), text_source(tuple(text), {}), context, samples, seed)
        with progress_bar(len(grid), "settings") as advance:
            rows = measure_index(decoder, texts, grid, steps, advance)
        with progress_bar(prompts if tasks else 0, "prompts of each task") as advance, stopping(seconds) as stop:
            settings = PromptSettings(folder, form_of(folder), seed, tuple(text))
            cells = [Cell(name, context, prompts, (), 0) for name in tasks]
            rows = add_scores(rows, run_tasks(decoder, cells, settings, grid, stop, advance))
        print_index(rows, open_console())
        configuration = {
            "model": str(folder), "context": context, "steps": steps, "samples": samples, "kl": kl, "device": on,
            "text": [str(path) for path in text], "tasks": tasks, "prompts": prompts, "seconds": seconds,
        }  # fmt: skip
        if json_path is not None:
            write_document(json_path, finite({"configuration": configuration, "seeds": {"text": seed}, "rows": rows}))
        chosen = choose_index(rows, kl)
        print(f"fewest bytes: {chosen['bytes']:.1%} of all keys and values, error {chosen['error']:.1%}, KL "
              f"{chosen['kl']:.4f}")  # fmt: skip
        print(f"gate: {describe_gate(chosen, kl, tasks)}")
        words = ", ".join(f"{name}: {chosen[name]:g}" for name in KEPT)
        print(f"profiles:\n  indexed:\n    host: {{method: indexed, {words}}}")


def print_index(rows: list[Row], console: "Console") -> None:
    from rich.table import Table

    from evals.report.table import percent, with_range

    table = Table("key bits", "value bits", "budget", "index, bytes a token", "bytes read", "error", "worst layer",
                  "KL", "tasks: exact", "by index", "difference")  # fmt: skip
    for row in rows:
        table.add_row(str(row["key_bits"]), str(row["value_bits"]), f"{row['budget_share']:.2%}",
                      f"{row['index_bytes']:g}", f"{row['bytes']:.1%}", percent(row["error"]),
                      f"{percent(row['worst_error'])} ({row['worst_layer']})", f"{row['kl']:.4f}",
                      with_range(row["task_exact"], None, None, ""), with_range(row["task_score"], None, None, ""),
                      with_range(row["task_difference"], row["task_low"], row["task_high"], "+"))  # fmt: skip
    console.print(table)


@app.command()
def prefill(
    model: Annotated[Path, typer.Option("--model", help="Hugging Face folder, its name in deploy/models, or a named "
                                        "shape")],
    depths: Annotated[str, typer.Option("--depths", help="positions where units begin, commas between")] =
        "2048,4096,8192,12288,16384,24576,32768,65536",
    unit_tokens: Annotated[int, typer.Option("--unit-tokens", min=16, help="as prefill.chunk_tokens has it")] = 2048,
    settings: Annotated[list[str], typer.Option("--set", help="SETTING=VALUE of MOMO; repeatable")] = [],  # noqa: B006
    device: Device = "auto",
    json_path: Json = None,
) -> None:  # fmt: skip
    """Choose dense_until_tokens of MOMO's prefill: the position from which it is faster than dense prefill here.

    Prints how long a unit of one layer takes both ways at each depth, and the lines of the configuration.
    """
    with one_line_errors():
        import torch

        from evals.report.document import finite, write_document
        from evals.report.table import open_console
        from evals.session import progress_bar, resolve_device
        from evals.tuning.momo import choose_dense_until, measure_depths
        from gpu.methods.momo.settings import MomoSettings
        from gpu.model.architecture import NAMED_SHAPES, read_architecture

        given = dict(setting.split("=", 1) for setting in settings)
        momo = MomoSettings.model_validate(given)
        places = parse_numbers("--depths", depths)
        for name, number in (("--unit-tokens", unit_tokens), *(("--depths", place) for place in places)):
            if number % momo.query_block:
                raise ValueError(f"{name}: got {number}; wanted multiples of query_block ({momo.query_block})")
        if str(model) in NAMED_SHAPES:
            shape = NAMED_SHAPES[str(model)]
        else:
            shape = read_architecture(model if model.exists() else MODELS / model)
        on = resolve_device(device)
        with progress_bar(len(places), "depths") as advance:
            rows = measure_depths(shape, momo, places, unit_tokens, torch.device(on), advance)
        print_depths(rows, open_console())
        until = choose_dense_until(rows)
        configuration = {"model": str(model), "unit_tokens": unit_tokens, "set": given, "device": on}
        if json_path is not None:
            write_document(
                json_path, finite({"configuration": configuration, "rows": rows, "dense_until_tokens": until})
            )
        if until is None:
            print("momo: slower than dense at the deepest of these depths; leave `prefill` out, or measure deeper")
            return
        words = ", ".join(f"{key}: {value}" for key, value in (given | {"dense_until_tokens": until}).items())
        print(f"profiles:\n  fast:\n    prefill: {{method: momo, {words}}}")


def print_depths(rows: list[Row], console: "Console") -> None:
    from rich.table import Table

    table = Table("unit begins at", "dense, ms", "momo, ms", "times faster")
    for row in rows:
        table.add_row(f"{row['depth']:,}", f"{row['dense_ms']:.3f}", f"{row['momo_ms']:.3f}",
                      f"{row['dense_ms'] / row['momo_ms']:.2f}")  # fmt: skip
    console.print(table)


@app.command()
def mac(
    model: Annotated[Path, typer.Option("--model", help="folder, its name in deploy/models, or GGUF file")],
    taus: Annotated[str, typer.Option("--taus", help="thresholds, commas between")] = "0.3,0.45,0.6,0.75,0.9",
    windows: Annotated[str, typer.Option("--windows", help="CAPACITY:BAND (the paper's K and r), commas between; the "
                                         "proposal is of the first")] = "1024:256",
    error: Annotated[float, typer.Option("--error", min=0, help="of a head's output in a layer, at most")] = 0.02,
    context: Annotated[int, typer.Option(min=256, help="tokens of the text that is measured")] = 4096,
    steps: Annotated[int, typer.Option(min=8, help="of these, tokens at its end that are decoded")] = 256,
    text: Text = [],  # noqa: B006
    seed: Seed = CHOOSING_SEED,
    device: Device = "auto",
    json_path: Json = None,
) -> None:  # fmt: skip
    """Choose a threshold for each layer of MAC-Attention: the lowest one whose error stays within a limit.

    Prints what each layer accepts and skips and its error at each threshold, from one pass of the model, and the lines
    of the configuration. Thresholds assume queries of unit variance, which a model's need not have.
    """
    with one_line_errors():
        import torch

        from evals.fidelity import text_prompts
        from evals.forward import load_decoder
        from evals.report.document import finite, write_document
        from evals.report.table import open_console
        from evals.session import progress_bar, resolve_device
        from evals.tasks.text import text_source
        from evals.tokenizer import load_tokenizer
        from evals.tuning.mac import choose_taus, measure_layers
        from evals.tuning.mac_method import Mac

        folder = model if model.exists() else MODELS / model
        sizes = [parse_window(window) for window in windows.split(",")]
        methods = [
            Mac(tau=float(tau), capacity=capacity, band=band) for capacity, band in sizes for tau in taus.split(",")
        ]
        if steps >= context:
            raise ValueError(f"--steps: got {steps}; wanted fewer than --context ({context})")
        on = resolve_device(device)
        dtype = torch.bfloat16 if on.startswith("cuda") else torch.float32
        decoder = load_decoder(folder, torch.device(on), dtype)
        (prompt,) = text_prompts(load_tokenizer(folder), text_source(tuple(text), {}), context, 1, seed)
        with progress_bar(steps, "tokens") as advance:
            rows = measure_layers(decoder, prompt, steps, methods, advance)
        print_layers(rows, open_console())
        capacity, band = sizes[0]
        chosen = choose_taus([row for row in rows if (row["capacity"], row["band"]) == (capacity, band)], error)
        configuration = {
            "model": str(folder), "context": len(prompt), "steps": steps, "error": error, "device": on,
            "text": [str(path) for path in text],
        }  # fmt: skip
        if json_path is not None:
            document = {"configuration": configuration, "seeds": {"text": seed}, "rows": rows, "layer_tau": chosen}
            write_document(json_path, finite(document))
        words = ", ".join(f"{layer}: {tau}" for layer, tau in chosen.items())
        print(f"profiles:\n  reusing:\n    reuse: {{method: mac, capacity: {capacity}, band: {band}, "
              f"layer_tau: {{{words}}}}}")  # fmt: skip


def parse_window(window: str) -> tuple[int, int]:
    """Parse `1024:256` to capacity and band. Raises ValueError."""
    capacity, colon, band = window.partition(":")
    if not (colon and capacity.isdigit() and band.isdigit()):
        raise ValueError(f"--windows: got {window!r}; wanted CAPACITY:BAND, such as 1024:256")
    return int(capacity), int(band)


def print_layers(rows: list[Row], console: "Console") -> None:
    from rich.table import Table

    table = Table("K:r", "tau", "layer", "accepted", "skipped", "gap", "error")
    for row in rows:
        table.add_row(f"{row['capacity']}:{row['band']}", f"{row['tau']:g}", str(row["layer"]),
                      f"{row['acceptance']:.1%}", f"{row['skipped_fraction']:.1%}", f"{row['gap']:.0f}",
                      f"{row['error']:.2%}")  # fmt: skip
    console.print(table)

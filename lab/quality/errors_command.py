"""Run `python -m lab errors`: are the standard errors that sampled answers come with what these are off by?"""

from typing import TYPE_CHECKING, Annotated

import typer

from evals.options import Device, Json, Lengths, ModelFolder, Seed, Text, one_line_errors, parse_lengths, parse_tasks

if TYPE_CHECKING:
    from rich.console import Console

    from evals.score_rows import Row


def errors(
    model: ModelFolder,
    lengths: Lengths = "4096",
    names: Annotated[str, typer.Option("--tasks", help="names with commas; default: running text")] = "",
    samples: Annotated[int, typer.Option("--samples", min=1, help="prompts a task and length")] = 1,
    bits: Annotated[int, typer.Option("--bits", min=1, max=16, help="the paper's K")] = 10,
    tables: Annotated[int, typer.Option("--tables", min=2, help="the paper's L")] = 150,
    exclude: Annotated[str, typer.Option("--exclude", help="tokens of the best blocks by the query before, left out of "
                                         "the sample as predicted ones are; commas between")] = "0,512",
    steps: Annotated[int, typer.Option("--steps", min=1, help="last queries of each prompt")] = 16,
    draws: Annotated[int, typer.Option("--draws", min=1, help="of hyperplanes")] = 4,
    exempt: Annotated[int, typer.Option("--exempt", min=0, help="first layers, which never sample")] = 2,
    text: Text = [],  # noqa: B006
    seed: Seed = 0,
    device: Device = "auto",
    json_path: Json = None,
) -> None:  # fmt: skip
    """Compare the errors of sampled answers with the standard errors that the host estimates from their samples.

    By the kernel that serves, of a model's own keys and queries. Aim: 90 to 99 % within two estimated errors.
    """
    with one_line_errors():
        import torch

        from evals.forward import load_decoder
        from evals.report.document import finite, write_document
        from evals.report.table import open_console
        from evals.session import progress_bar, resolve_device
        from lab.quality.recovery_prompts import recovery_prompts
        from lab.quality.sample_errors import Draws, measure_errors, pool_errors

        on, sizes, tasks = resolve_device(device), parse_lengths(lengths), parse_tasks(names) or ["text"]
        left_out = [int(number) for number in exclude.split(",")]
        decoder = load_decoder(model, torch.device(on), torch.bfloat16 if on.startswith("cuda") else torch.float32)
        num_layers, rows = decoder.architecture.num_layers, []
        with progress_bar(len(sizes) * len(left_out) * len(tasks) * samples * num_layers, "layers") as advance:
            for length in sizes:
                prompts = [
                    one for task in tasks for one in recovery_prompts(model, task, length, samples, seed, tuple(text))
                ]
                for tokens in left_out:
                    settings = Draws(bits, tables, steps, 64, 64, tokens, draws, torch.get_num_threads())
                    found = measure_errors(decoder, prompts, settings, range(exempt, num_layers), advance)
                    rows += [{"length": length, "excluded": tokens, **row} for row in pool_errors(found)]
        print_errors(rows, open_console())
        configuration = {
            "model": str(model), "lengths": sizes, "tasks": tasks, "samples": samples, "bits_per_table": bits,
            "num_tables": tables, "steps": steps, "draws": draws, "exempt_layers": exempt, "device": on,
            "text": [path.name for path in text],
        }  # fmt: skip
        if json_path is not None:
            write_document(json_path, finite({"configuration": configuration, "seeds": {"text": seed}, "rows": rows}))


def print_errors(rows: "list[Row]", console: "Console") -> None:
    """A line for each length, what is left out, and kind of heads."""
    from rich.table import Table

    table = Table("length", "left out", "heads", "answers", "log mass within 2", "output within 2", "other directions",
                  "log mass: error", "estimate", "output: error", "estimate")  # fmt: skip
    for row in rows:
        shares = [f"{100 * row[name]:.1f} %" if name in row else "" for name in
                  ("log_mass_within", "output_within", "other_directions_within")]  # fmt: skip
        sizes = [f"{row[name]:.4f}" if name in row else "" for name in
                 ("log_mass_error", "log_mass_estimate", "output_error", "output_estimate")]  # fmt: skip
        table.add_row(f"{row['length']:,}", f"{row['excluded']:,} tokens", row["heads"], f"{row['answers']:,}",
                      *shares, *sizes)  # fmt: skip
    console.print(table)

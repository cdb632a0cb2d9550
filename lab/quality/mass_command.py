"""Run `python -m lab mass`: compare the attention mass that MOMO reads with what other choices hold."""

from typing import TYPE_CHECKING, Annotated

import typer

from evals.options import Device, Json, Lengths, ModelFolder, Seed, Text, one_line_errors, parse_lengths

if TYPE_CHECKING:
    from rich.console import Console


def mass(
    model: ModelFolder,
    lengths: Lengths = "8192,16384",
    trims: Annotated[str, typer.Option("--k-trim", help="key blocks a query block reads, with commas")] = "32,64",
    settings: Annotated[list[str], typer.Option("--set", help="SETTING=VALUE of MOMO; repeatable")] = [],  # noqa: B006
    looks: Annotated[int, typer.Option("--looks", min=1, help="query blocks that are looked at a layer, in the text's "
                                       "second half")] = 8,
    text: Text = [],  # noqa: B006
    seed: Seed = 0,
    device: Device = "auto",
    json_path: Json = None,
) -> None:  # fmt: skip
    """Compare the attention mass that MOMO's key blocks hold with the best that as many could, and with other choices.

    All read as many keys. Cosines are those of MOMO's output to the exact one, without and with the delta correction.
    """
    with one_line_errors():
        import torch

        from evals.fidelity import text_prompts
        from evals.forward import load_decoder
        from evals.options import parse_numbers
        from evals.report.document import finite, write_document
        from evals.report.table import open_console
        from evals.session import progress_bar, resolve_device
        from evals.tasks.text import text_source
        from evals.tokenizer import load_tokenizer
        from gpu.methods.momo.settings import MomoSettings
        from lab.quality.block_mass import measure_prompt, pool_layers

        on, sizes = resolve_device(device), parse_lengths(lengths)
        given = dict(setting.split("=", 1) for setting in settings)
        grid = [
            {**given, "selection": selection, "k_trim": trim}
            for trim in parse_numbers("--k-trim", trims)
            for selection in ("exact", "estimated")
        ]
        decoder = load_decoder(model, torch.device(on), torch.bfloat16 if on.startswith("cuda") else torch.float32)
        tokenizer, rows, layers = load_tokenizer(model), [], []
        with progress_bar(len(sizes) * decoder.architecture.num_layers, "layers") as advance:
            for length in sizes:
                (prompt,) = text_prompts(tokenizer, text_source(tuple(text), {}), length, 1, seed)
                tried = [MomoSettings.model_validate({"dense_until_tokens": length // 2, **one}) for one in grid]
                found = measure_prompt(decoder, prompt, tried, looks, advance)
                layers += [{"length": length, **row} for row in found]
                rows += [{"length": length, **row} for row in pool_layers(found, tried)]
        print_mass(rows, open_console())
        configuration = {"model": str(model), "lengths": sizes, "looks": looks, "set": given, "device": on,
                         "text": [path.name for path in text]}  # fmt: skip
        document = {"configuration": configuration, "seeds": {"text": seed}, "rows": rows, "layers": layers}
        if json_path is not None:
            write_document(json_path, finite(document))


def print_mass(rows: list, console: "Console") -> None:
    """A line for each length, selection and number of blocks."""
    from rich.table import Table

    table = Table("length", "blocks", "selection", "MOMO", "best", "layer furthest off it", "a group's heads together",
                  "mean pool", "vertical-slash", "cosine", "with delta")  # fmt: skip
    for row in rows:
        shares = [f"{100 * row[name]:.2f} %" for name in ("momo", "oracle", "furthest", "momo_group", "mean_pool",
                                                          "vertical_slash")]  # fmt: skip
        table.add_row(f"{row['length']:,}", str(row["k_trim"]), row["selection"], *shares,
                      f"{row['cosine_sparse']:.4f}", f"{row['cosine_delta']:.4f}")  # fmt: skip
    console.print(table)

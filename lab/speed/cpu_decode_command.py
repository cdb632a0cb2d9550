"""Run `python -m lab cpu-decode`: decode steps on this CPU by part, against their floor and llama.cpp's."""

from pathlib import Path
from typing import Annotated, cast

import typer


def cpu_decode(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="a GGUF file or a folder")],
    threads: Annotated[int, typer.Option(min=1, help="of ours and of llama.cpp's")] = 2,
    batches: Annotated[str, typer.Option(help="rows of a step, with commas")] = "1,4,8",
    prompt: Annotated[int, typer.Option(min=1, help="tokens of a context, before the first step")] = 32,
    products: Annotated[str, typer.Option(help="as model.products: own or integers")] = "integers",
    kv: Annotated[str, typer.Option(help="as gpu.kv: bfloat16, float32 or int8")] = "bfloat16",
    llama: Annotated[
        Path | None, typer.Option(help="llama.cpp's llama-batched-bench, of `llama-cpp.sh cpu build`")
    ] = None,
    llama_server: Annotated[
        Path | None, typer.Option(help="llama.cpp's llama-server: both servers over HTTP, in turns, and nothing else")
    ] = None,
    llama_options: Annotated[str, typer.Option(help="of llama-server besides, as '-fa off'")] = "",
) -> None:
    """Time decode steps on the CPU by part, against their floor and llama.cpp with as many streams in the same run."""
    from gpu.page_layout import KvFormat
    from lab.speed.cpu_decode import time_decode

    sizes = [int(size) for size in batches.split(",")]
    if llama_server is not None:
        from lab.speed.cpu_servers import time_servers

        time_servers(model, threads, sizes, prompt, llama_server, llama_options)
        return
    time_decode(model, threads, sizes, prompt, products, cast(KvFormat, kv), llama)

"""Run `python -m lab selections`: which blocks a predictor has a model read, for benchmarks to replay."""

from pathlib import Path
from typing import Annotated

import typer

from evals.options import Device, ModelFolder, Seed, Text, one_line_errors
from lab.quality.predicted_defaults import METHOD, SINK, WINDOW
from transfer.tier_shape import BLOCK_TOKENS

ENDS_TOKENS = SINK + WINDOW + BLOCK_TOKENS - 1  # sink and recent tokens, as many as there may be


def selections(
    model: ModelFolder,
    weights: Annotated[Path, typer.Option("--weights", help="a predictor's file")],
    out: Annotated[Path, typer.Option("--out", help="a .npz file")],
    length: Annotated[int, typer.Option("--length", min=256, help="tokens of running text")] = 16_384,
    budget: Annotated[int, typer.Option("--budget", min=32, help="tokens that a KV head reads of the middle")] = 2048,
    steps: Annotated[int, typer.Option("--steps", min=2)] = 48,
    text: Text = [],  # noqa: B006
    seed: Seed = 0,
    device: Device = "auto",
) -> None:
    """Record which blocks a predictor has a model read with the settings that serve, for `python -m lab kernel
    predicted-steps --replay`.
    """
    with one_line_errors():
        import numpy as np
        import torch

        from evals.fidelity import text_prompts
        from evals.forward import load_decoder
        from evals.session import resolve_device
        from evals.tasks.text import text_source
        from evals.tokenizer import load_tokenizer
        from lab.methods import parse_method
        from lab.methods.predicted import Predicted
        from lab.quality.selections import record_selections, turnover

        on = resolve_device(device)
        decoder = load_decoder(model, torch.device(on), torch.bfloat16 if on.startswith("cuda") else torch.float32)
        (prompt,) = text_prompts(load_tokenizer(model), text_source(tuple(text), {}), length, 1, seed)
        whole = budget + ENDS_TOKENS
        method = parse_method(f"predicted:weights={weights},budget={whole},{METHOD},dense_layers=0-1")
        assert isinstance(method, Predicted)
        blocks = record_selections(decoder, prompt, method, budget // BLOCK_TOKENS, steps)
        np.savez_compressed(out, blocks=blocks)
        print(f"selections: {out}: {len(blocks)} steps of {blocks.shape[1]} layers, {turnover(blocks):.1%} new a step")

"""Compare formats of rows in pages on this CPU, in the compiled decode step: their accuracy, and the time of a step.

`python -m lab.speed.cpu_rows MODEL TEXT...`: each text is fed 32 tokens a step. Each token reads the pages of all
tokens before it, as in decode. Its next-token distribution is compared with that over float32 rows. Then steps of one
token after long contexts are timed in turn on empty pages, the best of many.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from gpu.config import ModelConfig
from gpu.cpu_step.cpu_step import CpuStep
from gpu.kv.pool import KvPool, PoolShape
from gpu.layers.decoder import Decoder
from gpu.model.architecture import Architecture, read_architecture
from gpu.page_layout import KvFormat
from gpu.weights.checkpoint import load_weights
from gpu.weights.weights import Weights
from server.text.model_tokenizer import load_tokenizer

PAGE_TOKENS, STEP_TOKENS = 16, 32
FIRST_TOKENS = 64  # first tokens of a text, which are not compared
CONTEXTS, ROWS, REPEATS = (256, 6000), (1, 4), 30
FORMATS: tuple[KvFormat, ...] = ("float32", "bfloat16", "int8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", type=Path, nargs="*")
    parser.add_argument("--tokens", type=int, default=1024, help="of each text")
    arguments = parser.parse_args()
    architecture = read_architecture(arguments.model)
    weights = load_weights(arguments.model, architecture, torch.float32, torch.device("cpu"), lambda fraction: None)
    tokenizer = load_tokenizer(ModelConfig(path=arguments.model))
    texts = [
        np.array(tokenizer.encode(text.read_text(), add_special_tokens=False), np.int64)[: arguments.tokens]
        for text in arguments.texts
    ]
    differences = compare(architecture, weights, texts) if texts else {}
    print(json.dumps({"differences": differences, "best_ms": time_steps(architecture, weights)}, indent=1))


def make_step(architecture: Architecture, weights: Weights, name: KvFormat, num_slots: int, context: int) -> CpuStep:
    """Return a step of up to STEP_TOKENS rows over empty pages in a format: `num_slots` slots of `context` cells."""
    pages = -(-context // PAGE_TOKENS)
    shape = PoolShape(num_slots * pages, (), PAGE_TOKENS, STEP_TOKENS, pages * PAGE_TOKENS, torch.float32, kv=name)
    pool = KvPool(architecture, shape, torch.device("cpu"))
    for arena in pool.arenas:
        arena.view(torch.uint8).zero_()
    pool.page_table[:num_slots].copy_(torch.arange(num_slots * pages).view(num_slots, pages))
    return CpuStep(Decoder(architecture, weights, pool, context))


def compare(architecture: Architecture, weights: Weights, texts: list[np.ndarray]) -> dict[str, dict[str, float]]:
    """Return figures by format: the KL divergence of next tokens from those over float32 rows, in nats (mean, 99th
    percentile, most), the share whose most likely token is the same, and perplexities.
    """
    found: dict[str, list[torch.Tensor]] = {name: [] for name in FORMATS}
    for ids in texts:
        steps = {name: make_step(architecture, weights, name, 1, len(ids)) for name in FORMATS}
        for begin in range(0, len(ids) - 1, STEP_TOKENS):
            positions = np.arange(begin, min(begin + STEP_TOKENS, len(ids) - 1))
            slots, wanted = np.zeros(len(positions), np.int32), torch.from_numpy(ids[positions + 1])
            logs = {name: step.run(slots, positions, ids[positions]).double().log_softmax(-1)
                    for name, step in steps.items()}  # fmt: skip
            exact = logs["float32"]
            for name, log in logs.items():
                kl = (exact.exp() * (exact - log)).sum(-1)
                same = (log.argmax(-1) == exact.argmax(-1)).double()
                own = torch.stack([kl, same, -log.gather(-1, wanted[:, None])[:, 0]])
                found[name].append(own[:, torch.from_numpy(positions) >= FIRST_TOKENS])
    told = {}
    for name, parts in found.items():
        kl, same, loss = torch.cat(parts, -1)
        told[name] = {
            "tokens": len(kl), "kl_mean": float(kl.mean()), "kl_99": float(kl.quantile(0.99)),
            "kl_most": float(kl.max()), "same_likeliest": float(same.mean()), "perplexity": float(loss.mean().exp()),
        }  # fmt: skip
    return told


def time_steps(architecture: Architecture, weights: Weights) -> dict[str, float]:
    """Return the best milliseconds of a step by format, context and rows."""
    best: dict[str, float] = {}
    steps = {name: make_step(architecture, weights, name, max(ROWS), max(CONTEXTS)) for name in FORMATS}
    for _ in range(REPEATS):
        for name, step in steps.items():
            for context in CONTEXTS:
                for rows in ROWS:
                    slots, positions = np.arange(rows, dtype=np.int32), np.full(rows, context - 1)
                    began = time.perf_counter()
                    step.run(slots, positions, np.zeros(rows, np.int64))
                    ms = 1e3 * (time.perf_counter() - began)
                    key = f"{name}, {context} tokens, {rows} rows"
                    best[key] = min(best.get(key, ms), ms)
    return best


if __name__ == "__main__":
    main()

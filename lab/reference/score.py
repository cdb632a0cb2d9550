"""Score a written folder on held-out novels: `python -m lab.reference.score --folder DIR --text FILE.xz`.

The invariant: the held-out novels are those that were held out of the run that wrote the folder, provided that it had
the same text. The last line is JSON.
"""

import argparse
import json
import time
from pathlib import Path

import torch

from lab.reference.conversation_rows import make_library
from lab.reference.corpus import read_text, split_novels, tokenise
from lab.reference.evaluation import accuracy, perplexity
from lab.reference.model import Llama, choose_attention
from lab.reference.model_folder import read_shape, read_weights
from lab.reference.spelling import Spelling
from lab.reference.train import HELD_OUT_SHARE, HELD_OUT_WEIGHTS


def main(given: list[str] | None = None) -> None:
    """Print exact match by task and perplexity, by length."""
    parser = argparse.ArgumentParser(description="Score a reference model.")
    parser.add_argument("--folder", type=Path, required=True, help="a Hugging Face folder that training wrote")
    parser.add_argument("--text", type=Path, required=True, help="the text that it was trained with")
    parser.add_argument("--prompts", type=int, default=400, help="a task and length")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--batch-tokens", type=int, default=131_072)
    arguments = parser.parse_args(given)
    spelling = Spelling(arguments.folder / "tokenizer.json")
    _, held_out = split_novels(read_text(arguments.text, None), HELD_OUT_SHARE)
    library = make_library(spelling, tokenise(held_out, spelling), HELD_OUT_WEIGHTS, 1, 0.0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = read_shape(arguments.folder)
    model = Llama(shape, torch.bfloat16 if device.type == "cuda" else torch.float32)
    read_weights(model, arguments.folder)
    model.to(device)
    _, model.attend = choose_attention(shape, device, arguments.batch_tokens, tuple(sorted(arguments.lengths)))
    if device.type == "cuda":
        model.compile()
    found = {}
    for length in arguments.lengths:
        begun = time.monotonic()
        with torch.no_grad():
            scores = accuracy(model, library, length, arguments.prompts, arguments.batch_tokens)
            scores["perplexity"] = perplexity(model, library, length, arguments.batch_tokens, 4)
        found[length] = {name: round(score, 2) for name, score in scores.items()}
        print(f"{length} tokens, {time.monotonic() - begun:.0f} s", flush=True)
    print(json.dumps({"prompts": arguments.prompts, "scores": found}))


if __name__ == "__main__":
    main()

"""Train the reference model: `python -m lab.reference.train --text FILE.xz --out DIR --minutes M`.

There is one process for each GPU (or one on the CPU), each with its workers. A folder that can be resumed from is
written at intervals. The invariant: the run ends within `--minutes` of its start, evaluation and export included, and
held-out text is never trained on.
"""

import argparse
import json
import math
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lab.reference.card import write_card
from lab.reference.conversation_rows import HINTS, Library, make_library
from lab.reference.corpus import Text, narrate, read_text, split_novels, tokenise, tokenise_with
from lab.reference.curriculum import (
    LENGTHS,
    STAGES,
    Curriculum,
    describe_answers,
    describe_levels,
    length_shares,
)
from lab.reference.evaluation import accuracy, perplexity, place
from lab.reference.feed import Feed
from lab.reference.lineage import Run, read_lineage, write_lineage
from lab.reference.model import SHAPES, Llama, choose_attention
from lab.reference.model_folder import read_weights, write_folder
from lab.reference.muon import Muon
from lab.reference.objective import Counts, lr_at, weigh, weigh_hints
from lab.reference.reference_tokenizer import write_tokenizer
from lab.reference.spelling import Spelling
from lab.reference.tasks import TASKS

HELD_OUT_SHARE = 0.022
NARRATED_TRAIN, NARRATED_HELD_OUT = 60_000, 4_000
FILLER_WEIGHTS, HELD_OUT_WEIGHTS = (0.6, 0.25, 0.15), (0.8, 0.2)
CORRUPTED = 0.04
MOMENTUM, WEIGHT_DECAY = 0.95, 0.1
MUON_LR, ADAM_LR = 0.02, 3e-3
SYNC_STEPS = 10
SAVE_S, MEASURE_S, LOG_S = 100.0, 60.0, 6.0
MEASURED_TOKENS, MEASURED_PROMPTS = 1024, 32
TEXT_FILES = ("spaced", "lined", "told", "held_spaced", "held_lined", "held_told")


def read_arguments(given: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train the reference model.")
    parser.add_argument("--text", type=Path, required=True, help="novels, UTF-8, .xz or plain, a paragraph a line")
    parser.add_argument("--out", type=Path, required=True, help="the Hugging Face folder to write")
    parser.add_argument("--minutes", type=float, required=True, help="all of it, from start to the written folder")
    parser.add_argument("--resume", type=Path, help="a folder that this wrote before")
    parser.add_argument("--layers", type=int, nargs="+", help="of the resumed folder, from 0, which to begin with")
    parser.add_argument("--stage", choices=sorted(STAGES), default="full", help="which schedule of lengths")
    parser.add_argument("--tokenizer", type=Path, default=Path("deploy/models/reference"), help="its folder")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="reference")
    parser.add_argument("--gpus", type=int, default=1, help="processes, one a GPU")
    parser.add_argument("--workers", type=int, default=15, help="worker processes a GPU")
    parser.add_argument("--micro-tokens", type=int, default=131_072, help="tokens of one forward on a GPU")
    parser.add_argument("--batch-tokens", type=int, default=262_144, help="tokens of a step over all GPUs, at least")
    parser.add_argument("--lr-scale", type=float, default=1.0)
    parser.add_argument("--decay", type=float, default=0.35, help="the last share of the time, in which lr falls")
    parser.add_argument("--final", type=float, default=0.1, help="lr at the end, of its top")
    parser.add_argument("--start-level", type=float, default=0.0, help="of the curriculum, in [0, 1]")
    parser.add_argument("--learnt-share", type=float, default=0.1, help="of its rows, what a solved kind keeps")
    parser.add_argument("--answer-weight", type=float, default=1.0, help="of answers against text in the loss")
    parser.add_argument("--hint-weight", type=float, default=0.5, help="of what the middle layer is taught in the loss")
    parser.add_argument("--text-scale", type=float, default=1.0, help="of the share of rows of text alone")
    parser.add_argument("--filler-weight", type=float, default=0.2, help="of text between sentences in the loss")
    parser.add_argument("--eval-prompts", type=int, default=64, help="a task and length at the end")
    parser.add_argument("--eval-lengths", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--reserve-s", type=float, default=40.0, help="seconds kept for evaluation and export")
    parser.add_argument("--most-characters", type=int, help="use only the first of the text")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(given)


def prepare_texts(arguments: argparse.Namespace, folder: Path) -> None:
    """Tokenise training and held-out text into files that every process reads."""
    spelling_path = arguments.tokenizer / "tokenizer.json"
    spelling = Spelling(spelling_path)
    training, held_out = split_novels(read_text(arguments.text, arguments.most_characters), HELD_OUT_SHARE)
    few = 0.05 if arguments.shape == "tiny" else 1.0
    texts = [
        *tokenise_with(training, spelling_path, arguments.workers),
        narrate(int(few * NARRATED_TRAIN), 1, spelling),
    ]
    texts += [*tokenise(held_out, spelling), narrate(int(few * NARRATED_HELD_OUT), 2, spelling)]
    for name, text in zip(TEXT_FILES, texts, strict=True):
        text.save(folder / f"{name}.npz")


def load_libraries(arguments: argparse.Namespace, folder: Path) -> tuple[Library, Library]:
    """Return the library to train on, and the held-out one."""
    spelling = Spelling(arguments.tokenizer / "tokenizer.json")
    texts = [Text.load(folder / f"{name}.npz") for name in TEXT_FILES]
    training, held_out = (texts[0], texts[1], texts[2]), (texts[3], texts[4])
    return (
        make_library(spelling, training, FILLER_WEIGHTS, 2, CORRUPTED),
        make_library(spelling, held_out, HELD_OUT_WEIGHTS, 1, 0.0),
    )


class Training:
    """One process of a run: its model, optimizers, feed and clock."""

    def __init__(self, arguments: argparse.Namespace, rank: int, folder: Path, begun: float) -> None:
        self.arguments, self.rank, self.begun = arguments, rank, begun
        self.world = arguments.gpus
        self.earlier = read_lineage(arguments.resume) if arguments.resume else []
        library, self.held_out = load_libraries(arguments, folder)
        lengths = tuple(sorted({length for _, mix in STAGES[arguments.stage] for length in mix}))
        seed = arguments.seed * 97 + rank
        self.feed = Feed(library, arguments.workers, arguments.micro_tokens, lengths, seed, arguments.text_scale)
        self.curriculum = Curriculum(arguments.start_level, arguments.learnt_share)
        self.steer(0.0)
        self.feed.start()
        self.device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        if self.world > 1:
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(
                backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=self.world
            )
        self.model = self.make_model(lengths)
        self.optimizers = [
            Muon(self.model.matrices(), MUON_LR, MOMENTUM, WEIGHT_DECAY),
            torch.optim.AdamW(
                self.model.rest(), ADAM_LR, (0.9, 0.95), 1e-10, 0.0, fused=self.device.type == "cuda"
            ),
        ]  # fmt: skip
        self.tops = [MUON_LR * arguments.lr_scale, ADAM_LR * arguments.lr_scale]
        self.trained_tokens = self.text_tokens = 0
        self.step_number, self.progress = 0, 0.0
        self.train_begin: float | None = None
        self.saved = self.measured = time.time()
        self.told = 0.0
        self.since_told = np.zeros((2, len(LENGTHS), len(TASKS)))

    def make_model(self, lengths: tuple[int, ...]) -> Llama:
        """Make the model on its device, with the same weights in every process."""
        torch.manual_seed(self.arguments.seed)
        on_gpu = self.device.type == "cuda"
        shape = SHAPES[self.arguments.shape]
        model = Llama(shape, torch.bfloat16 if on_gpu else torch.float32)
        if self.arguments.resume:
            read_weights(model, self.arguments.resume)
        if self.arguments.layers:
            model.restack(self.arguments.layers)
        model.to(self.device)
        chosen, model.attend = choose_attention(shape, self.device, self.arguments.micro_tokens, lengths)
        if on_gpu:
            model.compile()
        self.log(event="model", parameters=shape.count(), attention=chosen, shape=shape.describe())
        return model

    def log(self, **fields: Any) -> None:
        """Write one line of JSON to standard output and to the folder's log, from the first process only."""
        if self.rank:
            return
        line = json.dumps({"s": round(time.time() - self.begun, 1), **fields})
        print(line, flush=True)
        self.arguments.out.mkdir(parents=True, exist_ok=True)
        with (self.arguments.out / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def steer(self, progress: float) -> None:
        """Send the current mix, shares and levels to the workers."""
        self.feed.steer(
            length_shares(self.arguments.stage, progress), self.curriculum.shares, self.curriculum.levels
        )  # fmt: skip

    def train(self) -> None:
        """Run steps until the time is up."""
        last = self.begun + 60 * self.arguments.minutes - self.arguments.reserve_s
        counts, logged = Counts(self.device), time.time()
        num_micro = max(1, round(self.arguments.batch_tokens / self.arguments.micro_tokens / self.world))
        sync_steps = SYNC_STEPS if self.device.type == "cuda" else 1
        while self.progress < 1:
            self.step(counts, num_micro)
            if self.step_number == 1:
                self.train_begin = time.time()
                self.log(event="first step", waiting=self.feed.waiting())
            if self.step_number % sync_steps and self.step_number > 3:
                continue
            begin = self.train_begin or time.time()
            self.synchronise(counts, (time.time() - begin) / max(1e-9, last - begin), time.time() - logged)
            counts, logged = Counts(self.device), time.time()
            self.look_around()

    def step(self, counts: Counts, num_micro: int) -> None:
        """Update the weights from num_micro batches in this process."""
        which = random.Random(f"{self.arguments.seed}/{self.step_number}")
        mix = length_shares(self.arguments.stage, self.progress)
        length = which.choices(list(mix), list(mix.values()))[0]
        for _ in range(num_micro):
            target = place(self.feed.next(length), self.device)
            final, middle = self.model.states(target.tokens[:, :-1])
            nll, right = self.model.losses(final, target.tokens[:, 1:].flatten())
            weights = weigh(target, self.arguments.answer_weight, self.arguments.filler_weight)
            hint_nll, hint_right = self.model.hint_losses(middle, target.hints[:, 1], target.hints[:, 2])
            hinted = self.arguments.hint_weight * (hint_nll * weigh_hints(target.hints)).sum()
            loss = ((nll * weights).sum() + hinted) / (num_micro * self.world)
            loss.backward()
            counts.add(target, nll.detach(), right, length)
            counts.add_hints(target.hints, hint_right)
        if self.world > 1:
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad)
        lr = lr_at(self.progress, self.step_number, self.arguments.decay, self.arguments.final)
        for optimizer, top in zip(self.optimizers, self.tops, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = top * lr
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step_number += 1

    def synchronise(self, counts: Counts, progress: float, seconds: float) -> None:
        """Agree on clock and accuracies with the other processes, update the curriculum, and log."""
        told = torch.cat(
            [
                counts.hits.flatten(),
                counts.hints.flatten(),
                counts.losses,
                torch.tensor([progress / self.world, counts.tokens], device=self.device),
            ]
        ).double()
        if self.world > 1:
            dist.all_reduce(told)
        numbers = told.cpu().numpy()
        shape = (len(LENGTHS), len(TASKS))
        size = shape[0] * shape[1]
        hints = numbers[2 * size : -6].reshape(2, -1)
        text_nll, text_count, answer_nll, answer_count, self.progress, tokens = numbers[-6:].tolist()
        self.since_told += numbers[: 2 * size].reshape(2, *shape)
        self.trained_tokens += int(tokens)
        self.text_tokens += int(text_count)
        self.curriculum.update(numbers[:size].reshape(shape), numbers[size : 2 * size].reshape(shape), time.monotonic())
        self.steer(self.progress)
        if not math.isfinite(text_nll + answer_nll):
            raise RuntimeError(f"loss at step {self.step_number}: not finite; lower --lr-scale and resume")
        if time.time() - self.told < LOG_S and self.progress < 1:
            return
        self.told = time.time()
        self.log(
            step=self.step_number,
            progress=round(self.progress, 3),
            tokens=self.trained_tokens,
            tokens_s=round(tokens / max(seconds, 1e-9)),
            text=round(text_nll / max(1, text_count), 3),
            answers=round(answer_nll / max(1, answer_count), 3),
            ready=self.feed.waiting(),
            hints={
                name: round(100 * hit / asked, 1)
                for name, hit, asked in zip(HINTS, hints[0, :-1], hints[1, :-1], strict=True)
                if asked
            },
            unused_hints=int(hints[1, -1]),
            right=describe_answers(*self.since_told),
            levels=describe_levels(self.curriculum),
        )
        self.since_told[:] = 0

    def look_around(self) -> None:
        """Measure held-out perplexity and prompts, and write a checkpoint, if the first process's clock says so."""
        if self.rank:
            return
        now = time.time()
        if now - self.measured > MEASURE_S:
            self.measured = now
            micro = self.arguments.micro_tokens
            found = perplexity(self.model, self.held_out, MEASURED_TOKENS, micro, 1)
            scores = accuracy(self.model, self.held_out, MEASURED_TOKENS, MEASURED_PROMPTS, micro)
            self.log(event="held out", step=self.step_number, perplexity=round(found, 2), scores=scores)
        if now - self.saved > SAVE_S:
            self.saved = now
            self.write({}, {}, {})

    def finish(self) -> None:
        """Evaluate in the first process. The folder is written before the evaluation and after it."""
        if self.rank:
            return
        self.feed.stop()
        self.write({}, {}, {})
        arguments = self.arguments
        scores, perplexities, prompts = {}, {}, {}
        end = self.begun + 60 * arguments.minutes - 5
        for length in arguments.eval_lengths:
            if time.time() > end:
                break
            perplexities[length] = perplexity(self.model, self.held_out, length, arguments.micro_tokens, 1)
            scores[length] = accuracy(
                self.model, self.held_out, length, arguments.eval_prompts, arguments.micro_tokens
            )  # fmt: skip
            prompts[length] = arguments.eval_prompts
            self.log(
                event="scores",
                length=length,
                perplexity=round(perplexities[length], 2),
                **{task: round(found, 1) for task, found in scores[length].items()},
            )
        self.write(scores, perplexities, prompts)
        self.log(event="done", out=str(arguments.out), tokens=self.trained_tokens)

    def write(
        self, scores: dict[int, dict[str, float]], perplexities: dict[int, float], prompts: dict[int, int]
    ) -> None:
        """Write the folder, with a card of the results so far."""
        arguments = self.arguments
        run = Run(
            arguments.stage,
            self.world,
            round((time.time() - self.begun) / 60, 1),
            self.step_number,
            self.trained_tokens,
            self.text_tokens,
            tuple(arguments.layers) if arguments.layers else None,
        )
        runs = [*self.earlier, run]
        write_folder(
            self.model,
            arguments.tokenizer,
            arguments.out,
            write_card(self.model.shape, runs, scores, perplexities, prompts),
        )
        write_lineage(arguments.out, runs)


def run(rank: int, arguments: argparse.Namespace, folder: Path, begun: float) -> None:
    """Train in one process, from its feed to the written folder."""
    training = Training(arguments, rank, folder, begun)
    try:
        training.train()
        training.finish()
        if training.world > 1:
            dist.barrier()
            dist.destroy_process_group()
    finally:
        training.feed.stop()


def main(given: list[str] | None = None) -> None:
    """Prepare the text, then one process a GPU."""
    begun = time.time()
    arguments = read_arguments(given)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    random.seed(arguments.seed)
    np.random.seed(arguments.seed)
    with tempfile.TemporaryDirectory(prefix="reference-text-") as name:
        folder = Path(name)
        arguments.tokenizer = write_tokenizer(arguments.tokenizer, folder / "tokenizer")
        prepare_texts(arguments, folder)
        print(json.dumps({"s": round(time.time() - begun, 1), "event": "text"}), flush=True)
        if arguments.gpus == 1:
            run(0, arguments, folder, begun)
        else:
            torch.multiprocessing.spawn(run, (arguments, folder, begun), arguments.gpus)


if __name__ == "__main__":
    main()

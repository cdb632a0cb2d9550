"""One run of comparisons with full attention: methods in the reference decoder, profiles in the engine or on a URL.

It ties `evals.fidelity` and `evals.end_to_end` to a model folder and a progress bar, and knows no measure.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from evals.fidelity import run_fidelity, text_prompts
from evals.forward import ReferenceDecoder, load_decoder
from evals.rows import Row
from evals.served_method import PREFIX, group_by_deployment
from evals.serving import load_serving_engine
from evals.session import progress_bar
from evals.tasks.text import text_source
from evals.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from evals.served import Server
    from server.config import Deployment


@dataclass(frozen=True)
class FidelityRun:
    """What is compared. server: where the labels are profiles of a server; None: in this process, in the engine of
    the deployment (None: what the machine gives, and no host tier).
    """

    model: Path
    labels: list[str]
    lengths: list[int]
    samples: int
    forced: int
    text: tuple[Path, ...]
    seed: int
    device: str
    batch: int
    server: "Server | None"
    deployment: "Deployment | None" = None


def run_comparisons(run: FidelityRun) -> dict[str, list[Row]]:
    """`rows` of methods and profiles and `layers` of methods, each with its length."""
    dtype = torch.bfloat16 if run.device.startswith("cuda") else torch.float32
    decoder = load_decoder(run.model, torch.device(run.device), dtype)
    tokenizer = load_tokenizer(run.model)
    profiles = [label for label in run.labels if run.server is not None or label.startswith(PREFIX)]
    methods = [label for label in run.labels if label not in profiles]
    found: dict[str, list[Row]] = {"rows": [], "layers": []}
    steps = -(-run.samples // run.batch) + run.samples * len(profiles)
    with progress_bar(len(run.lengths) * steps, "steps") as advance:
        for length in run.lengths:
            texts = text_prompts(tokenizer, text_source(run.text, {}), length, run.samples, run.seed)
            pair = run_fidelity(decoder, texts, methods, run.forced, run.batch, advance)
            for part, rows in zip(found, pair, strict=True):
                found[part] += [{"length": length, **row} for row in rows]
            rows = _compare_profiles(run, decoder, texts, profiles, advance)
            found["rows"] += [{"length": length, **row} for row in rows]
    return found


def _compare_profiles(
    run: FidelityRun,
    decoder: ReferenceDecoder,
    texts: list[list[int]],
    profiles: list[str],
    advance: "Callable[[], None]",
) -> list[Row]:
    from evals.end_to_end import compare_profile, engine_speaker, server_speaker

    if not profiles:
        return []
    if run.server is not None:
        names = {label: label.removeprefix(PREFIX) for label in profiles}
        return [
            compare_profile(decoder, texts, label, {"attention_profile": name, "url": run.server.url},
                            server_speaker(run.server, label, run.model), run.forced, advance)
            for label, name in names.items()
        ]  # fmt: skip
    rows: dict[str, Row] = {}
    longest = max(run.lengths) + run.forced
    for deployment, members in group_by_deployment(profiles, run.deployment):
        with load_serving_engine(run.model, run.device, longest, deployment) as engine:
            for label, name in members.items():
                settings, before = {"attention_profile": name, **engine.settings_of(name)}, engine.reads()
                speak = engine_speaker(engine, name)
                row = compare_profile(decoder, texts, label, settings, speak, run.forced, advance)
                fractions = engine.fractions(before, name)
                rows[label] = row | (fractions.to_json() if fractions is not None else {})
    return [rows[label] for label in profiles]

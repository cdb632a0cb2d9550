"""Run comparisons with full attention: methods in the reference decoder, profiles in the engine or on a URL."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from evals.cells import CHRONICLE
from evals.fidelity import run_fidelity, text_prompts
from evals.forward import ReferenceDecoder, load_decoder
from evals.score_rows import Row
from evals.served_method import PREFIX, group_by_deployment
from evals.serving import load_serving_engine
from evals.session import progress_bar
from evals.stopping import RunCut, Stop
from evals.tasks.text import text_source
from evals.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from evals.served import Server
    from server.deployment import Deployment


Cell = tuple[dict[str, Any], list[list[int]]]
"""The text and length as rows name them, and the token ids of the texts."""


@dataclass(frozen=True)
class FidelityRun:
    """A comparison of methods and profiles with full attention.

    lengths: tokens of a text. samples: texts a length. forced: tokens at a text's end that are compared. batch: texts
    that go together. server: the labels are profiles of this server; None: they run in this process. deployment: of the
    engine in this process; None: one made for the machine, without a host tier.
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


def run_comparisons(run: FidelityRun, stop: Stop) -> dict[str, list[Row]]:
    """Return `rows` of methods and profiles and `layers` of methods, each with its text and length.

    Files of text are compared one by one, since a method that is accurate on a novel may not be on code. A run that
    `stop` cuts returns the rows that are finished.
    """
    dtype = torch.bfloat16 if run.device.startswith("cuda") else torch.float32
    decoder = load_decoder(run.model, torch.device(run.device), dtype)
    tokenizer = load_tokenizer(run.model)
    profiles = [label for label in run.labels if run.server is not None or label.startswith(PREFIX)]
    methods = [label for label in run.labels if label not in profiles]
    cells: list[Cell] = []
    for files, length in product([(path,) for path in run.text] or [()], run.lengths):
        place = {"text": ",".join(path.name for path in files) or CHRONICLE, "length": length}
        cells.append((place, text_prompts(tokenizer, text_source(files, {}), length, run.samples, run.seed)))
    rows: list[Row] = []
    layers: list[Row] = []
    steps = -(-run.samples // run.batch) + run.samples * len(profiles)
    with progress_bar(len(cells) * steps, "steps") as advance:
        try:
            for place, texts in cells:
                stop.check()
                own_rows, own_layers = run_fidelity(decoder, texts, methods, run.forced, run.batch, advance)
                rows += [place | row for row in own_rows]
                layers += [place | row for row in own_layers]
            for row in _compare_profiles(run, decoder, cells, profiles, stop, advance):
                rows.append(row)
        except RunCut as cut:
            print(f"cut: {cut}; what is finished is kept", file=sys.stderr, flush=True)
    order = {label: number for number, label in enumerate(["full", *run.labels])}
    places = [place for place, _ in cells]
    rows.sort(key=lambda row: (places.index({name: row[name] for name in places[0]}), order[row["method"]]))
    return {"rows": rows, "layers": layers}


def _compare_profiles(
    run: FidelityRun,
    decoder: ReferenceDecoder,
    cells: Sequence[Cell],
    profiles: list[str],
    stop: Stop,
    advance: "Callable[[], None]",
) -> Iterator[Row]:
    """Yield a row for each profile and cell; each engine is loaded once for all cells.

    Raises RunCut before a row or an engine if it is time to end, so a run whose last row is finished is not cut.
    """
    from evals.end_to_end import compare_profile, engine_speaker, server_speaker

    if run.server is not None:
        for label, (place, texts) in product(profiles, cells):
            stop.check()
            settings = {"attention_profile": label.removeprefix(PREFIX), "url": run.server.url}
            speak = server_speaker(run.server, label, run.model)
            yield place | compare_profile(decoder, texts, label, settings, speak, run.forced, advance)
        return
    longest = max(run.lengths) + run.forced
    for deployment, members in group_by_deployment(profiles, run.deployment):
        stop.check()
        with load_serving_engine(run.model, run.device, longest, deployment) as engine:
            for (label, name), (place, texts) in product(members.items(), cells):
                stop.check()
                settings, before = {"attention_profile": name, **engine.settings_of(name)}, engine.reads()
                speak = engine_speaker(engine, name)
                row = compare_profile(decoder, texts, label, settings, speak, run.forced, advance)
                fractions = engine.fractions(before, name)
                yield place | row | (fractions.to_json() if fractions is not None else {})

"""What reuse errs, by how far back the match lies and how much in front of it is read again: the paper's figure 4.

One pass of running text: every band answers the queries of full attention, with a ring of its own, so errors of layers
do not add up, but those of chains of hits do. Sums stay on the device until the end (arXiv 2604.00235, section 5.6).
"""

from collections.abc import Callable, Sequence

import torch

from evals.decode import decode_forced, prefill_batch
from evals.forward import ReferenceDecoder
from evals.methods.full import Full
from evals.methods.method import Step, StepResult
from evals.score_rows import Row
from evals.tuning.mac_method import Mac

BANDS = (1, 8, 32, 64, 128, 256, 512)


def measure_errors(
    decoder: ReferenceDecoder, texts: Sequence[Sequence[int]], steps: int, methods: Sequence[Mac],
    advance: Callable[[], None],
) -> list[Row]:  # fmt: skip
    """Return a row a layer, band and range of gaps that had hits, over the last `steps` tokens of the texts.

    `layer, band`; `gap_begin, gap_end`: positions back to the match, half-open, an octave each; `hits`: heads that hit,
    over steps and texts; `error`: the mean distance of their outputs to full attention's, relative to its norm.
    `advance` is called after each step.
    """
    prompts, forced = [list(text[:-steps]) for text in texts], [list(text[-steps:]) for text in texts]
    batch = prefill_batch(decoder, prompts, steps, [Full(), *methods])
    num_layers = decoder.architecture.num_layers
    octaves = max(method.capacity for method in methods).bit_length()
    sums = torch.zeros(2, num_layers, len(methods), octaves, dtype=torch.float64, device=decoder.device)

    def watch(step: Step, exact: StepResult, active: torch.Tensor) -> None:
        for number, method in enumerate(methods):
            got = method.step(step, batch.states[number + 1][step.layer])
            assert got.gaps is not None
            off = ((got.out - exact.out).norm(dim=-1) / exact.out.norm(dim=-1)).flatten().double()
            gaps = got.gaps.flatten()
            octave = gaps.clamp(min=1).double().log2().floor().long()
            for values, total in ((off, sums[0]), (torch.ones_like(off), sums[1])):
                total[step.layer, number].index_add_(0, octave, torch.where(gaps > 0, values, 0))
        if step.layer == num_layers - 1:
            advance()

    decode_forced(batch, 0, forced, watch, None)
    errors, hits = sums.tolist()
    return [
        {"layer": layer, "band": method.band, "gap_begin": 1 << octave, "gap_end": 2 << octave,
         "hits": int(hits[layer][number][octave]),
         "error": errors[layer][number][octave] / hits[layer][number][octave]}
        for layer in range(num_layers)
        for number, method in enumerate(methods)
        for octave in range(octaves)
        if hits[layer][number][octave]
    ]  # fmt: skip

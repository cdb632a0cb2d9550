"""Choose how many drafted tokens of each sequence a step computes beside the input tokens.

A step with drafts is expected to draw `rows + sum of chances` tokens. It is used if that gives more tokens a second
than a step without drafts, by the factor `LEAST_GAIN`. Both times are measured; they include the wait for the step's
result, since the next step cannot be launched before. The likeliest drafted tokens of a step are computed, as many as
fill a size for which step times are known.

Invariants: a sequence has at most one draft in flight, and takes no other step meanwhile. Each drafted row has its
page. A sequence with forced tokens has no draft. A profile drafts only for sequences that read host memory and hold a
ring for it, since for others its steps would take as long.
"""

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from itertools import repeat

from gpu.config import DraftConfig
from gpu.step import HostRead, Lane, PageWrite
from scheduler.cache.ring_pool import Rings
from scheduler.drafts.acceptance import shared_chances
from scheduler.drafts.draft_model import DraftModel, cut_at
from scheduler.drafts.drafter import Drafter, MakeSource, make_source
from scheduler.drafts.profile_drafter import ProfileDrafter
from scheduler.drafts.step_times import StepTimes, size_of
from scheduler.messages import ACCEPTED, REJECTED, DraftStats
from scheduler.residence.residence import Residence
from scheduler.sequences.sequence import Sequence, State
from scheduler.steps.drawing_rows import Row

LEAST_GAIN = 1.02  # in tokens a second

# From each row's drafted tokens and their chances, the step's other rows, and its lane's times: the drafts' lengths.
ChooseLengths = Callable[[list[tuple[list[int], list[float]]], int, StepTimes], list[int]]


class Drafts:
    """Keeps the drafts of all sequences.

    most_rows: of a step with drafts. make_source: makes the source of a sequence's drafts. choose_lengths: chooses the
    lengths by what pays; may be replaced. model: the draft model; None: no profile names one.
    """

    def __init__(
        self, most_rows: int, residence: Residence, rings: Rings, lanes: Many[Lane],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self.most_rows = most_rows
        self.make_source: MakeSource = make_source
        self.choose_lengths: ChooseLengths = self.choose_by_gain
        self.times = {lane: StepTimes(clock) for lane in lanes}
        self.model: DraftModel | None = None
        self._residence = residence
        self._rings = rings
        self._shared = {name: shared_chances() for name in ("ngram", "profile", "model", "mtp")}
        self._due: set[Sequence] = set()  # the model will draft for these once their last draws are known
        self._draft_s = 0.0  # of the last `take`
        self._drafters: dict[Sequence, Drafter | ProfileDrafter] = {}
        self._steps = self._proposed = self._accepted = self._declined = 0
        self._saved_seconds = 0.0

    def take(
        self, rows: list[Row], runs: list[list[int]] | None, lane: Lane, num_running: int
    ) -> tuple[list[tuple[int, ...]] | None, list[PageWrite]]:
        """Choose the draft of each row, and return the drafts and their page writes. None: no row has one."""
        self._draft_s = 0.0
        if all(sequence.profile.draft is None for sequence, _ in rows):
            return None, []
        num_fed = len(rows) + sum(map(len, runs or ()))
        if num_fed >= self.most_rows:
            return None, []
        has_run = map(bool, runs or repeat(()))
        looks = [
            ([], []) if has else self._look(sequence, host_read, num_running)
            for (sequence, host_read), has in zip(rows, has_run, strict=False)
        ]
        lengths = self.choose_lengths(looks, num_fed, self.times[lane])
        self._declined += any(token_ids for token_ids, _ in looks) and not any(lengths)
        self._put_off(rows, lengths)
        drafts = [tuple(token_ids[:length]) for (token_ids, _), length in zip(looks, lengths, strict=True)]
        writes: list[PageWrite] = []
        for place, (sequence, _) in enumerate(rows):
            if drafts[place]:  # checked again, since earlier rows have taken pages
                most = self._residence.most_known(sequence, len(drafts[place]), num_running)
                drafts[place] = drafts[place][:most]
                writes += self._residence.grow_known(sequence, most) if most else []
        if self.model is not None:
            self._draft_by(self.model, rows, drafts)
        return drafts if any(drafts) else None, writes

    def awaits(self, sequences: Iterable[Sequence]) -> bool:
        """Return whether steps wait for results in flight, because the model then drafts for one of these sequences."""
        return bool(self._due) and any(one in self._due and one.num_in_flight for one in sequences)

    def _put_off(self, rows: list[Row], lengths: list[int]) -> None:
        """Postpone a model's drafts for sequences whose last draws are not known yet, since the model reads them."""
        for place, (sequence, _) in enumerate(rows):
            self._due.discard(sequence)
            if lengths[place] and _has_model(sequence) and sequence.num_in_flight:
                lengths[place] = 0
                self._due.add(sequence)

    def _draft_by(self, model: DraftModel, rows: list[Row], drafts: list[tuple[int, ...]]) -> None:
        """Let the model draft for its rows; replaces placeholder tokens in `drafts` in place."""
        places = [place for place, (sequence, _) in enumerate(rows) if drafts[place] and _has_model(sequence)]
        before_s = model.seconds
        drafted = model.draft([(rows[place][0], len(drafts[place])) for place in places]) if places else []
        self._draft_s = model.seconds - before_s
        for place, token_ids in zip(places, drafted, strict=True):
            drafts[place] = cut_at(token_ids, rows[place][0].request.stop_token_ids)

    def launch(self, lane: Lane, rows: list[Row], num_rows: int, has_drafts: bool, has_units: bool) -> None:
        """Note a launched step with `num_rows` rows, drafts of `take` included."""
        own = tuple(sequence for sequence, _ in rows)
        self.times[lane].launch(None if has_units or not own else own, num_rows, has_drafts, self._draft_s)

    def end(self, lane: Lane) -> None:
        """Note the result of a lane's oldest step in flight, and forget finished sequences."""
        self.times[lane].end()
        for sequence in [one for one in self._drafters if one.state is State.FINISHED]:
            self._drafters.pop(sequence).forget()
            self._due.discard(sequence)
            if self.model is not None:
                self.model.forget(sequence)

    def tell(self, lane: Lane, drafted: list[tuple[Sequence, int, int]], num_slots: int, num_rows: int) -> None:
        """Count the outcome of a step's drafts. drafted: of each, its sequence, its length, and its accepted tokens."""
        accepted = 0
        for sequence, num_drafted, num_accepted in drafted:
            accepted += num_accepted
            if sequence in self._drafters:
                self._drafters[sequence].judge(num_drafted, num_accepted)
            for name, number in ((ACCEPTED, num_accepted), (REJECTED, num_drafted - num_accepted)):
                sequence.figures[name] = sequence.figures.get(name, 0) + number
        self._steps += bool(drafted)
        self._proposed += sum(num_drafted for _, num_drafted, _ in drafted)
        self._accepted += accepted
        plain, seconds = self.times[lane].seconds(False, num_slots), self.times[lane].expect(num_rows, num_slots)
        if drafted and plain is not None and seconds is not None:
            self._saved_seconds += (1 + accepted / num_slots) * plain - seconds

    def stats(self) -> DraftStats:
        seconds = 0.0 if self.model is None else self.model.seconds
        return DraftStats(
            self._steps, self._proposed, self._accepted, self._saved_seconds, self._declined, model_seconds=seconds
        )

    def _look(self, sequence: Sequence, host_read: HostRead | None, num_running: int) -> tuple[list[int], list[float]]:
        config = sequence.profile.draft
        if config is None:
            return [], []
        if config.profile is not None and (host_read is None or not self._rings.may_draft(sequence)):
            return [], []
        drafter = self._drafters.get(sequence)
        if drafter is None:
            drafter = self._drafters[sequence] = self._make_drafter(config, sequence)
        token_ids, chances = drafter.look(sequence)
        if config.model is not None:
            most = 0 if self.model is None else self.model.most_tokens(sequence)
            token_ids, chances = token_ids[:most], chances[:most]
        most = self._residence.most_known(sequence, len(token_ids), num_running) if token_ids else 0
        return token_ids[:most], chances[:most]

    def _make_drafter(self, config: DraftConfig, sequence: Sequence) -> Drafter | ProfileDrafter:
        if config.uses_ngrams:
            return Drafter(config, self.make_source(config, sequence), self._shared["ngram"])
        of_others = "profile" if config.profile is not None else "model"
        return ProfileDrafter(config, self._shared["mtp" if config.uses_head else of_others])

    def choose_by_gain(self, looks: list[tuple[list[int], list[float]]], num_fed: int, times: StepTimes) -> list[int]:
        """Return the length of each draft beside `num_fed` rows such that the step draws the most tokens a second."""
        lengths = [0] * len(looks)
        plain = times.seconds(False, num_fed)
        likeliest = sorted(
            ((chance, place) for place, (_, chances) in enumerate(looks) for chance in chances), key=lambda one: -one[0]
        )[: self.most_rows - num_fed]
        if plain is None or not likeliest:
            return lengths
        best, best_rate = 0, LEAST_GAIN * len(looks) / plain
        size, most = size_of(num_fed + 1), size_of(num_fed + len(likeliest))
        while size <= most:
            taken = likeliest[: size - num_fed]
            seconds = times.expect(num_fed + len(taken), num_fed)
            if seconds is None:
                break
            rate = (len(looks) + sum(chance for chance, _ in taken)) / max(seconds, plain)
            if rate > best_rate:
                best, best_rate = len(taken), rate
            size *= 2
        for _, place in likeliest[:best]:
            lengths[place] += 1
        return lengths


def _has_model(sequence: Sequence) -> bool:
    return sequence.profile.draft is not None and sequence.profile.draft.model is not None

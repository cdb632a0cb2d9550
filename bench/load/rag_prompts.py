"""Make prompts of the kind `rag`: a question and some documents of a corpus, drawn by popularity.

`prose` writes the corpus, no two documents alike. Invariant: documents, and each job's questions, documents and their
order, depend on (seed, index) alone, in whatever way they are sent. A run with documents and a run with their texts in
the message send the same. The one exception is the run's name in every title, so that no run finds the prompts of an
earlier one in the server's prefix cache.
"""

from typing import Any

import numpy as np

from bench.load.load_plan import Corpus, LoadPlan
from bench.load.prompts import Job
from bench.load.prose import write_prose
from bench.load.tokenised_text import TextPool

_SEEDS = 1_000_003  # seeds of documents for each seed of the run


class CorpusReader:
    """A corpus written for one run, and the prompts that ask about it.

    ids: the server's ids of the documents, empty until they are stored.
    """

    def __init__(self, plan: LoadPlan, corpus: Corpus, pool: TextPool, run: str) -> None:
        """Write the documents of the corpus. pool: provides text and estimates tokens. run: the name in the titles."""
        self.plan, self.corpus, self.pool, self.run = plan, corpus, pool, run
        self.documents = [self._write(index) for index in range(corpus.num_documents)]
        self.ids: list[str] = []
        ranks = np.arange(1, corpus.num_documents + 1, dtype=np.float64)
        self._shares = ranks**-corpus.zipf / (ranks**-corpus.zipf).sum()  # [documents]
        self._num_tokens = [pool.estimate(document["text"]) for document in self.documents]

    def make(self, index: int) -> Job:
        """Return the job of this index."""
        rng = np.random.default_rng([self.plan.seed, 2, index])
        drawn = rng.choice(len(self.documents), self.corpus.per_prompt, replace=False, p=self._shares)
        chosen = [int(document) for document in rng.permutation(drawn)]
        num_tokens = self.plan.input_tokens.draw(rng)
        output_tokens = self.plan.output_tokens.draw(rng)
        begins = rng.choice(self.pool.sentences, self.corpus.turns)
        questions = [self.pool.cut(int(begin), num_tokens) for begin in begins]
        asked = num_tokens + sum(self._num_tokens[document] for document in chosen) if len(questions) == 1 else None
        if self.corpus.sent_as == "text":
            questions[0] = self._write_out(chosen) + questions[0]
        turns = tuple(({"role": "user", "content": question},) for question in questions)
        return Job(index, turns, asked, output_tokens, self._name(chosen))

    def _write(self, index: int) -> dict[str, str]:
        rng = np.random.default_rng([self.plan.seed, 3, index])
        num_chars = round(self.corpus.tokens.draw(rng) * self.pool.chars_per_token)
        text = write_prose(_SEEDS * (self.plan.seed + 1) + index, num_chars)[:num_chars]
        return {"title": f"Report {index + 1} of {self.run}", "text": text}

    def _write_out(self, chosen: list[int]) -> str:
        """Return documents as a server writes them before a message if the chat template has no place for them."""
        found = [self.documents[document] for document in chosen]
        return "".join(f"Document {i}: {one['title']}\n{one['text']}\n\n" for i, one in enumerate(found, 1))

    def _name(self, chosen: list[int]) -> tuple[Any, ...]:
        if self.corpus.sent_as == "text":
            return ()
        known: list[Any] = self.ids if self.corpus.sent_as == "ids" else self.documents
        return tuple(known[document] for document in chosen)

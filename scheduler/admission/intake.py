"""Check, unpack, hash and compile requests before they are queued.

Any thread may do this while others plan: it reads nothing that planning changes.
"""

from collections.abc import Callable, Mapping

import numpy as np

from gpu.profiles import Profile
from scheduler.cache.prefix_cache import PrefixCache
from scheduler.constraints.constraints import Constraints
from scheduler.messages import EngineRequest
from scheduler.prefill.document_chunks import Documents
from scheduler.sequences.capacity import Capacity
from scheduler.sequences.sequence import Sequence


class Intake:
    def __init__(
        self,
        capacity: Capacity,
        profiles: Mapping[str, Profile],
        prefixes: PrefixCache,
        constraints: Constraints,
        documents: Documents | None,
    ) -> None:
        self._capacity = capacity
        self._profiles = profiles
        self._prefixes = prefixes
        self._constraints = constraints
        self._documents = documents

    def prepare(self, requests: list[EngineRequest], rest: Callable[[], None]) -> list[Sequence]:
        """Return sequences for `Roster.queue`: each prompt is unpacked and hashed once for all requests that share it.

        Any thread may call this. `rest` is called about every tenth of a millisecond. Raises TooLargeError for a
        request that can never fit, and GrammarError for one whose grammar cannot be compiled.
        """
        profiles = [self._profiles[request.attention_profile] for request in requests]
        for request, profile in zip(requests, profiles, strict=True):
            self._capacity.check(request, profile)
            if self._documents is not None:
                self._documents.check(request)
        known: dict[tuple[int, str, str], tuple[np.ndarray, list[bytes]]] = {}
        sequences = []
        for request, profile in zip(requests, profiles, strict=True):
            key = id(request.prompt), profile.name, request.prefix_salt
            shared = known.get(key)
            if shared is None:
                prompt = np.frombuffer(request.prompt, np.int32)
                hashes = self._prefixes.hash_prompt(prompt, profile, request.prefix_salt, rest)
                shared = known[key] = prompt, hashes
            sequences.append(Sequence(request, profile, shared[0], list(shared[1])))
        for sequence, constraint in zip(sequences, self._constraints.prepare(requests, rest), strict=True):
            sequence.constraint = constraint
        if self._documents is not None:
            for sequence in sequences:
                self._documents.name_chunks(sequence)
        return sequences

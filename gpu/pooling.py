"""Pooling requests: what is taken of a prompt's last hidden states in place of an answer. Plain data, no torch."""

from typing import Literal

import msgspec

PoolingKind = Literal["last", "mean", "logits"]


class Pooling(msgspec.Struct, frozen=True, kw_only=True):
    """A vector of float32 for a prompt.

    kind: the hidden state of the last token behind the final norm, `[hidden]`; the mean of all tokens' (`mean`); or the
    last token's logits of `token_ids`, in their order (`logits`).
    """

    kind: PoolingKind
    token_ids: tuple[int, ...] = ()

    @property
    def reads_all(self) -> bool:
        """Return whether every token's hidden state is needed, also that of one whose keys and values are known."""
        return self.kind == "mean"

"""Define pooling requests: the vector made of a prompt's last hidden states instead of an answer. Data, no torch."""

from typing import Literal

import msgspec

PoolingKind = Literal["last", "mean", "logits"]


class Pooling(msgspec.Struct, frozen=True, kw_only=True):
    """The float32 vector that a prompt asks for.

    kind: `last`: the last token's hidden state after the final norm, `[hidden]`; `mean`: the mean over all tokens;
    `logits`: the last token's logits of `token_ids`, in their order.
    """

    kind: PoolingKind
    token_ids: tuple[int, ...] = ()

    @property
    def reads_all(self) -> bool:
        """Return whether the hidden states of all tokens are needed, even of those whose keys and values are cached."""
        return self.kind == "mean"

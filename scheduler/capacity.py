"""What the device has room for, and the two ways of refusing a request: not now, and never."""

from dataclasses import dataclass

from scheduler.messages import EngineRequest


class QueueFullError(Exception):
    """More requests wait than `max_queue`; try again later."""


class TooLargeError(Exception):
    """The request can never fit; the message says what was asked, what there is, and what to change."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """KV pages, the longest context, and the tokens whose hidden states fit at once in all prefills together."""

    num_pages: int
    page_tokens: int
    max_context_tokens: int
    max_hidden_tokens: int

    @property
    def longest_tokens(self) -> int:
        """The longest prompt and output that a request can have when nothing else runs."""
        return min(self.max_context_tokens, self.num_pages * self.page_tokens, self.max_hidden_tokens)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)

    def check(self, request: EngineRequest) -> None:
        """Raises TooLargeError for a request that cannot fit even alone."""
        num_prompt = len(request.prompt_token_ids)
        asked = num_prompt + request.max_tokens
        for have, what, key in (
            (self.max_context_tokens, "the context is", "scheduler.max_context_tokens"),
            (self.num_pages * self.page_tokens, "KV pages hold", "gpu.kv_cache_gib"),
            (self.max_hidden_tokens, "hidden states fit", "scheduler.prefill.max_hidden_tokens"),
        ):
            if asked > have:
                raise TooLargeError(
                    f"prompt and max_tokens: asked {num_prompt} + {request.max_tokens} = {asked} tokens, {what} {have};"
                    f" shorten the request or raise {key}"
                )

"""Define the sampling options of a request: plain data without torch, so that the API process can build it too."""

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token of one sequence is drawn. Ranges are checked where requests enter (`server`), not here.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off. `repetition_penalty` looks at the prompt and
    the output, `presence_penalty` and `frequency_penalty` at the output alone. `seed` is always set: the API process
    draws one for a request that has none. `num_logprobs` None asks for none, 0 for the drawn token's, k for it and the
    k most likely; `num_prompt_logprobs` likewise for every prompt token but the first. Logprobs are those of the model
    (before temperature, penalties and bias).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

"""The types of the answers of `/tokenize` and `/detokenize`."""

from server.routes.answer import Answer, Count


class Tokens(Answer):
    tokens: list[int]
    count: Count
    max_model_len: Count


class Text(Answer):
    prompt: str

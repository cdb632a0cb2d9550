"""Reasoning between think tags, as DeepSeek R1, Qwen3 and many others write it."""

from gpu.model.answers.formats import Marks, ReasoningFormat

THINK = ReasoningFormat(
    name="think",
    region={"open": "<think>", "close": "</think>"},
    sign=r"</?think>",
    marks=Marks("<think>", "</think>"),
)

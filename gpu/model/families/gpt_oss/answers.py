"""Harmony, the format of gpt-oss: messages in channels, of which calls and reasoning are some.

What stands in front of content outside of all regions, and behind it, means nothing.
"""

from gpu.model.answers.formats import NAMED_CALL, CallFormat, CallSyntax, Channels, Marks, ReasoningFormat

_TURN = r"(?:<\|start\|>assistant)?"
_HEADER_END = r"\s{0,4}(?:<\|constrain\|>)?\s{0,4}\w{0,16}\s{0,4}<\|message\|>"
_RECIPIENT = r"\s{0,4}to=functions\.(?P<name>[\w.-]{1,128})"
_SIGN = r"<\|channel\|>"
_CHANNELS = Channels(
    begin="<|channel|>",
    message="<|message|>",
    end="<|end|>",
    turn="<|start|>assistant",
    inner=("analysis", "commentary"),
    final="final",
    content={
        "close_pattern": rf"(?:<\|end\|>)?{_TURN}<\|channel\|>(?:final|commentary){_HEADER_END}"
        rf"|<\|(?:end|return|call)\|>{_TURN}"
    },
)

HARMONY = CallFormat(
    name="harmony",
    region={
        "open_pattern": rf"{_TURN}(?:{_RECIPIENT}<\|channel\|>(?:commentary|analysis)"
        rf"|<\|channel\|>(?:commentary|analysis){_RECIPIENT}){_HEADER_END}",
        "content": "json",
        "transform": NAMED_CALL,
    },
    sign=_SIGN,
    before=("hermes",),
    syntax=CallSyntax(
        between="<|call|><|start|>assistant",
        head=("<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",),
        arguments="json",
        tail="",
    ),
    channels=_CHANNELS,
)
HARMONY_ANALYSIS = ReasoningFormat(
    name="harmony",
    region={
        "open_pattern": rf"{_TURN}<\|channel\|>analysis(?!\s{{0,4}}to=functions)[^<]{{0,64}}"
        r"(?:<\|constrain\|>\w{0,16})?<\|message\|>",
        "close_pattern": rf"<\|(?:end|call)\|>{_TURN}",
    },
    sign=_SIGN,
    before=("think",),
    marks=Marks("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    channels=_CHANNELS,
)

"""Messages to recipients, the format of Muse Glimmer: to itself, to the user, or to a tool, with tags around arguments.

What stands in front of content outside of all regions, and behind it, means nothing. A call is read where a message to
a tool begins, or right behind another call. In text to the user, or behind words to a tool, it is content.
"""

from gpu.model.answers.formats import NAMED_CALL, CallFormat, CallSyntax, Channels, Marks, ReasoningFormat, Tags

_TURN = r"(?:<\|start\|>assistant)?"
_TO = rf"{_TURN}[ ]{{0,2}}to="
_END = rf"<\|(?:eom|eot)\|>{_TURN}"
# A tool without a namespace is written twice, as `get_weather.get_weather`.
_NAME = r'(?:(?P<space>[\w-]{1,128})\.(?=(?P=space)"))?(?P<name>[^"\n]{1,128})'
_CHANNELS = Channels(
    begin=" to=",
    message="<|message|>",
    end="<|eom|>",
    turn="<|start|>assistant",
    inner=("self",),
    final="user",
    content={
        "close_pattern": rf"{_TURN}(?:[ ]{{0,2}}to=(?!self<)[\w.-]{{1,257}})?<\|message\|>|{_END}"
        r"|\G(?<=</atem:invoke>)\s{0,4}</atem:function_calls>"
    },
)

ATEM = CallFormat(
    name="atem",
    region={
        "open_pattern": rf"(?:{_TO}(?!self<|user<)[\w.-]{{1,257}}<\|message\|>\s{{0,4}}(?:<atem:function_calls>)?"
        rf'|\G(?<=</atem:invoke>))\s{{0,4}}<atem:invoke name="{_NAME}">',
        "close": "</atem:invoke>",
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r'<atem:parameter name="(?P<key>[^"\n]{1,256})">(?P<value>.*?)</atem:parameter>'
        },
        "transform": NAMED_CALL,
    },
    sign=r"<atem:invoke",
    before=("hermes",),
    syntax=CallSyntax(
        between="<|eom|><|start|>assistant",
        head=(' to={name}<|message|><atem:function_calls>\n<atem:invoke name="{name}">\n',),
        arguments=Tags('<atem:parameter name="', '">', "</atem:parameter>\n"),
        tail="</atem:invoke>\n</atem:function_calls>",
    ),
    channels=_CHANNELS,
)
TO_SELF = ReasoningFormat(
    name="to_self",
    region={"open_pattern": rf"{_TO}self<\|message\|>", "close_pattern": rf"{_END}|<\|start\|>assistant"},
    sign=r"to=self",
    before=("think",),
    marks=Marks(" to=self<|message|>", "<|eom|><|start|>assistant"),
    channels=_CHANNELS,
)

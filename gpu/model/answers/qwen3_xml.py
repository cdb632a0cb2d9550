"""Calls with each argument between tags, as Qwen3-Coder and Qwen3.5 write them."""

from gpu.model.answers.formats import NAMED_CALL, CallFormat, CallSyntax, Tags

QWEN3_XML = CallFormat(
    name="qwen3_xml",
    region={
        "open_pattern": r"(?:<tool_call>\s*)?<function=(?P<name>[^>\n]{1,128})>",
        "close_pattern": r"</function>\s*(?:</tool_call>|(?=[^\s<])|(?=<[^/])|\Z)",
        "content": "xml-inline",
        "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]{1,256})>\n?(?P<value>.*?)\n?</parameter>"},
        "transform": NAMED_CALL,
    },
    sign=r"<function=",
    before=("hermes",),
    syntax=CallSyntax(
        between="\n",
        head=("<tool_call>\n<function={name}>\n",),
        arguments=Tags("<parameter=", ">\n", "\n</parameter>\n"),
        tail="</function>\n</tool_call>",
        opens="(<tool_call>|<function=)",
        mark="<tool_call>",
    ),
)

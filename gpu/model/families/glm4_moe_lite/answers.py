"""Calls as GLM-4.5 and its successors write them, with each argument between tags."""

from gpu.model.answers.formats import NAMED_CALL, CallFormat, CallSyntax, Tags

GLM_CALLS = CallFormat(
    name="glm",
    region={
        "open_pattern": r"<tool_call>\s*(?P<name>[^\s<{]{1,128})(?=\s*<)",
        "close": "</tool_call>",
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<arg_key>\s*(?P<key>[^<>]{1,256}?)\s*</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
        },
        "transform": NAMED_CALL,
    },
    sign=r"<arg_key>",
    before=("glm4", "hermes"),
    syntax=CallSyntax(
        between="\n",
        head=("<tool_call>{name}\n",),
        arguments=Tags("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
        tail="</tool_call>",
        opens="<tool_call>",
        mark="<tool_call>",
    ),
)

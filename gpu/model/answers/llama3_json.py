"""Calls as JSON objects without marks, as Llama 3.1 writes them, and templates whose format is not known."""

from gpu.model.answers.formats import CallFormat, CallSyntax, json_head

LLAMA3_JSON = CallFormat(
    name="llama3_json",
    region={
        "open_pattern": r"(?:\s{0,16};\s{0,16})?(?:<\|python_tag\|>\s{0,16})?"
        r'(?=\{\s{0,16}"(?:name|type|function)"\s{0,16}:)',
        "content": "json",
        "transform": {
            "type": "function",
            "function": {"name": "{content.name}", "arguments": "{content.parameters}"},
        },
    },
    sign=None,  # what is read where no other sign is found
    known_only=True,
    syntax=CallSyntax(
        between="; ",
        head=json_head("parameters"),
        arguments="json",
        tail="}",
        opens=r'\{\s{0,16}("type"\s*:\s*"function"\s*,\s*)?("function"\s*:\s*\{\s*)?"name"\s*:\s*"({names})"',
    ),
)

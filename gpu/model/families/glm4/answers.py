"""Calls as GLM-4 writes them: a name on a line of its own, and JSON below it."""

from gpu.model.answers.formats import NAMED_CALL, CallFormat, CallSyntax

GLM4_CALLS = CallFormat(
    name="glm4",
    region={
        "open_pattern": r"(?:(?<![^\n])|<\|assistant\|>\s{0,16})"
        r"(?P<name>[\w.-]{1,128})[ \t]{0,16}\n(?=\s{0,16}(?:\{|\Z))",
        "content": "json",
        "transform": NAMED_CALL,
    },
    sign=r"<\|observation\|>",
    before=("hermes",),
    known_only=True,
    syntax=CallSyntax(
        between="\n",
        head=("{name}\n",),
        arguments="json",
        tail="",
        opens=r"\n({names})[ \t]{0,16}\n",
        before="\n",
    ),
)

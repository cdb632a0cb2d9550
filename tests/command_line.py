"""Parse lines of `tandem` as the command line does, without running them."""

from typing import Any

import typer

from server.commands.tandem import app, load_groups


def parse(words: list[str]) -> None:
    """Parse the words behind `tandem`. Raises what the command line would end with."""
    load_groups("--help")
    resolve(typer.main.get_command(app), words)


def resolve(command: Any, words: list[str]) -> None:
    """Follow groups down to a command, and let it read its options."""
    context = None
    while hasattr(command, "resolve_command"):
        context = command.context_class(command, parent=context, info_name=words[0])
        _, command, words = command.resolve_command(context, words)
    command.make_context(command.name, words, parent=context)

"""Read questions, and commands that begin with a slash, at the prompt of `tandem chat`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from server.commands.chat import ChatError, Conversation, ask, list_models, read_document

_PROMPT = "> "
_COLOURED_PROMPT = "\001\033[1;32m\002> \001\033[0m\002"  # readline takes what stands between \001 and \002 as no width


def hold_conversation(conversation: Conversation, console: Console) -> None:
    """Take questions and commands from the terminal until Ctrl-D."""
    console.print(
        f"{conversation.model} at {conversation.url}. /help lists commands, Ctrl-C stops an answer, Ctrl-D ends.",
        style="dim",
        highlight=False,
    )
    prompt = _COLOURED_PROMPT if console.is_terminal else _PROMPT
    while True:
        try:
            take_line(input(prompt), conversation, console)
        except KeyboardInterrupt:
            console.print("\nCtrl-D ends", style="dim")
        except EOFError:
            console.print()
            return
        except ChatError as error:
            console.print(f"[red]error:[/] {escape(str(error))}", highlight=False)


def take_line(line: str, conversation: Conversation, console: Console) -> None:
    """Run a command, or ask a question. Raises ChatError."""
    if line.startswith("/"):
        run_command(line, conversation, console)
    elif line.strip():
        ask(conversation, line.strip(), console)


def run_command(line: str, conversation: Conversation, console: Console) -> None:
    """Run a line that begins with a slash. Raises ChatError."""
    name, _, argument = line.partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        raise ChatError(f"{name}: there is no such command; /help lists them; to send this line, put a space in front")
    console.print(command.run(conversation, argument.strip()), style="dim", markup=False, highlight=False)


def list_commands(conversation: Conversation, argument: str) -> str:
    return "\n".join(f"{command.usage:<15} {command.what}" for command in COMMANDS.values())


def clear(conversation: Conversation, argument: str) -> str:
    conversation.messages = [message for message in conversation.messages if message["role"] == "system"]
    conversation.document = None
    return "all is forgotten"


def take_file(conversation: Conversation, argument: str) -> str:
    if not argument:
        raise ChatError("/file: wanted a path, as in /file notes.txt")
    conversation.document = read_document(Path(argument).expanduser())
    return f"{len(conversation.document):,} characters of {argument} go with the next question"


def choose_profile(conversation: Conversation, argument: str) -> str:
    models = list_models(conversation.url, conversation.api_key)
    known = next((model for model in models if model["id"] == conversation.model), models[0]).get("attention_profiles")
    if not argument:
        listed = f"; the server has {', '.join(known)}" if known else ""
        return f"profile: {conversation.attention_profile or 'the default of the server'}{listed}"
    if known and argument not in known:
        raise ChatError(f"/profile: the server has no {argument}; it has {', '.join(known)}")
    conversation.attention_profile = argument
    return f"profile: {argument}"


@dataclass(frozen=True, slots=True)
class Command:
    usage: str
    what: str
    run: Callable[[Conversation, str], str]  # gets the text after the command's name; returns what to print


COMMANDS = {
    "/help": Command("/help", "show this list", list_commands),
    "/clear": Command("/clear", "forget all that was said, and the file", clear),
    "/file": Command("/file PATH", "send a file of text with the next question", take_file),
    "/profile": Command(
        "/profile NAME", "read contexts by this attention profile; without a name, list them", choose_profile
    ),
}

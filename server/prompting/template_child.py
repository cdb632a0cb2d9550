"""Render chat templates in a child process: a template is foreign code, which may not end or may take all memory.

It runs as a script and imports only jinja. It reads requests from its standard input and writes one answer for each;
both are a length and that many bytes. A render that runs for too long ends the process (SIGPROF). One that takes too
much memory or recurses too deeply is answered with OVERRUN.
"""

import json
import pickle
import resource
import signal
import struct
import sys
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

LENGTH = struct.Struct("<Q")
TEXT, REFUSED, MALFORMED, OVERRUN = b"T", b"R", b"M", b"O"  # the first byte of an answer, before text in UTF-8

_MIB = 2**20
_MEMORY_BYTES = 64 * _MIB
_BYTES_PER_BYTE = 16  # of a request: a few objects for each text, and up to 4 bytes for each letter of a prompt
_REFUSALS = (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError)


class _Generation(Extension):
    """Render `{% generation %}`, which marks the assistant's words for training, as its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller: Macro) -> str:
        return str(caller())


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


@lru_cache(maxsize=16)
def _compile(source: str) -> Template:
    """Compile a template in a sandbox, with the options and functions that Hugging Face's templates expect."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def _answer(source: str, variables: dict[str, Any]) -> bytes:
    is_compiled = False
    try:
        template = _compile(source)
        is_compiled = True
        return TEXT + template.render(**variables).encode("utf-8", "surrogatepass")
    except MemoryError:
        return OVERRUN + f"took more than {_MEMORY_BYTES // _MIB} MiB of memory".encode()
    except RecursionError:
        return OVERRUN + b"recursed without end"
    except _REFUSALS as error:
        what = " ".join(str(error).split()) or type(error).__name__
        return (REFUSED if is_compiled else MALFORMED) + what.encode("utf-8", "surrogatepass")


def _limit_memory(more_bytes: int | None) -> None:
    """Limit the process to so many bytes more than it has mapped now; None: to its limit at its start."""
    limit = most = resource.getrlimit(resource.RLIMIT_AS)[1]
    if more_bytes is not None:
        with open("/proc/self/statm", encoding="ascii") as file:
            limit = int(file.read().split()[0]) * resource.getpagesize() + more_bytes
        if most != resource.RLIM_INFINITY:
            limit = min(limit, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))


def serve() -> None:
    """Answer requests, each a pickled (source, variables, seconds), until there are no more."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    while length := requests.read(LENGTH.size):
        request = requests.read(*LENGTH.unpack(length))
        source, variables, seconds = pickle.loads(request)
        _limit_memory(_MEMORY_BYTES + _BYTES_PER_BYTE * len(request))
        signal.setitimer(signal.ITIMER_PROF, seconds)
        answer = _answer(source, variables)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _limit_memory(None)
        answers.write(LENGTH.pack(len(answer)) + answer)
        answers.flush()


if __name__ == "__main__":
    serve()

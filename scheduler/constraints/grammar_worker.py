"""Check grammars in a process of their own, which the kernel ends where one takes too much.

`python -m scheduler.constraints.grammar_worker SECONDS BYTES` reads questions from stdin and writes answers to stdout,
each four bytes of length (big-endian) and UTF-8. A question is JSON: a grammar, and its lexemes that are tried alone.
Invariants: a check of more than SECONDS of processor time ends the process by SIGPROF; so does one of more than BYTES
of memory beyond what the process begins with; the process ends with its stdin.
"""

import json
import resource
import signal
import struct
import sys
from pathlib import Path
from typing import BinaryIO

from scheduler.constraints.grammar import check
from scheduler.constraints.lexeme_trial import GROWS, Lexeme, grows

HEAD = struct.Struct(">I")
_PAGE_BYTES = resource.getpagesize()


def read_frame(stream: BinaryIO) -> bytes | None:
    """Read the next frame; None where the stream has ended, also in the middle of one."""
    head = stream.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    (size,) = HEAD.unpack(head)
    body = stream.read(size)
    return body if len(body) == size else None


def write_frame(stream: BinaryIO, body: bytes) -> None:
    stream.write(HEAD.pack(len(body)) + body)
    stream.flush()


def answer(question: bytes) -> str:
    """Return why the grammar cannot be compiled, or which of its lexemes cannot be held; empty if all is well."""
    grammar, lexemes = json.loads(question)
    found = (f"{one.label}: {GROWS}" for one in (Lexeme(*lexeme) for lexeme in lexemes) if grows(one.grammar, one.text))
    return check(grammar) or next(found, "")


def bound_memory(more_bytes: int) -> None:
    """Bound the memory beyond which an allocation fails, and write no core of it."""
    begun = int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (begun + more_bytes, begun + more_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    seconds, more_bytes = float(sys.argv[1]), int(sys.argv[2])
    answer(b'["start: /a/", [["", "start: /a/", "a"]]]')  # what it needs for any
    bound_memory(more_bytes)
    while (frame := read_frame(sys.stdin.buffer)) is not None:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        write_frame(sys.stdout.buffer, answer(frame).encode("utf-8", "surrogatepass"))


if __name__ == "__main__":
    main()

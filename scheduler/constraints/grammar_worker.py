"""Check grammars in a separate process, which ends if a check takes too much time or memory.

`python -m scheduler.constraints.grammar_worker SECONDS BYTES` reads questions from stdin and writes answers to stdout.
Each is four bytes of length (big-endian) and UTF-8 text. A question is JSON: a grammar, and the lexemes that are tried
alone. Invariants: a check that takes more than SECONDS of processor time ends the process by SIGPROF. So does one that
takes more than BYTES of memory beyond that at the start. The process ends when its stdin does.
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
    """Read the next frame; None if the stream has ended, even within a frame."""
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
    """Return why the grammar cannot be compiled, or which lexeme grows too complex; "" if all is well."""
    grammar, lexemes = json.loads(question)
    found = (f"{one.label}: {GROWS}" for one in (Lexeme(*lexeme) for lexeme in lexemes) if grows(one.grammar, one.text))
    return check(grammar) or next(found, "")


def bound_memory(more_bytes: int) -> None:
    """Let allocations fail beyond this much more memory, and disable core dumps."""
    begun = int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (begun + more_bytes, begun + more_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    seconds, more_bytes = float(sys.argv[1]), int(sys.argv[2])
    answer(b'["start: /a/", [["", "start: /a/", "a"]]]')  # loads what every check needs, before memory is bounded
    bound_memory(more_bytes)
    while (frame := read_frame(sys.stdin.buffer)) is not None:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        write_frame(sys.stdout.buffer, answer(frame).encode("utf-8", "surrogatepass"))


if __name__ == "__main__":
    main()

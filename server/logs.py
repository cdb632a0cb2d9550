"""Log lines: an event word and key=value, with the id of the HTTP request that they belong to."""

import logging
import sys
from contextvars import ContextVar

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)

_logger = logging.getLogger("tandem")


def event(level: int, word: str, **fields: object) -> None:
    """Log `word key=value ...`. Values with spaces, quotes or control characters are quoted."""
    if not _logger.isEnabledFor(level):
        return
    current = request_id.get()
    if current is not None and "request_id" not in fields:
        fields["request_id"] = current
    _logger.log(level, " ".join([word, *(f"{key}={_value(value)}" for key, value in fields.items())]))


def debug(word: str, **fields: object) -> None:
    event(logging.DEBUG, word, **fields)


def info(word: str, **fields: object) -> None:
    event(logging.INFO, word, **fields)


def warning(word: str, **fields: object) -> None:
    event(logging.WARNING, word, **fields)


def exception(word: str, **fields: object) -> None:
    """Log as `event` does, with the traceback of the exception being handled."""
    fields.setdefault("request_id", request_id.get())
    _logger.error(" ".join([word, *(f"{key}={_value(value)}" for key, value in fields.items())]), exc_info=True)


def failure(word: str, error: BaseException) -> None:
    """Log as `event` does, with the traceback of an exception that ended something."""
    _logger.error(f"{word} reason={_value(error)}", exc_info=error)


def configure(level: str) -> None:
    """Send the log of Tandem and of uvicorn to stderr. For the program; a library user keeps their own handlers.

    uvicorn warns of clients' faults, which `refused` lines tell better.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name, at_least in (("tandem", level.upper()), ("uvicorn", "ERROR")):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(at_least)


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    plain = text.isprintable() and " " not in text and '"' not in text and text
    return text if plain else repr(text)

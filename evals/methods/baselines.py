"""Name the baseline methods, and parse `NAME[:key=value,...]`. Served methods are evaluated as serving profiles."""

from functools import cache

from pydantic import ValidationError

from evals.methods.attention_method import DecodeMethod, MethodError
from evals.methods.full import Full
from evals.methods.oracle import Oracle
from evals.methods.quest import Quest
from evals.methods.streaming import Streaming
from evals.methods.topk import TopK

METHODS: dict[str, type[DecodeMethod]] = {method.name: method for method in (Full, Streaming, Quest, TopK, Oracle)}


@cache
def parse_method(text: str) -> DecodeMethod:
    """Return the method that a text such as `quest:budget=0.05,page=16` names. Raises MethodError."""
    name, _, rest = text.partition(":")
    if name not in METHODS:
        raise MethodError(f"method: unknown name {name!r}; known: {', '.join(METHODS)}")
    kind = METHODS[name]
    settings: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise MethodError(f"method {name}: {part!r}; wanted key=value")
        if key not in kind.model_fields:
            raise MethodError(f"method {name}: unknown setting {key!r}; known: {', '.join(kind.model_fields)}")
        if key in settings:
            raise MethodError(f"method {name}: {key} is given twice")
        settings[key] = value
    try:
        return kind.model_validate(settings)
    except ValidationError as error:
        first = error.errors()[0]
        raise MethodError(
            f"method {name}: {'.'.join(map(str, first['loc']))}: {first['msg']}; got {first['input']!r}"
        ) from None

"""Simulate a load on an engine with mixed steps: a step has a token of every stream, and up to `chunk_tokens` tokens of
prompts, first come, first served, in one pass over the weights.

Other servers do this; the simulation shows what our steps would gain. A mixed step is assumed to take the time of the
prompts' tokens and, for the streams, of their projections at the prompts' rate and of their own step without its read
of the weights. No time is lost between steps, and a request waits only for the step under way.
"""

from collections import deque
from dataclasses import dataclass

from lab.speed.load_simulation import Clients, DeviceTimes, Outcome
from lab.speed.token_turns import TokenLoad


@dataclass(slots=True)
class _Waiting:
    name: str
    num_left: int  # tokens of its prompt that are left


def mixed_seconds(num_tokens: int, num_rows: int, times: DeviceTimes, num_layers: int) -> float:
    """Return the seconds of a step with num_tokens tokens of prompts and num_rows rows of streams."""
    decode_s = times.decode_seconds(num_rows)
    if not num_tokens:
        return decode_s
    rows_s = max(0.0, decode_s - times.weights_s)
    return num_layers * times.unit_s + (num_tokens + num_rows) / times.prompt_tokens_per_s + rows_s


def simulate_mixed(
    num_layers: int, load: TokenLoad, times: DeviceTimes, chunk_tokens: int, max_running: int
) -> Outcome:
    """Run a load until the last token. All earlier turns of a chat are found in the cache."""
    clients = Clients(load, times.request_s)
    now_s = prefill_s = decode_s = 0.0
    waiting: deque[_Waiting] = deque()
    running: dict[str, int] = {}  # tokens that are still to be drawn, by request
    while waiting or running or clients.next_s is not None:
        if not (waiting or running) and clients.next_s is not None:
            now_s = max(now_s, clients.next_s)
        waiting += [_Waiting(request.request_id, load.tokens_in) for request in clients.take(now_s)]
        num_tokens, begun = _take(waiting, chunk_tokens - len(running), max_running - len(running))
        seconds = mixed_seconds(num_tokens, len(running), times, num_layers)
        now_s += seconds
        prefill_s, decode_s = (prefill_s + seconds, decode_s) if num_tokens else (prefill_s, decode_s + seconds)
        running |= dict.fromkeys(begun, load.tokens_out)
        for name in list(running):
            running[name] -= 1
            clients.tell(name, [1], not running[name], now_s)
            if not running[name]:
                del running[name]
    return Outcome(now_s, prefill_s, decode_s, 0.0, 0, clients.turns)


def _take(waiting: deque[_Waiting], room: int, num_places: int) -> tuple[int, list[str]]:
    """Take up to `room` tokens of up to `num_places` prompts, in order. Returns their number, and prompts that end."""
    num_tokens, begun = 0, []
    while waiting and num_tokens < room and len(begun) < num_places:
        first = waiting[0]
        taken = min(room - num_tokens, first.num_left)
        first.num_left -= taken
        num_tokens += taken
        if not first.num_left:
            begun.append(waiting.popleft().name)
    return num_tokens, begun

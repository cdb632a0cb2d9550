"""Both servers on a CPU are asked for the same, and a step is what many tokens take more than one."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from lab.speed import cpu_servers
from lab.speed.cpu_servers import Server, time_servers

STEP_S, FIRST_S = 0.25, 2.0


class Clocked(Server):
    """Answers after the same seconds always: theirs after twice as many as ours."""

    async def answer(self, prompt: Sequence[int], num_streams: int, num_tokens: int) -> float:
        return (1 if self.is_ours else 2) * (FIRST_S + STEP_S * num_streams * (num_tokens - 1))

    def spread(self, num_streams: int) -> None:
        assert num_streams == 4


@contextmanager
def both_clocked(*asked: object) -> Iterator[tuple[Server, Server]]:
    assert asked[-1] == ["llama-server", "-fa", "off"]
    yield Clocked("ours", True), Clocked("theirs", False)


@pytest.mark.parametrize("prompt", [32, 6000])
def test_a_step_is_the_time_between_an_answer_of_one_token_and_of_many(
    prompt: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu_servers, "both_serving", both_clocked)
    time_servers(Path("model.gguf"), 2, [1, 4], prompt, Path("llama-server"), "-fa off")
    rows = {row.pop("what"): row for row in json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]}
    assert rows == {
        f"prompt-{prompt}": {"best_ms": 2000.0, "llama_best_ms": 4000.0},
        f"step-1-over-{prompt}": {"best_ms": 250.0, "llama_best_ms": 500.0},
        f"step-4-over-{prompt}": {"best_ms": 1000.0, "llama_best_ms": 2000.0},
    }


def test_both_servers_are_asked_for_as_many_greedy_tokens_behind_the_same_prompt() -> None:
    (our_path, ours), (their_path, theirs) = (Server("", is_ours).body([5, 6], 7, 3) for is_ours in (True, False))
    assert (our_path, their_path) == ("/v1/completions", "/completion")
    assert ours["max_tokens"] == theirs["n_predict"] == 7
    assert ours["prompt"] == theirs["prompt"] == [5, 6]
    assert ours["ignore_eos"] is theirs["ignore_eos"] is True
    assert theirs["id_slot"] == 3  # which has a copy of the prompt's rows

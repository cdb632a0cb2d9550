"""A name that is unknown is told with the one that was meant, if there is one."""

import pytest

from transfer.nearest_name import nearest_hint, nearest_name

FIELDS = [
    "n",
    "k",
    "top_k",
    "top_p",
    "stop",
    "user",
    "seed",
    "model",
    "prompt",
    "max_tokens",
    "min_tokens",
    "temperature",
]


@pytest.mark.parametrize(
    ("name", "known", "nearest"),
    [
        ("prot", ["progress_seconds", "port"], "port"),
        ("devise", ["dtype", "device"], "device"),
        ("mak", ["exact", "mac"], "mac"),
        ("maxTokens", FIELDS, "max_tokens"),
        ("temprature", FIELDS, "temperature"),
        ("limit", ["device", "memory_limit_gib"], "memory_limit_gib"),
        ("temp", FIELDS, "temperature"),
        ("max_tok", FIELDS, "max_tokens"),
        ("user_id", FIELDS, "user"),
        ("max_tokens_to_sample", FIELDS, "max_tokens"),
        ("max_tokenz", ["min_tokens", "max_tokens"], "max_tokens"),
    ],
)
def test_a_slip_comes_before_a_part(name: str, known: list[str], nearest: str) -> None:
    assert nearest_name(name, known) == nearest
    assert nearest_hint(name, known) == f"; the nearest known one is {nearest!r}"


@pytest.mark.parametrize(
    "name",
    ["num_ctx", "n_predict", "keep_alive", "", "n", "_", "___", "m", "xx", "mirostat", "x" * 5000, "größe"],
)
def test_where_no_known_name_is_near_none_is_told(name: str) -> None:
    assert nearest_name(name, FIELDS) is None
    assert nearest_hint(name, FIELDS) == ""
    assert nearest_hint(name, []) == ""


@pytest.mark.parametrize("known", FIELDS[2:])
def test_a_letter_left_out_added_or_changed_is_a_slip_of_any_name(known: str) -> None:
    for at in range(len(known)):
        for written in (known[:at] + known[at + 1 :], f"{known[:at]}z{known[at:]}", f"{known[:at]}z{known[at + 1 :]}"):
            assert (
                nearest_name(written, [one for one in FIELDS if one not in ("top_k", "top_p") or one == known]) == known
            )

"""``Last-Event-ID``: whoever comes back with the id it saw last gets the rest, each token and each character once."""

from __future__ import annotations

import json
from typing import Any

import pytest

EOS = 256
TEXT = list("añ€🎈 stop it, never".encode())  # of one to four bytes a character; the fixture's tokens are bytes


def stream(server: Any, last_id: str = "", **parameters: Any) -> list[tuple[str, dict[str, Any]]]:
    """(event id, chunk) of a whole stream."""
    headers = {"last-event-id": last_id} if last_id else {}
    body = {"prompt": "Hi", "stream": True, "return_token_ids": True, **parameters}
    answer = server.http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    found = []
    for event in events:
        head, _, data = event.partition("data: ")
        found.append((head.removeprefix("id: ").rstrip("\n"), json.loads(data)))
    return found


def told(events: list[tuple[str, dict[str, Any]]], index: int = 0) -> tuple[str, list[int], str | None]:
    """Text, token ids and finish reason of one choice."""
    entries = [entry for _, chunk in events for entry in chunk["choices"] if entry["index"] == index]
    reason = entries[-1]["finish_reason"] if entries else None
    return "".join(e["text"] for e in entries), [t for e in entries for t in e["token_ids"]], reason


@pytest.mark.parametrize("stop", [[], ["never"], ["top it"], [" i"]])
@pytest.mark.parametrize("sizes", [(4, 0), (4, 2), (4, 4)])
def test_from_every_event_on_the_rest_comes_exactly_once(server: Any, stop: list[str], sizes: tuple[int, int]) -> None:
    server.serving.tell([*TEXT, EOS], default=sizes)
    whole = stream(server, max_tokens=60, stop=stop)
    text, tokens, reason = told(whole)
    assert len(whole) > 2
    assert all(event_id for event_id, _ in whole)
    for number, (event_id, _) in enumerate(whole):
        before = told(whole[: number + 1])
        rest = told(stream(server, event_id, max_tokens=60, stop=stop))
        assert (before[0] + rest[0], before[1] + rest[1], rest[2]) == (text, tokens, reason)


def test_other_rounds_the_second_time_change_nothing(server: Any) -> None:
    """After a failover the log's tokens come in other chunks than before."""
    server.serving.tell([*TEXT, EOS], default=(4, 4))
    whole = stream(server, max_tokens=60)
    for number, (event_id, _) in enumerate(whole):
        server.serving.tell([*TEXT, EOS], default=(2, 1))
        before, rest = told(whole[: number + 1]), told(stream(server, event_id, max_tokens=60))
        assert before[0] + rest[0] == told(whole)[0]
        assert before[1] + rest[1] == told(whole)[1]


def test_the_router_is_told_which_log_to_go_on_from(server: Any) -> None:
    server.serving.tell([*TEXT, EOS])
    event_id, _ = stream(server, max_tokens=60)[0]
    session, log, *_ = event_id.split(".")
    stream(server, event_id, max_tokens=60)
    request = server.serving.requests[-1]
    assert (request.session, request.resume) == (bytes.fromhex(session), log)
    assert server.serving.requests[-2].resume == ""


def test_each_choice_has_its_own_place(server: Any) -> None:
    server.serving.tell([*TEXT, EOS])
    whole = stream(server, max_tokens=60, n=3)
    text, tokens, _ = told(whole)
    cut = len(whole) // 2
    event_id = whole[cut][0]
    assert event_id.count(",") == 2
    rest = stream(server, event_id, max_tokens=60, n=3)
    for index in range(3):
        before, after = told(whole[: cut + 1], index), told(rest, index)
        assert (before[0] + after[0], before[1] + after[1]) == (text, tokens)


@pytest.mark.parametrize(
    "last_id",
    ["nonsense", "-,-", "0" * 32 + "." + "0" * 32 + ".1.2", "x" * 20_000, "../../etc/passwd", "-" + "," * 5000],
)
def test_an_id_that_was_never_given_is_refused(server: Any, last_id: str) -> None:
    headers = {"last-event-id": last_id}
    answer = server.http.post("/v1/completions", json={"prompt": "Hi", "stream": True}, headers=headers)
    assert answer.status_code in (400, 431)
    if answer.status_code == 400:
        assert "Last-Event-ID" in answer.json()["error"]["message"]


def test_a_seeded_body_that_is_another_one_is_refused(server: Any) -> None:
    server.serving.tell([*TEXT, EOS])
    event_id, _ = stream(server, max_tokens=60, seed=1)[0]
    headers, body = {"last-event-id": event_id}, {"prompt": "Ho", "stream": True, "seed": 1, "max_tokens": 60}
    answer = server.http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "bad_event_id"

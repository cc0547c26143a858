"""W3C Trace Context, and that everybody who knows a session finds the same trace."""

from __future__ import annotations

import hashlib

import pytest

from sdcp_mono.telemetry.context import Context, extract, inject, of_session, parse, sampled

SESSION = bytes(range(16))
GOOD = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_traceparent_is_read_and_written() -> None:
    context = parse(GOOD)
    assert context == Context(
        bytes.fromhex("0af7651916cd43dd8448eb211c80319c"), bytes.fromhex("b7ad6b7169203331")
    )  # fmt: skip
    assert (context.traceparent(True), context.traceparent(False)) == (GOOD, GOOD[:-1] + "0")


def test_a_later_version_is_read_as_far_as_it_is_known() -> None:
    assert parse(GOOD.replace("00-", "01-", 1) + "-more") == parse(GOOD)


@pytest.mark.parametrize(
    "bad",
    [
        "", "00", GOOD.upper(), GOOD[:-1], GOOD + "-more", GOOD.replace("00-", "ff-", 1), " " + GOOD,
        "00-00000000000000000000000000000000-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
        GOOD.replace("00-", "01-", 1) + "-" + "x" * 100,
    ],
)  # fmt: skip
def test_anything_else_is_no_traceparent(bad: str) -> None:
    assert parse(bad) is None


def test_ids_follow_from_the_session() -> None:
    digest = hashlib.sha256(b"sdcp trace" + SESSION).digest()
    assert of_session(SESSION) == Context(digest[:16], digest[16:24])
    assert of_session(SESSION, attempt=b"another").trace_id != digest[:16]
    inside = of_session(SESSION, parse(GOOD))
    assert (inside.trace_id.hex(), inside.span_id) == (GOOD[3:35], digest[16:24])


def test_rounds_have_ids_of_their_own() -> None:
    context = of_session(SESSION)
    ids = {context.round_id(epoch, round_) for epoch in range(1, 4) for round_ in range(1, 100)}
    assert len(ids) == 3 * 99
    assert context.round_id(1, 2) == of_session(SESSION).round_id(1, 2)


def test_the_sample_is_a_share_and_grows_with_it() -> None:
    sessions = [hashlib.sha256(bytes([n % 256, n // 256])).digest()[:16] for n in range(2000)]
    some = {session for session in sessions if sampled(session, 0.1)}
    assert 120 < len(some) < 290  # 200 expected, 13 the standard deviation
    assert some <= {session for session in sessions if sampled(session, 0.5)}
    assert not any(sampled(session, 0.0) for session in sessions)
    assert all(sampled(session, 1.0) for session in sessions)


def test_a_calls_metadata_is_handed_on() -> None:
    extract({"traceparent": GOOD, "other": "x"})
    assert inject() == {"traceparent": GOOD}
    extract({})
    assert inject() == {}

"""Prompt lookup against a search through the whole prefix, and what it must not depend on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdcp_mono.core.messages import Rule
from sdcp_mono.core.ports import Draft, DraftRequest
from sdcp_mono.drafters import ngram
from sdcp_mono.drafters.ngram import NgramDraft

Request = Callable[..., DraftRequest]

few_tokens = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def by_search(tokens: Sequence[int], m: int, lengths: range, window: int) -> tuple[int, ...]:
    """The definition: what followed the latest earlier occurrence of the longest end that has one."""
    length = len(tokens)
    for n in reversed(lengths):
        for end in range(length - 1, max(n, length - window) - 1, -1):
            if n < length and tokens[end - n : end] == tokens[length - n :]:
                out = list(tokens)
                for i in range(m):
                    out.append(out[end + i])
                return tuple(out[length:])
    return ()


def one(drafter: NgramDraft, request: DraftRequest) -> Draft:
    (draft,) = drafter.draft([request])
    return draft


@settings(deadline=None, max_examples=300)
@given(few_tokens, st.lists(st.integers(1, 9), max_size=20), st.integers(1, 3), st.integers(0, 2), st.integers(6, 30))
def test_index_equals_search(
    request_of: Request, tokens: list[int], growth: list[int], shortest: int, more: int, window: int
) -> None:
    """However the prefix arrived, in one piece or in many, and also when the index was rebuilt to stay small."""
    drafter = NgramDraft(8, min_match=shortest, max_match=shortest + more, window=window)
    prefix: list[int] = []
    at = 0
    for step in [*growth, len(tokens)]:
        piece = tokens[at : at + step]
        at += step
        prefix += piece
        if prefix:
            expected = by_search(prefix, 5, range(shortest, shortest + more + 1), window)
            assert one(drafter, request_of(prefix, 5)).tokens == expected


@settings(deadline=None, max_examples=100)
@given(few_tokens, few_tokens, st.data())
def test_going_back_and_other_prefixes(
    request_of: Request, first: list[int], second: list[int], data: st.DataObject
) -> None:
    """A session whose prefix became shorter, or another list, answers as a fresh drafter does."""
    drafter = NgramDraft(8, min_match=1)
    one(drafter, request_of(first, 4))
    for prefix in (first, second, first):
        length = data.draw(st.integers(1, len(prefix)))
        fresh = one(NgramDraft(8, min_match=1), request_of(prefix, 4, length=length))
        assert one(drafter, request_of(prefix, 4, length=length)).tokens == fresh.tokens


def test_latest_match_wins(request_of: Request) -> None:
    prefix = [1, 2, 7, 9, 1, 2, 8, 5, 1, 2]
    assert one(NgramDraft(16), request_of(prefix, 3)).tokens == (8, 5, 1)


def test_longer_match_wins(request_of: Request) -> None:
    prefix = [4, 1, 2, 7, 9, 1, 2, 8, 4, 1, 2]  # (1, 2) was followed by 8 last, (4, 1, 2) by 7
    assert one(NgramDraft(16), request_of(prefix, 2)).tokens == (7, 9)


def test_repetition_goes_on(request_of: Request) -> None:
    """A match whose continuation reaches the end of the prefix is continued by the draft itself."""
    assert one(NgramDraft(16), request_of([5, 6, 7, 5, 6, 7], 8)).tokens == (5, 6, 7, 5, 6, 7, 5, 6)


def test_min_match(request_of: Request) -> None:
    prefix = [3, 1, 2, 9, 8, 2]  # only the last token was seen before
    assert one(NgramDraft(16, min_match=1), request_of(prefix, 2)).tokens == (9, 8)
    assert one(NgramDraft(16, min_match=2), request_of(prefix, 2)).tokens == ()


@pytest.mark.parametrize("prefix", [[1], [1, 2], [1, 2, 3, 4, 5, 6]])
def test_no_match_is_no_proposal(request_of: Request, prefix: list[int]) -> None:
    draft = one(NgramDraft(16), request_of(prefix, 4, rule=Rule.SPECULATIVE_SAMPLING))
    assert draft == Draft(())


def test_c25_rows_are_point_masses(request_of: Request) -> None:
    draft = one(NgramDraft(16), request_of([1, 2, 3, 1, 2], 2, rule=Rule.SPECULATIVE_SAMPLING))
    assert draft.tokens == (3, 1)
    draft.rows.check(draft.tokens, 16)
    rows = np.frombuffer(draft.rows.to_bytes(), "<f4").reshape(2, 16)
    assert rows.tolist() == [[float(v == token) for v in range(16)] for token in (3, 1)]
    assert one(NgramDraft(16), request_of([1, 2, 3, 1, 2], 2)).rows is None  # rule 1 needs none


def test_sessions_are_separate_and_bounded(request_of: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "MAX_SESSIONS", 2)
    drafter = NgramDraft(16)
    prefixes = {session: [session, 2, 3 + session, session, 2] for session in (5, 6, 7)}
    for _ in range(2):
        batch = [request_of(prefix, 1, session=session) for session, prefix in prefixes.items()]
        assert [draft.tokens for draft in drafter.draft(batch)] == [(8,), (9,), (10,)]
        assert len(drafter._indexes) == 2
    drafter.release((7).to_bytes(16, "big"))
    drafter.release((7).to_bytes(16, "big"))
    assert len(drafter._indexes) == 1


def test_index_stays_small(request_of: Request) -> None:
    drafter = NgramDraft(1 << 20, min_match=2, max_match=3, window=32)
    prefix = list(range(1000))  # no n-gram twice
    for length in range(1, 1001):
        one(drafter, request_of(prefix, 1, length=length))
        (index,) = drafter._indexes.values()
        assert len(index._last) <= 2 * 32 * 2 + 2


def test_identity_follows_from_parameters() -> None:
    identities = {
        NgramDraft(8).identity,
        NgramDraft(8, min_match=1).identity,
        NgramDraft(8, max_match=5).identity,
        NgramDraft(8, window=100).identity,
    }
    assert len(identities) == 4
    assert {len(identity) for identity in identities} == {32}
    assert NgramDraft(8).identity == NgramDraft(9).identity


@pytest.mark.parametrize(("min_match", "max_match", "window"), [(0, 3, 100), (4, 3, 100), (1, 3, 3)])
def test_bad_parameters(min_match: int, max_match: int, window: int) -> None:
    with pytest.raises(ValueError, match=r"min_match|window"):
        NgramDraft(8, min_match=min_match, max_match=max_match, window=window)

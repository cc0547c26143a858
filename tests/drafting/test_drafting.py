"""The drafter's machine (6.2, 6.3 end): limits, what a verdict or a refusal means, and how it finds back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET, structs

from sdcp_mono.core import digest as digests
from sdcp_mono.core.drafting import MAX_REFUSED, DraftSession, Next, check_assignment, check_newer
from sdcp_mono.core.messages import Assignment, Contract, Output, Proposal, Sampling, SessionState, Status, Verdict
from sdcp_mono.core.problems import (
    BadContract,
    BadProposal,
    Conflict,
    LimitExceeded,
    NotAssigned,
    QUnavailable,
    Refusal,
    SessionClosed,
    StaleBase,
    StaleEpoch,
    TooManyRequests,
    Unavailable,
    UnknownSession,
)

SESSION = b"s" * 16
PROMPT = (1, 2, 3)
BASE, VERIFIER, MODEL = "https://d/", "https://v/", b"m" * 32
STATUS = Status(instance="d", role=1, load=0, queue=0, ttl_ms=1000)
CONTRACT = Contract(
    target=b"t" * 32, tokenizer=b"k" * 32, rule=1, m_max=8, max_new=100, stop=(), low_rounds=3, fallback=(1, 5)
)


def digest(tokens: tuple[int, ...], contract: Contract = CONTRACT) -> bytes:
    return digests.extend(digests.prefix_digest(digests.contract_digest(contract), PROMPT), tokens)


def assignment(tokens: tuple[int, ...] = (), contract: Contract = CONTRACT, **changes: Any) -> Assignment:
    base = Assignment(
        session=SESSION, epoch=1, contract=contract, verifier=VERIFIER, drafter=BASE, prompt=PROMPT, round=len(tokens),
        committed=len(tokens), digest=digest(tokens, contract), m_init=4,
    )  # fmt: skip
    return structs.replace(base, **changes)


def started(tokens: tuple[int, ...] = (), **changes: Any) -> DraftSession:
    return DraftSession(assignment(tokens, **changes), PROMPT)


def state(tokens: tuple[int, ...], round_: int, **changes: Any) -> SessionState:
    base = SessionState(session=SESSION, epoch=1, round=round_, committed=len(tokens), digest=digest(tokens))
    return structs.replace(base, **changes)


def verdict(session: DraftSession, emitted: tuple[int, ...], **changes: Any) -> Verdict:
    tokens = (*session.prefix[3:], *emitted)
    base = Verdict(
        session=SESSION, epoch=1, round=session.round + 1, accepted=len(emitted) - 1, emitted=emitted,
        committed=len(tokens), digest=digest(tokens), action=0, m_cap=8, low=0, load=0,
    )  # fmt: skip
    return structs.replace(base, **changes)


def output(from_: int, tokens: tuple[int, ...], *, final: bool = False, epoch: int = 1) -> Output:
    return Output(session=SESSION, epoch=epoch, from_=from_, tokens=tokens, final=final)


def propose(session: DraftSession, *tokens: int) -> Proposal:
    return session.propose(tokens or (9,), UNSET, STATUS)


# ---- limits (6.2) ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("m_init", "limit"), [(0, 1), (1, 1), (3, 3), (8, 8), (99, 8)])
def test_sdcp_087_amb_078_m_init_is_the_limit_before_the_first_verdict(m_init: int, limit: int) -> None:
    assert started(m_init=m_init).limit == limit


@pytest.mark.parametrize(("m_cap", "limit"), [(5, 5), (1, 1), (0, 1), (8, 8), (99, 8)])
def test_sdcp_087_amb_080_then_the_last_verdicts(m_cap: int, limit: int) -> None:
    session = started()
    propose(session)
    assert session.verdict(verdict(session, (9, 5), m_cap=m_cap)) is Next.DRAFT
    assert session.limit == limit


@pytest.mark.parametrize(("committed", "limit"), [(0, 4), (95, 4), (96, 3), (98, 1), (99, 1), (100, 1)])
def test_amb_125_m_shrinks_with_the_room_that_is_left(committed: int, limit: int) -> None:
    session = started(tuple(range(committed)))
    session.resynced(output(0, tuple(range(committed))))
    assert session.limit == limit


def test_sdcp_090_one_outstanding_proposal() -> None:
    session = started()
    propose(session)
    with pytest.raises(AssertionError):
        propose(session)


@pytest.mark.parametrize("tokens", [(), (1, 2, 3, 4, 5)])
def test_sdcp_087_never_outside_the_limit(tokens: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError):
        started().propose(tokens, UNSET, STATUS)


# ---- proposals and verdicts (6.2, 6.3) -----------------------------------------------------------------


def test_sdcp_089_120_fields_follow_what_was_last_learned() -> None:
    session = started()
    first = propose(session, 9, 8)
    assert (first.round, first.base, first.base_digest, first.drafter) == (1, 0, digest(()), BASE)
    assert session.verdict(verdict(session, (9, 5))) is Next.DRAFT
    assert session.prefix == [*PROMPT, 9, 5]
    second = propose(session)
    assert (second.round, second.base, second.base_digest) == (2, 2, digest((9, 5)))


def test_sdcp_118_amb_090_what_was_emitted_is_true_not_what_accepted_says() -> None:
    session = started()
    propose(session, 9, 8, 7)
    assert session.verdict(verdict(session, (9, 5), accepted=3)) is Next.DRAFT  # truncated, replayed or foreign
    assert session.prefix == [*PROMPT, 9, 5]


def test_amb_091_a_verdict_with_another_digest_leads_to_a_resync() -> None:
    session = started()
    propose(session)
    told = verdict(session, (9, 5), committed=3, digest=digest((9, 6, 7)))
    assert session.verdict(told) is Next.RESYNC
    assert session.prefix == list(PROMPT)
    assert session.resynced(output(0, (9, 6, 7))) is Next.DRAFT
    assert (session.prefix, session.digest) == ([*PROMPT, 9, 6, 7], digest((9, 6, 7)))


@pytest.mark.parametrize(
    ("action", "step"),
    [(0, Next.DRAFT), (1, Next.DRAFT), *((a, Next.STOP) for a in (2, 3, 4, 5, 6, 77, 192))],
)
def test_sdcp_146_147_148_149_071_actions(action: int, step: Next) -> None:
    session = started()
    propose(session)
    assert session.verdict(verdict(session, (9, 5), action=action)) is step
    assert session.committed == 2


def test_sdcp_092_the_profile_is_the_assignments_if_it_has_one() -> None:
    contract = structs.replace(CONTRACT, rule=2, sampling=Sampling(temperature_milli=500))
    assert started(contract=contract).sampling == Sampling(temperature_milli=500)
    assert started(contract=contract, sampling=Sampling(seed=1)).sampling == Sampling(seed=1)
    assert started().sampling == Sampling()


# ---- finding back (AMB-088, 089) -----------------------------------------------------------------------


def test_sdcp_086_amb_088_an_assignment_in_the_middle_fetches_what_is_missing() -> None:
    session = started((7, 8, 9))
    assert (session.behind, session.resync_from) == (True, 0)
    assert session.resynced(output(0, (7, 8, 9))) is Next.DRAFT
    proposal = propose(session)
    assert (proposal.round, proposal.base, proposal.base_digest) == (4, 3, digest((7, 8, 9)))


def test_amb_089_a_drafter_three_tokens_behind_recovers() -> None:
    session = started()
    propose(session)
    stale = StaleBase("base", state((9, 8, 7), 2))
    assert session.refusal(stale) is Next.RESYNC
    assert session.resync_from == 0
    assert session.resynced(output(0, (9, 8))) is Next.RESYNC  # the rest comes with the next answer
    assert session.resync_from == 2
    assert session.resynced(output(2, (7,))) is Next.DRAFT
    proposal = propose(session)
    assert (proposal.round, proposal.base, proposal.base_digest) == (3, 3, digest((9, 8, 7)))


def test_amb_089_a_wrong_prefix_is_fetched_again_from_0() -> None:
    session = started()
    propose(session)
    session.verdict(verdict(session, (9, 5)))
    propose(session)
    assert session.refusal(StaleBase("base", state((9, 6, 4), 2))) is Next.RESYNC
    assert session.resync_from == 2
    before = session.prefix
    assert session.resynced(output(2, (4,))) is Next.RESYNC  # doesn't lead to the digest
    assert session.resync_from == 0
    assert session.prefix is not before  # a model that holds the old list is not surprised
    assert session.resynced(output(0, (9, 6, 4))) is Next.DRAFT
    assert session.prefix == [*PROMPT, 9, 6, 4]


def test_amb_089_ahead_of_the_verifier() -> None:
    session = started()
    propose(session)
    session.verdict(verdict(session, (9, 5)))
    propose(session)
    assert session.refusal(StaleBase("base", state((9,), 1))) is Next.RESYNC
    assert session.resynced(output(2, ())) is Next.RESYNC
    assert session.resynced(output(0, (9, 5))) is Next.DRAFT  # what is committed beyond the told state is left alone
    assert session.prefix == [*PROMPT, 9]


def test_a_verifier_that_never_has_the_tokens_it_told_of_is_given_up() -> None:
    session = started((7, 8))
    steps = [session.resynced(output(0, ())) for _ in range(MAX_REFUSED + 1)]
    assert steps == [Next.RESYNC] * MAX_REFUSED + [Next.STOP]


def test_a_digest_that_no_output_leads_to_is_given_up() -> None:
    session = started((7, 8), digest=b"?" * 32)
    steps = [session.resynced(output(0, (7, 8))) for _ in range(MAX_REFUSED + 1)]
    assert steps == [Next.RESYNC] * MAX_REFUSED + [Next.STOP]


def test_sdcp_181_output_of_another_epoch_is_not_for_this_assignment() -> None:
    assert started((7,)).resynced(output(0, (7,), epoch=2)) is Next.STOP


def test_a_session_that_has_ended_is_dropped() -> None:
    assert started((7,)).resynced(output(0, (7,), final=True)) is Next.STOP


@given(st.lists(st.integers(0, 9), max_size=12), st.lists(st.integers(1, 5), min_size=12, max_size=12))
def test_amb_089_parts_of_any_size_lead_to_the_same_prefix(tokens: list[int], parts: list[int]) -> None:
    session = started(tuple(tokens))
    step = Next.RESYNC if session.behind else Next.DRAFT
    for size in parts:
        if step is not Next.RESYNC:
            break
        start = session.resync_from
        step = session.resynced(output(start, tuple(tokens[start : start + size])))
    assert step is Next.DRAFT
    assert session.prefix == [*PROMPT, *tokens]


# ---- refusals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("refusal", [Unavailable("busy"), TooManyRequests("slower")])
def test_sdcp_182_a_proposal_without_an_answer_is_sent_again_as_it_was(refusal: Refusal) -> None:
    session = started()
    proposal = propose(session, 9, 8)
    assert session.refusal(refusal) is Next.RETRY
    assert session.outstanding is proposal


def test_a_fetch_without_an_answer_is_repeated() -> None:
    session = started((7, 8))
    assert session.refusal(Unavailable("busy")) is Next.RESYNC


def test_sdcp_102_rows_that_were_lost_are_drafted_once_more_and_then_declined() -> None:
    session = started()
    for refusal in (QUnavailable("gone"), BadProposal("q")):
        propose(session)
        assert session.refusal(refusal) is Next.DRAFT
        propose(session)
        assert session.refusal(refusal) is Next.DECLINE  # the verifier goes on by itself: no round is lost to us
        assert session.outstanding is None
        decline = session.decline()
        assert (decline.round, decline.epoch, decline.drafter) == (session.round + 1, 1, BASE)
        tokens = (*session.prefix[3:], 4)
        assert session.declined(state(tokens, session.round + 1)) is Next.RESYNC
        assert session.resynced(output(len(tokens) - 1, (4,))) is Next.DRAFT


def test_sdcp_100_too_long_means_shorter() -> None:
    session = started(m_init=8)
    propose(session, *range(8))
    assert session.refusal(LimitExceeded("tokens")) is Next.DRAFT
    assert (session.limit, session.outstanding) == (4, None)


@pytest.mark.parametrize(
    "refusal", [NotAssigned("x"), SessionClosed("x"), StaleEpoch("x"), UnknownSession("x"), Refusal("x")]
)
def test_amb_084_the_session_is_somebody_elses(refusal: Refusal) -> None:
    session = started()
    propose(session)
    assert session.refusal(refusal) is Next.STOP


@pytest.mark.parametrize("change", [{"epoch": 2}, {"round": 0}])
def test_a_state_of_another_session_is_not_ours(change: dict[str, int]) -> None:
    """Another epoch, or a round behind the known one: rounds never go back within a session."""
    session = started()
    propose(session)
    session.verdict(verdict(session, (9, 5)))
    propose(session)
    assert session.refusal(StaleBase("base", state((), 1, **change))) is Next.STOP


def test_a_verifier_that_only_refuses_is_given_up() -> None:
    session = started()
    propose(session)
    steps = [session.refusal(Unavailable("busy")) for _ in range(MAX_REFUSED + 1)]
    assert steps == [Next.RETRY] * MAX_REFUSED + [Next.STOP]


def test_a_verdict_forgives() -> None:
    session = started()
    propose(session)
    for _ in range(MAX_REFUSED):
        session.refusal(Unavailable("busy"))
    assert session.verdict(verdict(session, (9, 5))) is Next.DRAFT
    assert session.refused == 0


# ---- assignments (AMB-085, 086) --------------------------------------------------------------------------


def test_amb_085_what_a_drafter_refuses() -> None:
    here = frozenset({VERIFIER})
    listed = structs.replace(CONTRACT, drafters=(b"x" * 32, MODEL))
    check_assignment(assignment(), BASE, MODEL, here)
    check_assignment(assignment(contract=listed), BASE, MODEL, here)
    for bad in (
        assignment(contract=structs.replace(CONTRACT, m_max=0)),
        assignment(contract=structs.replace(CONTRACT, drafters=(b"x" * 32,))),
        assignment(drafter="https://other/"),
        assignment(verifier="https://other/"),  # AMB-045
    ):
        with pytest.raises(BadContract):
            check_assignment(bad, BASE, MODEL, here)


def test_amb_086_newer_assignments_replace_older_ones_do_not() -> None:
    at_work = assignment((7, 8), epoch=2)
    check_newer(assignment((7, 8), epoch=2), at_work)
    check_newer(assignment((7, 8, 9), epoch=2), at_work)
    check_newer(assignment((), epoch=3), at_work)
    check_newer(assignment((), epoch=2, verifier="https://w/"), at_work)
    with pytest.raises(StaleEpoch):
        check_newer(assignment((7, 8, 9), epoch=1), at_work)
    with pytest.raises(Conflict):
        check_newer(assignment((7,), epoch=2), at_work)

"""What is asked of a verifier about the nine steps of a round, and about greedy acceptance (6.3, 6.4, 6.9)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from sdcp_mono.conformance import wire
from sdcp_mono.conformance.bench import M_MAX, Bench, Session, refused, rejected, told
from sdcp_mono.conformance.http2 import Response
from sdcp_mono.conformance.kit import Failed, Level, Table, expect

MUST, SHOULD, MAY, DECISION = Level.MUST, Level.SHOULD, Level.MAY, Level.DECISION
table = Table()


# ---- steps 1 and 2 -------------------------------------------------------------------------------


@table("SDCP-082", MUST, "6.1", "only the drafter of the latest assignment is heard")
async def latest_assigned(bench: Bench) -> str:
    session = await bench.open(m_init=None)
    refused(await session.propose([0]), wire.NOT_ASSIGNED, "before any assignment")
    await session.assign()
    await session.verdict(await session.right(1))
    if bench.other is None:
        return "nobody before an assignment, then the assigned drafter"
    await session.assign(bench.other)
    refused(await session.propose(await session.right(1), by=bench.drafter), wire.NOT_ASSIGNED, "the former drafter")
    answer = await session.propose(await session.right(1), by=bench.other)
    expect(answer.status == 200, f"the newly assigned drafter: {told(answer)}")
    return "nobody before an assignment, then the last one named"


@table("SDCP-094", MUST, "6.3", "step 1: another drafter is not assigned, whatever else is wrong")
async def authorization(bench: Bench) -> str:
    other = bench.need_other()
    session = await bench.open()
    answer = await session.propose([0], by=other, drafter=other.uri, epoch=7, base=5, round=9)
    return refused(answer, wire.NOT_ASSIGNED, "another drafter with wrong epoch, base and round")


@table("SDCP-191", MUST, "7", "sdcp-not-assigned is 403")
async def not_assigned(bench: Bench) -> str:
    session = await bench.open(m_init=None)
    return refused(await session.propose([0]), wire.NOT_ASSIGNED, "a proposal nobody was assigned for")


@table("SDCP-177", MUST, "6.9", "a replaced drafter is refused")
async def replaced_drafter(bench: Bench) -> str:
    other = bench.need_other()
    session = await bench.open()
    await session.assign(other)
    answer = await session.propose(await session.right(1), by=bench.drafter, drafter=bench.drafter.uri)
    return refused(answer, wire.NOT_ASSIGNED, "the former drafter")


@table("AMB-041", DECISION, "6.3", "certificate and member must both name the assigned drafter")
async def drafter_member(bench: Bench) -> str:
    session = await bench.open()
    answer = await session.propose(await session.right(1), drafter="https://elsewhere.example/drafter/")
    return refused(answer, wire.NOT_ASSIGNED, "the right certificate, another drafter in the body")


@table("SDCP-095", MUST, "6.3", "step 2: another epoch is stale, before replay and base")
async def epoch(bench: Bench) -> str:
    session = await bench.open()
    first = session.proposal(await session.right(1))
    await session.post(first)
    for other in (0, 2):
        refused(await session.post({**first, "epoch": other}), wire.STALE_EPOCH, f"epoch {other}, round with a verdict")
        refused(await session.propose([0], epoch=other, base=9), wire.STALE_EPOCH, f"epoch {other}, wrong base")
    return "lower and higher epoch, with a stored verdict and with a wrong base"


@table("SDCP-184", MUST, "7", "sdcp-stale-epoch is 409")
async def stale_epoch(bench: Bench) -> str:
    session = await bench.open()
    return refused(await session.propose(await session.right(1), epoch=2), wire.STALE_EPOCH, "epoch 2 in epoch 1")


# ---- step 3 --------------------------------------------------------------------------------------


@table("SDCP-096", MUST, "6.3", "step 3: a round that has a verdict gets it again, unchanged")
async def replay(bench: Bench) -> str:
    session = await bench.open()
    sent, answers = [], []
    for _ in range(3):
        sent.append(session.proposal(await session.wrong(3, at=1)))
        answers.append(await session.post(sent[-1]))
    before = len(session.tokens)
    for message, first in zip(sent, answers, strict=True):
        again = await session.post(message)
        expect(again.status == 200, f"round {message['round']} again: {told(again)}")
        expect(again.body == first.body, f"round {message['round']} again: another verdict")
    output = await session.output()
    expect(output["tokens"] == session.tokens and len(output["tokens"]) == before, "the replay committed tokens")
    return "three rounds again: the same octets, nothing committed"


@table("SDCP-097", MUST, "6.3", "step 3: identical requests at the same time are one round")
async def in_flight(bench: Bench) -> str:
    session = await bench.open()
    message = session.proposal(await session.right(4))
    answers = await asyncio.gather(*(session.post(message) for _ in range(4)))
    return await _one_round(session, answers, "four identical requests")


@table("SDCP-114", MUST, "6.3", "commit and verdict are atomic under concurrent proposals")
async def atomic(bench: Bench) -> str:
    session = await bench.open()
    right = await session.right(M_MAX)
    messages = [session.proposal(right[: 1 + i % M_MAX]) for i in range(24)]
    answers = await asyncio.gather(*(session.post(message) for message in messages))
    return await _one_round(session, answers, "24 different requests", identical=False)


@table("AMB-095", DECISION, "6.3", "a round that has a verdict gets it whatever the request says")
async def replay_content(bench: Bench) -> str:
    session = await bench.open()
    answer = await session.propose(await session.right(2))
    again = await session.propose([0, 0, 0], round=1, base=77, base_digest=bytes(32))
    expect((again.status, again.body) == (200, answer.body), f"other tokens and base: {told(again)}")
    return "other tokens and base: the stored verdict"


@table("AMB-098", DECISION, "6.3", "a retry with a fresh status is the same request")
async def identical(bench: Bench) -> str:
    session = await bench.open()
    message = session.proposal(await session.right(3))
    fresh = {**message, "status": {**message["status"], "load": 77}}
    return await _one_round(session, await asyncio.gather(session.post(message), session.post(fresh)), "another status")


@table("AMB-097", DECISION, "6.3", "a different proposal for a round in verification gets its verdict")
async def concurrent_different(bench: Bench) -> str:
    session = await bench.open()
    right, wrong = session.proposal(await session.right(2)), session.proposal(await session.wrong(2))
    answers = await asyncio.gather(session.post(right), session.post(wrong))
    expect([answer.status for answer in answers] == [200, 200], f"{[told(answer) for answer in answers]}")
    return await _one_round(session, answers, "two different ones")


async def _one_round(session: Session, answers: Sequence[Response], what: str, *, identical: bool = True) -> str:
    good = [answer for answer in answers if answer.status == 200]
    expect(good, f"{what}: {told(answers[0])}")
    for answer in answers:
        others = () if identical else (409, 429, 503)
        expect(answer.status == 200 or answer.status in others, f"{what}: {told(answer)}")
    expect(len({answer.body for answer in good}) == 1, f"{what}: different verdicts for one round")
    output = await session.output()
    committed = wire.decode(good[0].body)["committed"]
    expect(len(output["tokens"]) == committed, f"{what}: {len(output['tokens'])} tokens, the verdict says {committed}")
    expect(output["tokens"] == await session.bench.greedy(committed), f"{what}: other tokens than greedy decoding")
    return f"{what}: one verdict, one commit"


# ---- step 4 --------------------------------------------------------------------------------------


@table("SDCP-098", MUST, "6.3", "step 4: another base or digest is stale")
async def base(bench: Bench) -> str:
    session = await bench.open()
    await session.verdict(await session.right(3))
    n = len(session.tokens)
    for what, changes in (
        ("base - 1", {"base": n - 1, "base_digest": session.digest(n - 1)}),
        ("base + 1", {"base": n + 1}),
        ("another digest", {"base_digest": bytes(32)}),
    ):
        refused(await session.propose([0], **changes), wire.STALE_BASE, what)
    expect((await session.propose(await session.right(1))).status == 200, "the right base was refused afterwards")
    return "base - 1, base + 1 and another digest"


@table("SDCP-039", MUST, "4.2", "another prefix of the same length is detected")
async def other_prefix(bench: Bench) -> str:
    session = await bench.open()
    await session.verdict(await session.right(4))
    forked = [(session.tokens[0] + 1) % bench.card.vocab_size, *session.tokens[1:]]
    digest = wire.next_digest(session.digest(0), forked)
    return refused(await session.propose([0], base_digest=digest), wire.STALE_BASE, "one early token differs")


@table("SDCP-099", MUST, "6.3", "step 4: another round is stale")
async def rounds(bench: Bench) -> str:
    session = await bench.open()
    await session.verdict(await session.right(1))
    for other in (0, 3):
        refused(await session.propose(await session.right(1), round=other), wire.STALE_BASE, f"round {other} after 1")
    return "round 0 and round 3 after round 1"


@table("SDCP-008", MUST, "2", "rounds are numbered from 1")
async def round_from_1(bench: Bench) -> str:
    session = await bench.open()
    for first in (0, 2):
        refused(await session.propose(await session.right(1), round=first), wire.STALE_BASE, f"first round {first}")
    verdict = await session.verdict(await session.right(1))
    expect(verdict["round"] == 1, f"the first verdict says round {verdict['round']}")
    return "0 and 2 refused, 1 accepted"


@table("SDCP-185", MUST, "7", "sdcp-stale-base carries the session's state")
async def session_state(bench: Bench) -> str:
    session = await bench.open()
    await session.verdict(await session.right(3))
    answer = await session.propose([0], base=99)
    refused(answer, wire.STALE_BASE, "base 99")
    state = wire.problem(answer.body).get("session_state")
    if not isinstance(state, dict):
        raise Failed(f"session_state is {state!r}")
    n, digest = state.get("committed"), str(state.get("digest"))
    expect(n == len(session.tokens), f"session_state.committed is {n}, not {len(session.tokens)}")
    good = digest.lower() == session.digest().hex() or wire.unpath(digest) == session.digest()
    expect(good, f"session_state.digest is {digest}")
    return f"committed {n} and d[{n}]"


@table("AMB-003", DECISION, "7", "session_state: all members, octets as base64url")
async def session_state_form(bench: Bench) -> str:
    session = await bench.open()
    await session.verdict(await session.right(2))
    state = wire.problem((await session.propose([0], base=99)).body)["session_state"]
    rebuilt = {**state, "session": wire.unpath(state["session"]), "digest": wire.unpath(state["digest"])}
    found = wire.defects("session-state", rebuilt)
    expect(not found, "; ".join(found))
    seen = tuple(rebuilt[member] for member in ("session", "epoch", "round", "committed", "digest"))
    expect(seen == (session.id, 1, 1, len(session.tokens), session.digest()), f"{state}")
    return "session, epoch, round, committed, digest"


@table("SDCP-100", MUST, "6.3", "more than m_cap is refused, the round stays free")
async def limit(bench: Bench) -> str:
    session = await bench.open(m_init=4)
    refused(await session.propose(await session.right(5)), wire.LIMIT, "5 tokens, m_init 4")
    verdict = await session.verdict(await session.right(4))
    expect(verdict["round"] == 1, f"then round {verdict['round']}")
    return "5 of 4 refused, then 4 in the same round"


@table("SDCP-188", MUST, "7", "sdcp-limit is 422")
async def limit_type(bench: Bench) -> str:
    session = await bench.open(m_max=3)
    return refused(await session.propose(await session.right(4)), wire.LIMIT, "4 tokens, m_max 3")


@table("SDCP-201", MUST, "9", "m_cap is enforced in every round")
async def m_cap(bench: Bench) -> str:
    session = await bench.open(low_rounds=1, fallback=[wire.REDUCE] * 2 + [wire.FAIL])
    verdict = await session.verdict(await session.wrong(M_MAX))
    over = await session.right(verdict["m_cap"] + 1)
    return refused(await session.propose(over), wire.LIMIT, f"{len(over)} tokens after m_cap {verdict['m_cap']}")


@table("SDCP-093", MUST, "6.2", "every M up to m_cap is welcome")
async def every_m(bench: Bench) -> str:
    session = await bench.open()
    for m in range(1, session.m_cap + 1):
        verdict = await session.verdict(await session.right(m))
        expect(verdict["accepted"] == m, f"M = {m}: {verdict['accepted']} accepted")
    return f"M = 1 to {M_MAX}"


@table("SDCP-117", MUST, "6.3", "the first failing step decides")
async def order(bench: Bench) -> str:
    session = await bench.open(m_init=2)
    first = session.proposal(await session.right(1))
    await session.post(first)
    too_long = [0] * (M_MAX + 1)
    cases: tuple[tuple[str, Response, Any], ...] = (
        ("not assigned and epoch", await session.propose([0], by=bench.router, epoch=5), wire.NOT_ASSIGNED),
        ("epoch and replay", await session.post({**first, "epoch": 5}), wire.STALE_EPOCH),
        ("epoch and base", await session.propose([0], epoch=5, base=9), wire.STALE_EPOCH),
        ("replay and base", await session.post({**first, "base": 9}), None),
        ("base and length", await session.propose(too_long, base=9), wire.STALE_BASE),
    )
    for what, answer, expected in cases:
        if expected is None:
            expect(answer.status == 200, f"{what}: {told(answer)}")
        else:
            refused(answer, expected, what)
    return ", ".join(what for what, _, _ in cases)


@table("AMB-083", DECISION, "6.3", "a proposed token beyond the vocabulary is refused")
async def token_range(bench: Bench) -> str:
    session = await bench.open()
    for token in (bench.card.vocab_size, 2**32):
        refused(await session.propose([token]), wire.BAD_PROPOSAL, f"token {token}")
    return "V and 2^32"


@table("AMB-136", DECISION, "5.2", "q_rows under rule 1 are ignored")
async def rows_under_greedy(bench: Bench) -> str:
    session = await bench.open()
    answer = await session.propose(await session.right(2), q_rows=f"{bench.prefix}-/rows/none")
    expect(answer.status == 200, told(answer))
    return "a dead reference does no harm"


# ---- steps 7 and 8, rule 1 -----------------------------------------------------------------------


@table("SDCP-123", MUST, "6.4", "rule 1: accepted while equal to the most probable token")
async def greedy_accept(bench: Bench) -> str:
    session = await bench.open()
    for m, at in ((4, 0), (4, 1), (4, 3), (1, 0)):
        verdict = await session.verdict(await session.wrong(m, at))
        expect(verdict["accepted"] == at, f"first wrong token at {at}: {verdict['accepted']} accepted")
    verdict = await session.verdict(await session.right(4))
    expect(verdict["accepted"] == 4, f"four right tokens: {verdict['accepted']} accepted")
    return "a = 0, 1, 3 and all of 4"


@table("SDCP-122", MUST, "6.4", "nothing is accepted after a rejected position")
async def acceptance_order(bench: Bench) -> str:
    session = await bench.open()
    verdict = await session.verdict(await session.wrong(5, at=1))
    expect(verdict["accepted"] == 1, f"right, wrong, right, right, right: {verdict['accepted']} accepted")
    return "right, wrong, right...: one accepted"


@table("SDCP-124", MUST, "6.4", "rule 1: the additional token is the target's own")
async def greedy_extra(bench: Bench) -> str:
    session = await bench.open()
    for at, kept in ((1, 2), (None, 4)):
        expected = (await session.right(4))[:kept]
        verdict = await session.verdict(await (session.right(3) if at is None else session.wrong(3, at)))
        expect(verdict["emitted"] == expected, f"emitted {verdict['emitted']}, not {expected}")
    return "correction at the mismatch, bonus after M"


@table("SDCP-107", MUST, "6.3", "emitted: the accepted tokens and one more")
async def emitted(bench: Bench) -> str:
    session = await bench.open()
    for at in (0, 2, 4):
        tokens = await session.wrong(5, at)
        verdict = await session.verdict(tokens)
        a = verdict["accepted"]
        expect(verdict["emitted"][:a] == tokens[:a], f"emitted {verdict['emitted']} of {tokens}, accepted {a}")
        expect(len(verdict["emitted"]) == a + 1, f"{len(verdict['emitted'])} emitted, accepted {a}")
    return "tokens[:a] and one more, a = 0, 2, 4"


@table("SDCP-003", MUST, "1.1", "between 1 and M + 1 tokens a round")
async def tokens_per_pass(bench: Bench) -> str:
    session = await bench.open()
    for m, at in ((1, 0), (8, 3), (8, 7)):
        verdict = await session.verdict(await session.wrong(m, at))
        count = len(verdict["emitted"])
        expect(1 <= count <= m + 1 and count == verdict["accepted"] + 1, f"{count} tokens for M = {m}")
    return "a + 1 tokens in each of three rounds"


@table("SDCP-125", MUST, "6.4", "rule 1: the output is greedy decoding, whatever is proposed")
async def greedy_identical(bench: Bench) -> str:
    wanted = await bench.greedy(16)
    junk, mixed = await bench.open(), await bench.open()
    while len(junk.tokens) < 16:
        await junk.verdict([(len(junk.tokens) * 7 + 3) % bench.card.vocab_size] * 3)
    while len(mixed.tokens) < 16:
        at = len(mixed.tokens) % 3
        await mixed.verdict(await mixed.wrong(3, at))
    for what, session in (("junk", junk), ("half right", mixed)):
        expect(session.tokens[:16] == wanted, f"{what} proposals changed the output: {session.tokens[:16]}")
    return "16 tokens equal after junk and after half right proposals"


@table("SDCP-116", MUST, "6.3", "rejected positions leave nothing behind")
async def rollback(bench: Bench) -> str:
    session = await bench.open()
    for _ in range(4):
        await session.verdict(await session.wrong(M_MAX))
    verdict = await session.verdict(await session.right(4))
    expect(verdict["accepted"] == 4, f"{verdict['accepted']} of 4 right tokens accepted after rejections")
    return "right tokens accepted after four rejected rounds"


@table("SDCP-062", MUST, "5.2", "verdict: members, n and d[n]")
async def verdict_members(bench: Bench) -> str:
    session = await bench.open()
    for at in (0, 2):
        n = len(session.tokens)
        verdict = await session.verdict(await session.wrong(4, at))
        found = wire.defects("verdict", verdict)
        expect(not found, "; ".join(found))
        expect(verdict["committed"] == n + len(verdict["emitted"]), f"committed {verdict['committed']}")
        expect(verdict["digest"] == session.digest(), "digest is not the chain over emitted")
        expect((verdict["session"], verdict["epoch"]) == (session.id, 1), "session or epoch of another")
    return "all members, committed and digest follow emitted"


async def _stop_at(bench: Bench, index: int) -> tuple[Session, int]:
    """A session whose stop token is the greedy token at ``index``; answers where that token comes first."""
    known = await bench.greedy(index + 1)
    return await bench.open(stop=[known[index]]), known.index(known[index])


@table("SDCP-108", MUST, "6.3", "truncated after the first stop token, which is kept")
async def stop(bench: Bench) -> str:
    session, first = await _stop_at(bench, 2)
    verdict = await session.verdict(await session.right(6))
    expect(verdict["emitted"] == (await bench.greedy(first + 1)), f"emitted {verdict['emitted']}, stop at {first}")
    expect(verdict["action"] == wire.FINISH, f"action {verdict['action']}")
    session, first = await _stop_at(bench, 0)
    verdict = await session.verdict(await session.wrong(2))
    expect((len(verdict["emitted"]), verdict["action"]) == (1, wire.FINISH), "a stop token as additional token")
    return "inside the accepted tokens and as additional token"


@table("SDCP-109", MUST, "6.3", "truncated at max_new")
async def max_new(bench: Bench) -> str:
    session = await bench.open(max_new=6)
    await session.verdict(await session.wrong(4, at=3))
    verdict = await session.verdict(await session.right(5))
    seen = (len(verdict["emitted"]), verdict["committed"], verdict["action"])
    expect(seen == (2, 6, wire.FINISH), f"emitted, committed, action {seen}")
    return "two of six tokens kept, committed 6, finish"


@table("SDCP-110", MUST, "6.3", "truncated tokens leave no trace")
async def truncation_digest(bench: Bench) -> str:
    session = await bench.open(max_new=3)
    verdict = await session.verdict(await session.right(6))
    output = await session.output()
    expect(output["tokens"] == verdict["emitted"] == await bench.greedy(3), f"output {output['tokens']}")
    expect(verdict["digest"] == session.digest(3), "d[3] is not over the kept tokens")
    return "n, d[n] and output hold the kept tokens only"


@table("AMB-105", DECISION, "6.3", "accepted counts what truncation removed")
async def accepted_truncated(bench: Bench) -> str:
    session = await bench.open(max_new=2)
    verdict = await session.verdict(await session.right(4))
    expect((verdict["accepted"], len(verdict["emitted"])) == (4, 2), f"accepted {verdict['accepted']}")
    return "accepted 4, emitted 2"


@table("AMB-125", DECISION, "6.2", "a proposal beyond max_new is truncated, not refused")
async def beyond_room(bench: Bench) -> str:
    session = await bench.open(max_new=2)
    answer = await session.propose(await session.right(M_MAX))
    expect(answer.status == 200, told(answer))
    return f"M = {M_MAX} with room for 2"


# ---- the end -------------------------------------------------------------------------------------


async def _finished(bench: Bench) -> tuple[Session, wire.Message, Response]:
    session = await bench.open(max_new=3)
    message = session.proposal(await session.right(4))
    return session, message, await session.post(message)


@table("SDCP-155", MUST, "6.5.2", "finish: no further rounds, output is final")
async def finish(bench: Bench) -> str:
    session, _, answer = await _finished(bench)
    expect(wire.decode(answer.body)["action"] == wire.FINISH, f"action {wire.decode(answer.body)['action']}")
    refused(await session.propose([0]), wire.CLOSED, "a proposal afterwards")
    expect((await session.output())["final"] is True, "output is not final")
    return "action 4, then 410, output final"


@table("SDCP-189", MUST, "7", "sdcp-session-closed is 410")
async def closed(bench: Bench) -> str:
    session, _, _ = await _finished(bench)
    refused(await session.propose([0]), wire.CLOSED, "proposal")
    refused(await session.assign(), wire.CLOSED, "PUT drafter")
    return refused(await session.policy(99), wire.CLOSED, "proposal, PUT drafter and policy")


@table("SDCP-157", MUST, "6.5.2", "an ended session commits nothing more")
async def no_progress(bench: Bench) -> str:
    session, message, _ = await _finished(bench)
    for answer in [await session.propose([0] * m) for m in (1, 2, 3)] + [await session.post({**message, "round": 9})]:
        rejected(answer, (410,), "a proposal after the end")
    expect(len((await session.output())["tokens"]) == 3, "more output after the end")
    return "four proposals refused, output unchanged"


@table("AMB-082", DECISION, "6.3", "the final verdict can be asked for again")
async def closed_order(bench: Bench) -> str:
    session, message, first = await _finished(bench)
    again = await session.post(message)
    expect((again.status, again.body) == (200, first.body), f"the final round again: {told(again)}")
    answer = await session.propose([0], by=bench.router)
    return refused(answer, wire.NOT_ASSIGNED, "the final round again: its verdict; another caller")

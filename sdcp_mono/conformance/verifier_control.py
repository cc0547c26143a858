"""What is asked of a verifier about the ladder, self-decoding, assignments, policies and output (6.5 to 6.7)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final

from sdcp_mono.conformance import wire
from sdcp_mono.conformance.bench import M_MAX, Bench, Session, refused, rejected, told
from sdcp_mono.conformance.kit import Level, Skipped, Table, expect

MUST, SHOULD, MAY, DECISION = Level.MUST, Level.SHOULD, Level.MAY, Level.DECISION
table = Table()

BUSY: Final = 80  # percent; above it a verifier may lower m_cap by its load, so exact values are not expected
BEFORE_IDLE_SECONDS: Final = 0.1  # a verifier may begin to decode by itself some time after it lost its drafter (8)
UNDRAFTED_SECONDS: Final = 5.0
LOW, HIGH = "low", "high"


async def _round(session: Session, kind: str) -> wire.Message:
    """A round whose proposal is rejected at once, or accepted whole."""
    m = session.m_cap
    return await session.verdict(await (session.wrong(m) if kind == LOW else session.right(m)))


async def _actions(session: Session, kinds: Sequence[str], expected: Sequence[int]) -> str:
    seen: list[int] = []
    for kind in kinds:
        seen.append((await _round(session, kind))["action"])
        expect(seen == list(expected[: len(seen)]), f"actions {seen}, not {list(expected[: len(seen)])}")
        if seen[-1] == wire.SWITCH:
            await session.assign()
    return f"actions {seen}"


# ---- the ladder (6.5) ----------------------------------------------------------------------------


@table("SDCP-063", MUST, "5.2", "verdict.load is a percentage")
async def load(bench: Bench) -> str:
    session = await bench.open()
    loads = [(await _round(session, LOW))["load"] for _ in range(2)]
    expect(all(type(value) is int and 0 <= value <= 100 for value in loads), f"load {loads}")
    return f"load {loads}"


@table("SDCP-064", MUST, "5.2", "verdict.low counts consecutive low rounds")
async def low_counts(bench: Bench) -> str:
    session = await bench.open(low_rounds=9)
    seen = [(await _round(session, kind))["low"] for kind in (LOW, LOW, LOW, HIGH, LOW)]
    expect(seen == [1, 2, 3, 0, 1], f"low {seen}")
    return "1, 2, 3, then 0, 1"


@table("AMB-110", DECISION, "5.2", "verdict.low counts the round that escalates")
async def low_value(bench: Bench) -> str:
    session = await bench.open(low_rounds=3, fallback=[wire.REDUCE, wire.FAIL])
    seen = [(await _round(session, LOW))["low"] for _ in range(4)]
    expect(seen == [1, 2, 3, 1], f"low {seen}, R = 3")
    return "1, 2, 3, 1 for R = 3"


@table("SDCP-136", MUST, "6.5.1", "1 <= m_cap <= m_max in every verdict")
async def m_cap_range(bench: Bench) -> str:
    session = await bench.open(low_rounds=1, fallback=[wire.REDUCE] * 4 + [wire.FAIL])
    finishing = await bench.open(max_new=1)
    caps = [(await _round(session, kind))["m_cap"] for kind in (HIGH, LOW, LOW, LOW, LOW, LOW)]
    caps.append((await _round(finishing, HIGH))["m_cap"])
    expect(all(1 <= cap <= M_MAX for cap in caps), f"m_cap {caps}")
    return f"m_cap {caps}"


@table("SDCP-138", SHOULD, "6.5.1", "m_cap grows again when rounds are no longer low")
async def m_cap_restored(bench: Bench) -> str:
    session = await bench.open(low_rounds=1, fallback=[wire.REDUCE, wire.REDUCE, wire.FAIL], max_new=128)
    caps = [(await _round(session, LOW))["m_cap"] for _ in range(2)]
    busy = False
    for _ in range(6):
        verdict = await _round(session, HIGH)
        caps.append(verdict["m_cap"])
        busy |= verdict["load"] > BUSY
    if busy and caps[-1] <= caps[1]:
        raise Skipped("the verifier is busy")
    expect(caps[-1] > caps[1], f"m_cap {caps}")
    return f"m_cap {caps}"


@table("SDCP-139", MUST, "6.5.2", "a round is low if 100 a < low_ratio M, or if a = 0")
async def low_definition(bench: Bench) -> str:
    cases: dict[int | None, Sequence[tuple[int, int, bool]]] = {
        None: ((0, 3, True), (1, 8, False)),
        50: ((2, 5, True), (2, 4, False), (3, 5, False)),
        100: ((3, 4, True), (4, 4, False)),
    }
    for ratio, rounds in cases.items():
        session = await bench.open(low_rounds=99, low_ratio=... if ratio is None else ratio)
        for a, m, low in rounds:
            tokens = await session.right(m) if a == m else await session.wrong(m, a)
            verdict = await session.verdict(tokens)
            expect((verdict["low"] > 0) is low, f"low_ratio {ratio}, {a} of {m}: low {verdict['low']}")
    return "absent, 50 and 100 percent"


@table("SDCP-140", MUST, "6.5.2", "counters c, g, j")
async def counters(bench: Bench) -> str:
    session = await bench.open(low_rounds=2, fallback=[wire.REDUCE, wire.FAIL])
    kinds = (LOW, HIGH, LOW, LOW, HIGH, HIGH, LOW, LOW)  # R good rounds set j back: reduce again, not fail
    return await _actions(session, kinds, (0, 0, 0, 1, 0, 0, 0, 1))


@table("SDCP-141", MUST, "6.5.2", "after R low rounds the next entry of the list applies")
async def escalate(bench: Bench) -> str:
    session = await bench.open(low_rounds=3, fallback=[wire.REDUCE, wire.REDUCE, wire.FAIL])
    return await _actions(session, [LOW] * 9, (0, 0, 1, 0, 0, 1, 0, 0, 5))


@table("SDCP-142", MUST, "6.5.2", "entries that are not permitted are skipped")
async def escalate_skip(bench: Bench) -> str:
    session = await bench.open(low_rounds=1, fallback=[wire.SELF_DECODE, wire.SWITCH])
    return await _actions(session, [LOW, LOW], (wire.SWITCH, wire.FAIL))


@table("SDCP-143", MUST, "6.5.2", "no entry left is fail")
async def escalate_exhaust(bench: Bench) -> str:
    session = await bench.open(low_rounds=1, fallback=[wire.REDUCE])
    return await _actions(session, [LOW, LOW], (wire.REDUCE, wire.FAIL))


@table("SDCP-145", MUST, "6.5.2", "j persists over a change of drafter and over self-decoding")
async def j_persists(bench: Bench) -> str:
    session = await bench.open(low_rounds=1, fallback=[wire.SWITCH, wire.REDUCE, wire.FAIL])
    first = await _actions(session, [LOW, LOW], (wire.SWITCH, wire.REDUCE))
    session = await _self_decoding(bench, fallback=[wire.SELF_DECODE, wire.REDUCE, wire.FAIL], self_max=3)
    await session.until(4)
    await session.assign()
    second = await _actions(session, [LOW], (wire.REDUCE,))
    return f"{first}; after self-decoding {second}"


@table("SDCP-147", MUST, "6.5.2", "reduce halves m_cap, down to 1")
async def reduce(bench: Bench) -> str:
    session = await bench.open(low_rounds=1, m_max=7, fallback=[wire.REDUCE] * 4)
    caps = []
    for expected in (3, 1, 1, 1):
        verdict = await _round(session, LOW)
        caps.append(verdict["m_cap"])
        good = verdict["m_cap"] == expected or (verdict["load"] > BUSY and verdict["m_cap"] < expected)
        expect(verdict["action"] == wire.REDUCE and good, f"m_cap {caps}, action {verdict['action']}")
    return f"7, then {caps}"


@table("SDCP-148", MUST, "6.5.2", "switch: another drafter goes on from the committed prefix")
async def switch(bench: Bench) -> str:
    session = await bench.open(low_rounds=1, fallback=[wire.SWITCH, wire.FAIL])
    verdict = await _round(session, LOW)
    expect(verdict["action"] == wire.SWITCH, f"action {verdict['action']}")
    answer = await session.assign(bench.other or bench.drafter)
    expect(answer.status == 200, f"PUT drafter after a switch: {told(answer)}")
    expect((await _round(session, HIGH))["round"] == session.round, "rounds are not consecutive")
    return f"action 2, then round {session.round} by the drafter assigned next"


@table("AMB-103", DECISION, "6.5.2", "between a switch and the next assignment nobody is assigned")
async def switch_window(bench: Bench) -> str:
    session = await bench.open(low_rounds=1, fallback=[wire.SWITCH])
    message = session.proposal(await session.wrong(2))
    first = await session.post(message)
    expect((await session.post(message)).body == first.body, "the switching round can't be asked for again")
    return refused(await session.propose(await session.right(1)), wire.NOT_ASSIGNED, "the next round")


@table("SDCP-156", MUST, "6.5.2", "fail ends the session")
async def fail(bench: Bench) -> str:
    session = await bench.open(low_rounds=1, fallback=[wire.FAIL])
    expect((await _round(session, LOW))["action"] == wire.FAIL, "the only entry, fail, was not applied")
    output = await session.output()
    expect((output["final"], output.get("finish")) == (True, wire.FAIL), f"output {output}")
    return refused(await session.propose([0]), wire.CLOSED, "action 5, output final with finish 5; a proposal")


@table("SDCP-027", MUST, "4.1", "action codes 0 to 5 as registered")
async def action_codes(bench: Bench) -> str:
    contract = {"low_rounds": 1, "self_load": 100, "self_max": 1}
    session = await bench.open(fallback=[wire.REDUCE, wire.SWITCH, wire.SELF_DECODE, wire.FAIL], **contract)
    seen = [(await _round(session, HIGH))["action"], (await _round(session, LOW))["action"]]
    seen.append((await _round(session, LOW))["action"])
    await session.assign()
    seen.append((await _round(session, LOW))["action"])
    await session.until(len(session.tokens) + 1)
    await session.assign()
    seen.append((await _round(session, LOW))["action"])
    finishing = await bench.open(max_new=1)
    seen.append((await _round(finishing, HIGH))["action"])
    expect(seen == [0, 1, 2, 3, 5, 4], f"continue, reduce, switch, self_decode, fail, finish are {seen}")
    return "continue, reduce, switch, self_decode, fail, finish"


@table("SDCP-203", MUST, "9", "the ladder bounds the work for a hostile drafter")
async def ladder_bound(bench: Bench) -> str:
    session = await bench.open(low_rounds=2, fallback=[wire.REDUCE, wire.REDUCE, wire.FAIL])
    return await _actions(session, [LOW] * 6, (0, 1, 0, 1, 0, 5))


@table("AMB-109", DECISION, "6.5.2", "finish comes before escalation")
async def finish_priority(bench: Bench) -> str:
    session = await bench.open(low_rounds=1, fallback=[wire.FAIL], max_new=1)
    return await _actions(session, [LOW], (wire.FINISH,))


@table("AMB-118", DECISION, "6.5.2", "the round that fails is delivered")
async def fail_commits(bench: Bench) -> str:
    session = await bench.open(low_rounds=1, fallback=[wire.FAIL])
    await _round(session, LOW)
    expect((await session.output())["tokens"] == await bench.greedy(1), "the token of the failing round is missing")
    return "its token is in the output"


# ---- self-decoding -------------------------------------------------------------------------------


async def _self_decoding(
    bench: Bench,
    *,
    fallback: Sequence[int] = (wire.SELF_DECODE, wire.FAIL),
    self_max: int = 4,
    stop: Sequence[int] = (),
) -> Session:
    """A session whose first round was low, so that the verifier decodes by itself."""
    session = await bench.open(
        low_rounds=1, fallback=list(fallback), self_load=100, self_max=self_max, stop=list(stop)
    )  # fmt: skip
    verdict = await _round(session, LOW)
    expect(verdict["action"] == wire.SELF_DECODE, f"action {verdict['action']} with self_load 100")
    return session


@table("SDCP-151", MUST, "6.5.2", "self_decode, permitted up to self_load")
async def self_decode(bench: Bench) -> str:
    session = await _self_decoding(bench)
    await session.until(3)
    expect(len(session.tokens) >= 3, f"{len(session.tokens)} tokens")
    expect(session.tokens == await bench.greedy(len(session.tokens)), f"self-decoded {session.tokens}")
    return "the verifier goes on by itself, with the greedy tokens"


@table("SDCP-152", MUST, "6.5.2", "each self-decoded token is a round of its own")
async def self_rounds(bench: Bench) -> str:
    session = await _self_decoding(bench)
    await session.until(5)
    answer = await session.assign()
    expect(answer.status == 200, f"PUT drafter afterwards: {told(answer)}")
    state = wire.decode(answer.body)
    expect(state["round"] == state["committed"], f"round {state['round']} after {state['committed']} single tokens")
    expect(state["digest"] == session.digest(state["committed"]), "d[n] does not follow the self-decoded tokens")
    verdict = await session.verdict(await session.right(2))
    expect(verdict["round"] == state["round"] + 1, f"then round {verdict['round']}")
    return f"rounds 2 to {state['round']}, then a proposal in round {verdict['round']}"


@table("SDCP-153", MUST, "6.5.2", "self-decoding stops after self_max tokens")
async def self_stop(bench: Bench) -> str:
    session = await _self_decoding(bench, self_max=4)
    await session.until(5)
    await asyncio.sleep(BEFORE_IDLE_SECONDS)
    state = wire.decode((await session.assign()).body)
    expect(state["committed"] == 5, f"{state['committed'] - 1} tokens self-decoded, self_max 4")
    return "4 of 4"


@table("SDCP-154", MUST, "6.5.2", "self-decoding ends at a stop token")
async def self_end(bench: Bench) -> str:
    known = await bench.greedy(12)
    first = next((i for i in range(1, 12) if known.index(known[i]) == i), None)
    if first is None:
        raise Skipped("the target repeats one token, so no stop token can come later than the first")
    session = await _self_decoding(bench, self_max=50, stop=[known[first]])
    output = await session.until(50)
    expect((output["final"], output.get("finish")) == (True, wire.FINISH), f"final {output['final']}")
    expect(session.tokens == known[: first + 1], f"{len(session.tokens)} tokens, stop token at {first}")
    return "final output with finish 4, the stop token committed"


@table("AMB-101", DECISION, "6.3", "a self-decoded round has no verdict to ask for")
async def self_round_replay(bench: Bench) -> str:
    session = await _self_decoding(bench, self_max=2)
    await session.until(3)
    await session.assign()
    return refused(await session.propose([0], round=2), wire.STALE_BASE, "a proposal for a self-decoded round")


@table("AMB-102", DECISION, "6.5.2", "during self-decoding nobody is assigned, but replays are answered")
async def self_decode_proposal(bench: Bench) -> str:
    session = await bench.open(low_rounds=1, fallback=[wire.SELF_DECODE], self_load=100, self_max=2)
    message = session.proposal(await session.wrong(2))
    first = await session.post(message)
    refused(await session.propose(await session.right(1)), wire.NOT_ASSIGNED, "a new round")
    expect((await session.post(message)).body == first.body, "the last round can't be asked for again")
    return "a new round refused, the last one answered again"


@table("SDCP-195", MAY, "8", "a session without a drafter is decoded by the verifier")
async def without_drafter(bench: Bench) -> str:
    session = await bench.open(m_init=None, max_new=3)
    deadline = time.monotonic() + UNDRAFTED_SECONDS
    while time.monotonic() < deadline:
        output = await session.output()
        if output["final"]:
            expect(output["tokens"] == await bench.greedy(3), f"output {output['tokens']}")
            return "complete greedy output without a drafter"
        await asyncio.sleep(0.05)
    raise Skipped(f"no output without a drafter within {UNDRAFTED_SECONDS:g} s")


# ---- assignments ---------------------------------------------------------------------------------


@table("AMB-072", DECISION, "6.1", "PUT drafter with old values answers the true ones")
async def put_stale(bench: Bench) -> str:
    session = await bench.open()
    await session.verdict(await session.right(2))
    answer = await session.assign(round=0, committed=0, digest=session.digest(0))
    expect(answer.status == 200, told(answer))
    state = wire.decode(answer.body)
    seen = (state["round"], state["committed"], state["digest"])
    expect(seen == (1, len(session.tokens), session.digest()), f"round {seen[0]}, committed {seen[1]}")
    return f"round 1, committed {seen[1]}"


@table("AMB-074", DECISION, "5.2", "PUT drafter of another epoch is stale")
async def put_epoch(bench: Bench) -> str:
    session = await bench.open()
    refused(await session.assign(epoch=0), wire.STALE_EPOCH, "epoch 0")
    return refused(await session.assign(epoch=2), wire.STALE_EPOCH, "epochs 0 and 2")


@table("AMB-077", DECISION, "5.1", "the same PUT drafter again changes nothing")
async def put_same(bench: Bench) -> str:
    session = await bench.open(low_rounds=1, fallback=[wire.REDUCE] * 3)
    message = session.assignment()
    cap = (await _round(session, LOW))["m_cap"]
    answer = await bench.send(bench.router, "PUT", f"{session.path}/drafter", message)
    expect(answer.status == 200, told(answer))
    return refused(await session.propose(await session.right(cap + 1)), wire.LIMIT, f"m_cap stays {cap};")


@table("AMB-078", DECISION, "5.2", "m_init is read as at least 1 and at most m_max")
async def m_init_range(bench: Bench) -> str:
    session = await bench.open(m_init=0)
    refused(await session.propose(await session.right(2)), wire.LIMIT, "m_init 0, M = 2")
    await session.verdict(await session.right(1))
    await (await bench.open(m_init=99)).verdict([0] * M_MAX)
    return "0 is 1, 99 is m_max"


@table("AMB-079", DECISION, "6.5.1", "a new assignment sets m_cap to its m_init")
async def m_cap_new_drafter(bench: Bench) -> str:
    session = await bench.open(low_rounds=1, fallback=[wire.REDUCE, wire.REDUCE, wire.SWITCH])
    for _ in range(3):
        await _round(session, LOW)
    await session.assign(m_init=6)
    answer = await session.propose(await session.right(6))
    expect(answer.status == 200, f"6 tokens after a switch with m_init 6: {told(answer)}")
    return "reduced to 2, switched, 6 accepted with m_init 6"


@table("AMB-081", DECISION, "6.3", "a replay is answered although m_cap is lower by now")
async def limit_order(bench: Bench) -> str:
    session = await bench.open(low_rounds=1, fallback=[wire.REDUCE] * 3)
    message = session.proposal(await session.wrong(M_MAX))
    first = await session.post(message)
    await _round(session, LOW)
    again = await session.post(message)
    expect((again.status, again.body) == (200, first.body), told(again))
    return f"M = {M_MAX} again after m_cap {session.m_cap}"


@table("AMB-070", DECISION, "5.1", "DELETE ends a session")
async def delete(bench: Bench) -> str:
    session = await bench.open()
    rejected(await bench.send(bench.router, "DELETE", session.path), (204,), "DELETE")
    answer = await session.propose([0])
    return rejected(answer, (410, 403), "204, then a proposal")


# ---- policies (6.6) ------------------------------------------------------------------------------


@table("SDCP-160", MUST, "6.6", "from_round is above the current round")
async def policy_from(bench: Bench) -> str:
    session = await bench.open()
    await session.verdict(await session.right(1))
    for from_round in (0, 1):
        rejected(await session.policy(from_round, temperature_milli=0), (400, 409, 422), f"from_round {from_round}")
    answer = await session.policy(2, temperature_milli=0)
    expect(answer.status == 200, f"from_round 2 after round 1: {told(answer)}")
    return "0 and 1 refused after round 1, 2 accepted"


@table("SDCP-163", MUST, "6.6", "a policy changes neither the rule nor what is committed")
async def policy_rule(bench: Bench) -> str:
    session = await bench.open()
    await session.verdict(await session.right(2))
    before = list(session.tokens)
    message = {"session": session.id, "from_round": 2, "sampling": {"temperature_milli": 900}, "rule": 2}
    answer = await bench.send(bench.router, "POST", f"{session.path}/policy", message)
    expect(answer.status == 200, f"a policy with the unknown key rule: {told(answer)}")
    await session.verdict(await session.wrong(2))
    output = await session.output()
    expect(output["tokens"][: len(before)] == before, "committed output changed")
    expect(output["tokens"] == await bench.greedy(len(output["tokens"])), "no longer greedy after the policy")
    return "rule ignored, output goes on greedily"


@table("AMB-173", DECISION, "6.6", "a policy that comes too late is told the state")
async def policy_late(bench: Bench) -> str:
    session = await bench.open()
    await session.verdict(await session.right(1))
    answer = await session.policy(1, temperature_milli=0)
    refused(answer, wire.STALE_BASE, "from_round 1 after round 1")
    expect(wire.problem(answer.body).get("session_state", {}).get("round") == 1, "without session_state.round")
    return "409 sdcp-stale-base with session_state"


@table("AMB-177", DECISION, "6.6", "an ill-formed profile in a policy is 400")
async def policy_bad(bench: Bench) -> str:
    session = await bench.open()
    return rejected(await session.policy(1, top_p_milli=2000), (400,), "top_p_milli 2000")

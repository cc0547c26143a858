"""What is asked of a drafter: assignments, proposals, verdicts, and when to stop (6.2, 6.3, 6.9)."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from sdcp_mono.conformance import wire
from sdcp_mono.conformance.bench import anonymous, outdated, refused, rejected, told
from sdcp_mono.conformance.http2 import Client, NoAnswer
from sdcp_mono.conformance.kit import Failed, Level, Skipped, Table, expect
from sdcp_mono.conformance.stage import PROMPT, Arrival, Play, Stage, refuse, reply

MUST, SHOULD, DECISION = Level.MUST, Level.SHOULD, Level.DECISION
table = Table()

QUIET_SECONDS: Final = 0.7  # a drafter that goes on would propose within this time; it did so before


def _check(play: Play, arrival: Arrival) -> None:
    """What holds of every proposal: members, base, digest, round, the drafter's name."""
    message = arrival.message
    found = wire.defects("proposal", message)
    expect(not found, "; ".join(found))
    seen = (message["base"], message["base_digest"], message["round"], message["epoch"])
    expected = (len(play.tokens), play.digest(), play.round + 1, play.epoch)
    expect(seen == expected, f"base {seen[0]}, round {seen[2]}, epoch {seen[3]}; the session is at {expected[0]}")


# ---- assignments ---------------------------------------------------------------------------------


@table("SDCP-042", Level.MUST, "5.1", "HTTP/2 over TLS 1.3 only")
async def http2_tls13(stage: Stage) -> str:
    for what, context in (
        ("HTTP/1.1", outdated(stage.options.certs, "router", alpn="http/1.1")),
        ("TLS 1.2", outdated(stage.options.certs, "router", tls12=True)),
    ):
        client = Client(context)
        try:
            answer = await client.request(
                "POST", stage.base + "assignments", b"\xff", {"content-type": wire.MEDIA_TYPE}
            )
        except NoAnswer:
            continue
        finally:
            client.close()
        rejected(answer, (505, 403, 421, 426), f"a client that offers only {what}")
    return "HTTP/1.1 and TLS 1.2 turned away"


@table("SDCP-043", MUST, "5.1", "no service without a client certificate")
async def mutual_tls(stage: Stage) -> str:
    client = anonymous(stage.options.certs)
    body = wire.encode(stage.play().assignment())
    try:
        answer = await client.request("POST", stage.base + "assignments", body, {"content-type": wire.MEDIA_TYPE})
    except NoAnswer as failure:
        return f"connection refused ({failure})"
    finally:
        client.close()
    return rejected(answer, (403,), "without a certificate")


@table("SDCP-044", MUST, "5.1", "bodies are application/sdcp+cbor")
async def media_type(stage: Stage) -> str:
    answer = await stage.send(stage.play().assignment(), content_type="application/json")
    rejected(answer, (415,), "application/json")
    play = stage.play()
    arrival = await play.start()
    kind = arrival.request.headers.get("content-type", "")
    expect(kind == wire.MEDIA_TYPE, f"a proposal of type {kind!r}")
    return "proposals have the type, an assignment in application/json is 415"


@table("SDCP-045", MUST, "5.1", "errors are problem details")
async def problem_details(stage: Stage) -> str:
    for what, answer in (
        ("malformed", await stage.send(b"\xff")),
        ("bad contract", await stage.play(rule=0).assign()),
        ("wrong role", await stage.send(stage.play().assignment(), stage.other)),
    ):
        document = wire.problem(answer.body)
        good = answer.media_type.split(";")[0] == wire.PROBLEM_TYPE and document.get("status") == answer.status
        expect(answer.status >= 400 and good, f"{what}: {told(answer)}, type {answer.media_type!r}")
    return "three kinds of error"


@table("SDCP-052", MUST, "5.1", "POST assignments answers 204 without a body")
async def post_assignments(stage: Stage) -> str:
    answer = await stage.play().assign()
    expect((answer.status, answer.body) == (204, b""), f"{told(answer)}")
    return "204"


@table("SDCP-196", MUST, "9", "only the router assigns")
async def router_only(stage: Stage) -> str:
    play = stage.play()
    rejected(await stage.send(play.assignment(), stage.other), (403,), "an assignment by a drafter")
    expect(await play.silent(QUIET_SECONDS), "a proposal came all the same")
    return "403 for a drafter's certificate, no proposal"


@table("SDCP-028", MUST, "4.1", "an unknown key in the contract is refused")
async def contract_unknown_key(stage: Stage) -> str:
    for extra in ({"x": 1}, {99: 1}, {"sampling": {"min_p": 1}}):
        play = stage.play()
        message = play.assignment(contract={**play.contract, **extra})
        refused(await stage.send(message), wire.BAD_CONTRACT, f"contract with {extra}")
    return "a text, an integer and a nested key"


@table("SDCP-187", MUST, "7", "sdcp-bad-contract is 422")
async def bad_contract(stage: Stage) -> str:
    invalid: tuple[dict[str, Any], ...] = (
        {"m_max": 65},
        {"fallback": []},
        {"rule": 0},
        {"low_rounds": 0},
        {"stop": ...},
    )
    for changes in invalid:
        refused(await stage.play(**changes).assign(), wire.BAD_CONTRACT, f"{changes}")
    return "five invalid contracts"


@table("SDCP-034", MUST, "4.1", "a contract that does not list the drafter's model is refused")
async def drafters_listed(stage: Stage) -> str:
    return refused(await stage.play(drafters=[b"?" * 32]).assign(), wire.BAD_CONTRACT, "drafters without its model")


@table("SDCP-059", MUST, "5.2", "assignment: required members")
async def assignment_members(stage: Stage) -> str:
    required = [member for member in wire.SCHEMAS["assignment"] if not member.endswith("?")]
    for member in required:
        message = stage.play().assignment()
        del message[member]
        rejected(await stage.send(message), (400, 422), f"without {member}")
    return f"each of {', '.join(required)}"


@table("SDCP-070", MUST, "5.2", "unknown keys are ignored in assignments and verdicts")
async def unknown_keys(stage: Stage) -> str:
    play = stage.play()
    answer = await stage.send({**play.assignment(), "zz": 1, 99: [1]})
    expect(answer.status == 204, f"an assignment with unknown keys: {told(answer)}")
    arrival = await play.arrival()
    verdict = play.commit(arrival, 0, 7)
    arrival.answer(reply({**verdict, "zz": 1, 99: [1]}))
    _check(play, await play.arrival())
    return "the drafter goes on"


@table("AMB-085", DECISION, "6.2", "an assignment that names another drafter is refused")
async def other_drafter(stage: Stage) -> str:
    answer = await stage.play().assign(drafter="https://elsewhere.example/drafter/")
    return refused(answer, wire.BAD_CONTRACT, "another drafter's URI")


@table("AMB-045", DECISION, "5.2", "a verifier that is not listed is refused and not called")
async def other_verifier(stage: Stage) -> str:
    play = stage.play()
    rejected(await play.assign(verifier="https://elsewhere.example/verifier/"), (403, 422), "an unlisted verifier")
    return "refused"


@table("AMB-086", DECISION, "6.1", "an older epoch is stale, a duplicate starts no second worker")
async def duplicate(stage: Stage) -> str:
    play = stage.play()
    play.epoch = 2
    first = await play.start()
    expect((await play.assign()).status == 204, "the same assignment again was refused")
    second = await play.another(QUIET_SECONDS)
    expect(second is None or first.gone, "a second proposal while one is outstanding")
    if second is not None:
        expect(second.message["round"] == 1, f"a proposal for round {second.message['round']}")
    return refused(await play.assign(epoch=1), wire.STALE_EPOCH, "no second proposal; epoch 1 after epoch 2")


# ---- proposals -----------------------------------------------------------------------------------


@table("SDCP-061", MUST, "5.2", "proposal: members and types")
async def proposal_members(stage: Stage) -> str:
    play = stage.play()
    arrival = await play.start()
    _check(play, arrival)
    expect(arrival.message["drafter"] == stage.base, f"drafter {arrival.message['drafter']}")
    return f"M = {len(arrival.message['tokens'])}, {len(arrival.request.body)} octets"


@table("SDCP-010", MUST, "3", "a proposal carries no draft state, only references")
async def small(stage: Stage) -> str:
    play = stage.play()
    size = len((await play.start(m_init=8)).request.body)
    expect(size < 2048, f"{size} octets")
    return f"{size} octets"


@table("SDCP-087", MUST, "6.2", "1 <= M <= min(m_max, m_cap), m_init before the first verdict")
async def m_limits(stage: Stage) -> str:
    play = stage.play()
    arrival, sizes = await play.start(m_init=3), []
    for limit, following in ((3, 5), (5, 1), (1, 2), (2, 8)):
        sizes.append(len(arrival.message["tokens"]))
        expect(1 <= sizes[-1] <= limit, f"M = {sizes[-1]}, the limit is {limit}")
        play.decide(arrival, len(arrival.message["tokens"]), 5, m_cap=following)
        arrival = await play.arrival()
    return f"M = {sizes} of 3, 5, 1, 2"


@table("AMB-078", DECISION, "5.2", "m_init 0 is read as 1, above m_max as m_max")
async def m_init_range(stage: Stage) -> str:
    for m_init, limit in ((0, 1), (99, 2)):
        m = len((await stage.play(m_max=2).start(m_init=m_init)).message["tokens"])
        expect(1 <= m <= limit, f"M = {m} for m_init {m_init}, m_max 2")
    return "m_init 0 and 99"


@table("AMB-080", DECISION, "6.2", "an m_cap outside 1..m_max is clamped")
async def m_cap_range(stage: Stage) -> str:
    play = stage.play(m_max=3)
    arrival = await play.start()
    for cap, limit in ((99, 3), (0, 1)):
        play.decide(arrival, 0, 7, m_cap=cap)
        arrival = await play.arrival()
        m = len(arrival.message["tokens"])
        expect(1 <= m <= limit, f"M = {m} after m_cap {cap}, m_max 3")
    return "m_cap 99 and 0"


@table("SDCP-089", MUST, "6.2", "base, digest and round follow the last verdict")
async def fields(stage: Stage) -> str:
    play = stage.play()
    arrival = await play.start()
    for accepted, extra in ((0, 7), (1, 9), (0, 5)):
        _check(play, arrival)
        play.decide(arrival, accepted, extra)
        arrival = await play.arrival()
    _check(play, arrival)
    return "four proposals in a row"


@table("SDCP-120", MUST, "6.3", "the drafter adopts what was emitted")
async def adopts(stage: Stage) -> str:
    play = stage.play()
    arrival = await play.start()
    m = len(arrival.message["tokens"])
    play.decide(arrival, m, 11)
    arrival = await play.arrival()
    _check(play, arrival)
    return f"after {m} accepted and one more: base {arrival.message['base']}"


@table("SDCP-008", MUST, "2", "the first proposal is round 1")
async def round_1(stage: Stage) -> str:
    number = (await stage.play().start()).message["round"]
    expect(number == 1, f"round {number}")
    return "round 1"


@table("SDCP-090", MUST, "6.2", "one outstanding proposal per session")
async def one_outstanding(stage: Stage) -> str:
    play, neighbour = stage.play(), stage.play()
    await play.start()
    await neighbour.start()
    expect(await play.silent(QUIET_SECONDS), "a second proposal while the first waits for its verdict")
    return "nothing more while the verdict is delayed, another session goes on"


@table("SDCP-146", MUST, "6.5.2", "continue: the next round follows")
async def continues(stage: Stage) -> str:
    play = stage.play()
    play.decide(await play.start(), 0, 7)
    expect((await play.arrival()).message["round"] == 2, "not round 2")
    return "round 2 without the router"


@table("SDCP-147", MUST, "6.5.2", "reduce: the next round follows within m_cap")
async def reduces(stage: Stage) -> str:
    play = stage.play()
    play.decide(await play.start(m_init=8), 0, 7, action=wire.REDUCE, m_cap=2)
    m = len((await play.arrival()).message["tokens"])
    expect(1 <= m <= 2, f"M = {m} after reduce to 2")
    return f"M = {m} after reduce to 2"


async def _stops(stage: Stage, action: int) -> Play:
    play = stage.play()
    play.decide(await play.start(), 0, 7, action=action)
    expect(await play.silent(QUIET_SECONDS), f"a proposal after action {action}")
    return play


@table("SDCP-148", MUST, "6.5.2", "switch: the drafter stops")
async def switch(stage: Stage) -> str:
    await _stops(stage, wire.SWITCH)
    return "no proposal after action 2"


@table("SDCP-149", MUST, "6.5.2", "after self_decode, finish and fail the drafter stops until it is assigned again")
async def stops(stage: Stage) -> str:
    plays = await asyncio.gather(*(_stops(stage, action) for action in (wire.SELF_DECODE, wire.FINISH, wire.FAIL)))
    play = plays[0]
    _check(play, await play.start())
    return "no proposal after actions 3, 4, 5; a new assignment restarts it"


@table("SDCP-071", MUST, "5.2", "an unknown action is fail")
async def unknown_action(stage: Stage) -> str:
    await asyncio.gather(_stops(stage, 77), _stops(stage, 200))
    return "no proposal after actions 77 and 200"


# ---- prefixes, retries, resynchronisation --------------------------------------------------------


async def _fresh(stage: Stage, prompt: list[int]) -> list[int]:
    """What a drafter that knows nothing else proposes on this prefix."""
    return list((await stage.play(prompt).start()).message["tokens"])


async def _same(stage: Stage, prompt: list[int], arrival: Arrival, what: str) -> str:
    """Expect the proposal that a fresh drafter makes on the same prefix."""
    first, again = await _fresh(stage, prompt), await _fresh(stage, prompt)
    count = min(map(len, (first, again, arrival.message["tokens"])))
    if first[:count] != again[:count]:
        raise Skipped("the drafter does not draft the same twice, so its state can't be compared")
    expect(arrival.message["tokens"][:count] == first[:count], f"{what}: another proposal than a fresh drafter's")
    return f"{what}: as a fresh drafter proposes ({count} tokens)"


@table("SDCP-118", MUST, "6.3", "draft state beyond the accepted tokens is discarded")
async def discards(stage: Stage) -> str:
    play = stage.play()
    arrival = await play.start()
    for accepted, extra in ((0, 9), (1, 17)):
        play.decide(arrival, accepted, extra)
        arrival = await play.arrival()
    return await _same(stage, PROMPT + play.tokens, arrival, "after two rejections")


@table("SDCP-086", MUST, "6.2", "an assignment in the middle: the drafter prepares the whole prefix")
async def prepares(stage: Stage) -> str:
    play = stage.play()
    play.tokens, play.round = [5, 9, 17], 2
    arrival = await play.start()
    _check(play, arrival)
    return await _same(stage, PROMPT + play.tokens, arrival, "three tokens committed before")


@table("AMB-088", DECISION, "5.2", "committed tokens without a reference are fetched from the verifier")
async def fetches_output(stage: Stage) -> str:
    play = stage.play()
    play.tokens, play.round = [5, 9], 1
    _check(play, await play.start())
    expect(play.reads > 0, "no GET output")
    return "GET output, then a proposal with base 2"


@table("SDCP-182", MUST, "6.9", "a proposal whose verdict was lost is sent again")
async def retries(stage: Stage) -> str:
    play = stage.play()
    first = await play.start()
    verdict = play.commit(first, 0, 7)
    first.answer(None)
    again = await play.arrival()
    compared = [member for member in wire.SCHEMAS["proposal"] if member not in ("status", "draft_kv?")]
    different = [
        name for name in compared if first.message.get(name.rstrip("?")) != again.message.get(name.rstrip("?"))
    ]
    expect(not different, f"the retry differs in {', '.join(different)}")
    again.answer(reply(verdict))
    _check(play, await play.arrival())
    return "the same members again, then the next round"


@table("SDCP-098", MUST, "6.3", "after sdcp-stale-base the drafter goes on from session_state")
async def resynchronises(stage: Stage) -> str:
    play = stage.play()
    arrival = await play.start()
    play.tokens, play.round = [1, 2, 3], 2
    arrival.answer(refuse(409, "sdcp-stale-base", session_state=play.state()))
    _check(play, await play.arrival())
    return "base 3, round 3, as told"


@table("AMB-091", DECISION, "4.2", "a verdict whose digest does not fit leads to resynchronisation")
async def verifies_digest(stage: Stage) -> str:
    play = stage.play()
    arrival = await play.start()
    verdict = play.commit(arrival, 0, 7)
    play.tokens[-1] = 9  # what was committed is not what the verdict says was emitted
    arrival.answer(reply({**verdict, "digest": play.digest()}))
    _check(play, await play.arrival())
    expect(play.reads > 0, "no GET output")
    return "GET output, then a proposal on the true prefix"


@table("AMB-090", DECISION, "6.3", "emitted counts, not accepted")
async def emitted_counts(stage: Stage) -> str:
    play = stage.play()
    arrival = await play.start()
    verdict = play.commit(arrival, 0, 9)
    arrival.answer(reply({**verdict, "accepted": len(arrival.message["tokens"])}))
    arrival = await play.arrival()
    _check(play, arrival)
    return await _same(stage, PROMPT + play.tokens, arrival, "accepted contradicts emitted")


@table("AMB-084", DECISION, "5.1", "not assigned, closed and stale epoch end the session")
async def gives_up(stage: Stage) -> str:
    refusals: tuple[tuple[int, str], ...] = (
        (403, "sdcp-not-assigned"), (410, "sdcp-session-closed"), (409, "sdcp-stale-epoch"),
    )  # fmt: skip
    plays = [stage.play() for _ in refusals]
    for play, (status, suffix) in zip(plays, refusals, strict=True):
        (await play.start()).answer(refuse(status, suffix))
    quiet = await asyncio.gather(*(play.silent(QUIET_SECONDS) for play in plays))
    expect(all(quiet), f"proposals went on after {[s for (_, s), q in zip(refusals, quiet, strict=True) if not q]}")
    return "no proposal after any of them"


@table("SDCP-130", MUST, "6.4", "a proposal under rule 2 carries q_rows")
async def q_rows(stage: Stage) -> str:
    play = stage.play(rule=wire.SPECULATIVE_SAMPLING, sampling={"temperature_milli": 1000})
    answer = await play.assign()
    if answer.status == 422:
        raise Skipped(f"the drafter does not serve rule 2 ({told(answer)})")
    expect(answer.status == 204, told(answer))
    reference: Any = (await play.arrival()).message.get("q_rows")
    if not isinstance(reference, str):
        raise Failed(f"q_rows is {reference!r}")
    return f"{reference}"

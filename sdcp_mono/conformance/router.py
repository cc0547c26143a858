"""What is asked of a router: status reports, events, and the order of its steps (5.1, 6.1, 6.5, 6.9)."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any, Final

from sdcp_mono.conformance import wire
from sdcp_mono.conformance.bench import anonymous, outdated, rejected, told
from sdcp_mono.conformance.depot import Depot, Step
from sdcp_mono.conformance.http2 import Client, NoAnswer
from sdcp_mono.conformance.kit import Failed, Level, Skipped, Table, expect

MUST, SHOULD, DECISION = Level.MUST, Level.SHOULD, Level.DECISION
table = Table()

SHORT_TTL_MS: Final = 300
EXPIRED_SECONDS: Final = 0.5  # after which a report of SHORT_TTL_MS no longer counts
QUIET_SECONDS: Final = 0.7  # a router that goes on does so within this time


# ---- status reports and events -------------------------------------------------------------------


@table("SDCP-042", MUST, "5.1", "HTTP/2 over TLS 1.3 only")
async def http2_tls13(depot: Depot) -> str:
    for what, context in (
        ("HTTP/1.1", outdated(depot.options.certs, "verifier", alpn="http/1.1")),
        ("TLS 1.2", outdated(depot.options.certs, "verifier", tls12=True)),
    ):
        client = Client(context)
        try:
            answer = await client.request("POST", depot.base + "events", b"\xff", {"content-type": wire.MEDIA_TYPE})
        except NoAnswer:
            continue
        finally:
            client.close()
        rejected(answer, (505, 403, 421, 426), f"a client that offers only {what}")
    return "HTTP/1.1 and TLS 1.2 turned away"


@table("SDCP-043", MUST, "5.1", "no service without a client certificate")
async def mutual_tls(depot: Depot) -> str:
    client = anonymous(depot.options.certs)
    body = wire.encode(_event())
    try:
        answer = await client.request("POST", depot.base + "events", body, {"content-type": wire.MEDIA_TYPE})
    except NoAnswer as failure:
        return f"connection refused ({failure})"
    finally:
        client.close()
    return rejected(answer, (403,), "without a certificate")


@table("SDCP-044", MUST, "5.1", "bodies are application/sdcp+cbor")
async def media_type(depot: Depot) -> str:
    answer = await depot.put("drafter", depot.status("drafter"), kind="application/json")
    return rejected(answer, (415,), "application/json")


@table("SDCP-045", MUST, "5.1", "errors are problem details")
async def problem_details(depot: Depot) -> str:
    for what, answer in (
        ("malformed", await depot.put("drafter", b"\xff")),
        ("bad status", await depot.put("drafter", depot.status("drafter", load=101))),
        ("wrong role", await depot.event("drafter", _event())),
    ):
        document = wire.problem(answer.body)
        good = answer.media_type.split(";")[0] == wire.PROBLEM_TYPE and document.get("status") == answer.status
        expect(answer.status >= 400 and good, f"{what}: {told(answer)}, type {answer.media_type!r}")
    return "three kinds of error"


@table("SDCP-053", MUST, "5.1", "PUT status answers 204")
async def put_status(depot: Depot) -> str:
    for role in ("drafter", "verifier"):
        answer = await depot.put(role, depot.status(role, ttl_ms=1))
        expect((answer.status, answer.body) == (204, b""), f"{role}: {told(answer)}")
    return "204 for a drafter and a verifier"


@table("SDCP-066", MUST, "5.2", "status: members and ranges")
async def status_members(depot: Depot) -> str:
    bad: tuple[dict[str, Any], ...] = (
        {"role": 0}, {"role": 3}, {"load": 101}, {"accept_milli": 1001}, {"queue": -1}, {"load": ...}, {"queue": ...},
        {"ttl_ms": ...}, {"role": ...}, {"instance": ...},
    )  # fmt: skip
    for changes in bad:
        rejected(await depot.put("drafter", depot.status("drafter", **changes)), (400,), f"status with {changes}")
    return f"{len(bad)} defects refused"


@table("SDCP-070", MUST, "5.2", "unknown keys are ignored")
async def unknown_keys(depot: Depot) -> str:
    answer = await depot.put("drafter", {**depot.status("drafter", ttl_ms=1), "zz": 1, 99: [1]})
    expect(answer.status == 204, told(answer))
    return "in status"


@table("SDCP-198", MUST, "9", "an instance reports its own status only; events are the verifier's")
async def own_status(depot: Depot) -> str:
    await depot.put("drafter", depot.status("drafter", ttl_ms=1))
    foreign = depot.status("drafter", ttl_ms=1)
    answer = await depot.put("drafter-b", foreign, depot.uri("drafter"))
    rejected(answer, (403,), "another drafter's certificate on this instance")
    return rejected(await depot.event("drafter", _event()), (403,), "status of another 403; an event by a drafter")


@table("AMB-046", DECISION, "5.1", "instances/{id} names the instance of the body")
async def instance_id(depot: Depot) -> str:
    answer = await depot.put("drafter", depot.status("drafter", instance="somebody-else"))
    return rejected(answer, (400, 403), "another instance in the body")


@table("AMB-048", DECISION, "5.2", "a drafter's certificate does not report as verifier")
async def status_role(depot: Depot) -> str:
    return rejected(await depot.put("drafter", depot.status("drafter", role=2)), (403,), "role 2 by a drafter")


@table("AMB-182", DECISION, "5.1", "an event of an unknown session is 404")
async def unknown_session(depot: Depot) -> str:
    return rejected(await depot.event("verifier", _event()), (404,), "a session that nobody opened")


@table("SDCP-067", MUST, "5.2", "event: members")
async def event_members(depot: Depot) -> str:
    for member in wire.SCHEMAS["event"]:
        event = _event()
        del event[member]
        rejected(await depot.event("verifier", event), (400,), f"event without {member}")
    return f"each of {', '.join(wire.SCHEMAS['event'])} is required"


# ---- opening and assigning -----------------------------------------------------------------------


@table("SDCP-074", MUST, "6.1", "a session is opened with epoch 1 and a commit log")
async def opens(depot: Depot) -> str:
    await depot.report("verifier")
    await depot.report("drafter")
    message = (await depot.trigger()).message
    found = wire.defects("session-open", message)
    expect(not found, "; ".join(found))
    expect(message["epoch"] == 1 and "resume" not in message, f"epoch {message['epoch']}")
    return f"epoch 1, {message['commit_log']}"


@table("SDCP-056", MUST, "5.2", "its contract is one that 4.1 allows")
async def contract(depot: Depot) -> str:
    await depot.report("verifier")
    await depot.report("drafter")
    contract = (await depot.trigger()).message["contract"]
    known = {
        "target", "tokenizer", "drafters", "rule", "sampling", "m_max", "max_new", "stop", "low_rounds", "low_ratio",
        "fallback", "self_load", "self_max", "scope",
    }  # fmt: skip
    expect(set(contract) <= known, f"unknown keys {set(contract) - known}")
    good = (
        wire.HASH(contract["target"])
        and wire.HASH(contract["tokenizer"])
        and contract["rule"] in (1, 2)
        and 1 <= contract["m_max"] <= 64
        and wire.uint(contract["max_new"])
        and wire.uints(contract["stop"])
        and contract["low_rounds"] >= 1
        and set(contract["fallback"]) <= {1, 2, 3, 5}
        and contract["fallback"]
    )
    expect(good, f"{contract}")
    return f"rule {contract['rule']}, m_max {contract['m_max']}, fallback {contract['fallback']}"


@table("SDCP-080", MUST, "6.1", "the verifier hears of the drafter first")
async def verifier_first(depot: Depot) -> str:
    _, assignment = await depot.running("drafter")
    return f"POST sessions, PUT drafter, POST assignments at {assignment.role}"


@table("SDCP-059", MUST, "5.2", "assignment: members, for verifier and drafter alike")
async def assignment_members(depot: Depot) -> str:
    await depot.report("verifier")
    await depot.report("drafter")
    opening = await depot.trigger()
    for step in (await depot.step("PUT drafter"), await depot.step("POST assignments")):
        found = wire.defects("assignment", step.message)
        expect(not found, f"{step.kind}: {'; '.join(found)}")
        named = (step.message["verifier"], step.message["drafter"])
        expect(named == (depot.uri("verifier"), depot.uri("drafter")), f"{step.kind} names {named}")
        same = wire.encode(step.message["contract"]) == wire.encode(opening.message["contract"])
        expect(same, f"{step.kind}: another contract than the session's")
    return "in PUT drafter and POST assignments"


@table("SDCP-081", MUST, "6.1", "the assignment carries the state that PUT drafter answered")
async def assignment_content(depot: Depot) -> str:
    await depot.report("verifier")
    await depot.report("drafter")
    opening = await depot.trigger()
    depot.lie = {"round": 3, "committed": 3, "digest": b"\x07" * 32}  # it has decoded three tokens meanwhile
    step = await depot.step("PUT drafter")
    step = await depot.step("POST assignments")
    seen = {name: step.message[name] for name in depot.lie}
    expect(seen == depot.lie, f"round {seen['round']}, committed {seen['committed']}")
    expect(step.message["epoch"] == opening.message["epoch"], "another epoch")
    return "round 3, committed 3 and its digest"


@table("SDCP-078", MUST, "6.1", "a wrong d[0] ends the request, nothing is assigned")
async def checks_digest(depot: Depot) -> str:
    await depot.report("verifier")
    await depot.report("drafter")
    depot.lie = {"digest": bytes(32)}
    await depot.trigger()
    expect(await depot.quiet(QUIET_SECONDS), "a drafter was assigned although the digest of the prompt is wrong")
    return "no assignment"


@table("SDCP-034", MUST, "4.1", "a contract with drafters gets a listed one")
async def listed_drafter(depot: Depot) -> str:
    _, assignment = await depot.running("drafter")
    listed = assignment.message["contract"].get("drafters")
    expect(listed is None or b"d" * 32 in listed, "the assigned drafter's model is not listed")
    return "no list in the contract" if listed is None else "its model is listed"


@table("SDCP-084", MUST, "6.1", "no session for an instance whose status has expired")
async def no_expired(depot: Depot) -> str:
    await depot.report("verifier")
    await depot.report("drafter", ttl_ms=SHORT_TTL_MS, load=0)
    await depot.report("drafter-b", load=90, queue=9)
    await asyncio.sleep(EXPIRED_SECONDS)
    await depot.trigger()
    named = (await depot.step("PUT drafter")).message["drafter"]
    expect(named == depot.uri("drafter-b"), f"{named} was assigned after its status had expired")
    return "the busy live drafter, not the idle expired one"


# ---- events and failures -------------------------------------------------------------------------


async def _reassigned(depot: Depot, first: Step) -> Step:
    """The next assignment, after PUT drafter; the other drafter's."""
    put = await depot.step("PUT drafter")
    post = await depot.step("POST assignments")
    expect(put.message["drafter"] == post.message["drafter"], "verifier and drafter were told different drafters")
    expect(post.message["drafter"] != first.message["drafter"], "the same drafter was assigned again")
    return post


@table("SDCP-054", MUST, "5.1", "POST events answers 204")
async def post_events(depot: Depot) -> str:
    held, _ = await depot.running("drafter")
    answer = await depot.event("verifier", depot.happened(held, wire.FINISH))
    expect((answer.status, answer.body) == (204, b""), told(answer))
    return "204"


@table("SDCP-148", MUST, "6.5.2", "switch: another drafter is assigned")
async def switch(depot: Depot) -> str:
    depot.who("drafter-b")
    held, first = await depot.running("drafter", "drafter-b")
    held.tokens, held.round = [7, 9], 2
    answer = await depot.event("verifier", depot.happened(held, wire.SWITCH))
    expect(answer.status == 204, told(answer))
    step = await _reassigned(depot, first)
    expect(step.message["committed"] == 2, f"committed {step.message['committed']}")
    return "PUT drafter and POST assignments for the other drafter"


@table("SDCP-153", MUST, "6.5.2", "the end of self-decoding: a drafter is assigned again")
async def self_decoded(depot: Depot) -> str:
    held, _ = await depot.running("drafter")
    held.tokens, held.round = [7, 9, 11], 3
    answer = await depot.event("verifier", depot.happened(held, wire.SELF_DECODE))
    expect(answer.status == 204, told(answer))
    await depot.step("PUT drafter")
    step = await depot.step("POST assignments")
    expect(step.message["round"] == 3, f"round {step.message['round']}")
    return "PUT drafter and POST assignments, round 3"


@table("SDCP-071", MUST, "5.2", "an event of an unknown kind is fail")
async def unknown_kind(depot: Depot) -> str:
    held, _ = await depot.running("drafter")
    answer = await depot.event("verifier", depot.happened(held, 77))
    expect(answer.status == 204, told(answer))
    expect(await depot.quiet(QUIET_SECONDS), "the session went on after an event of kind 77")
    assert depot.outcome is not None
    done, _ = await asyncio.wait({depot.outcome}, timeout=QUIET_SECONDS)
    expect(done, "the request goes on after an event of kind 77")
    return "the request has ended"


@table("AMB-180", DECISION, "5.1", "a repeated or old event changes nothing")
async def repeated_event(depot: Depot) -> str:
    depot.who("drafter-b")
    held, first = await depot.running("drafter", "drafter-b")
    held.tokens, held.round = [7], 1
    event = depot.happened(held, wire.SWITCH)
    answers = [await depot.event("verifier", event)]
    await _reassigned(depot, first)
    answers += [await depot.event("verifier", event), await depot.event("verifier", {**event, "epoch": 0})]
    expect([answer.status for answer in answers] == [204] * 3, f"{[told(answer) for answer in answers]}")
    expect(await depot.quiet(QUIET_SECONDS), "a repeated event, or one of an older epoch, was acted on")
    return "the same event again and one of an older epoch: 204, nothing done"


@table("SDCP-175", MUST, "6.9", "a drafter whose status expires is replaced")
async def drafter_failure(depot: Depot) -> str:
    depot.who("drafter-b")
    await depot.report("verifier")
    await depot.report("drafter", ttl_ms=4 * SHORT_TTL_MS, load=0)
    await depot.trigger()
    await depot.step("PUT drafter")
    first = await depot.step("POST assignments")
    await depot.report("drafter-b")
    step = await _reassigned(depot, first)
    return f"reassigned to {step.role} once the status had expired"


@table("SDCP-178", MUST, "6.9", "a verifier whose status expires: the session is resumed elsewhere with the next epoch")
async def verifier_failure(depot: Depot) -> str:
    depot.who("verifier-b")
    await depot.report("verifier", ttl_ms=4 * SHORT_TTL_MS)
    await depot.report("drafter")
    opening = await depot.trigger()
    await depot.step("PUT drafter")
    await depot.step("POST assignments")
    await depot.report("verifier-b")
    try:
        step = await depot.step("POST sessions")
    except Failed as failure:
        if depot.options.mlc is None:  # a log that its verifier never created can't be fenced
            raise Skipped(f"{failure}; without --mlc the kit's verifier creates no commit log") from None
        raise
    message = step.message
    expect(message["session"] == opening.message["session"], "another session")
    expect(message["epoch"] == 2 and "resume" in message, f"epoch {message['epoch']}, resume {'resume' in message}")
    resume = message["resume"]
    expected = (0, 0, wire.first_digest(message["contract"], opening.message["prompt"]))
    seen = (resume["round"], resume["committed"], resume["digest"])
    expect(seen == expected, f"resume at round {seen[0]}, committed {seen[1]}, of a log without commit records")
    expect((await depot.step("PUT drafter")).role == step.role, "PUT drafter at another verifier")
    expect((await depot.step("POST assignments")).message["epoch"] == 2, "an assignment of the old epoch")
    return "epoch 2 with resume, then PUT drafter there and a new assignment"


def _event() -> wire.Message:
    return {"session": secrets.token_bytes(16), "epoch": 1, "kind": 2, "committed": 0, "digest": bytes(32)}

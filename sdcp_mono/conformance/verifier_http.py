"""What is asked of a verifier about HTTP, TLS, bodies, messages and who may do what (5.1, 5.2, 7, 9)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdcp_mono.conformance import wire
from sdcp_mono.conformance.bench import Bench, anonymous, outdated, refused, rejected, told
from sdcp_mono.conformance.http2 import Client, NoAnswer, Response
from sdcp_mono.conformance.kit import Level, Skipped, Table, expect

MUST, SHOULD, DECISION = Level.MUST, Level.SHOULD, Level.DECISION
table = Table()


@table("SDCP-042", MUST, "5.1", "HTTP/2 over TLS 1.3 only")
async def http2_tls13(bench: Bench) -> str:
    for what, context in (
        ("HTTP/1.1", outdated(bench.certs, "router", alpn="http/1.1")),
        ("TLS 1.2", outdated(bench.certs, "router", tls12=True)),
    ):
        expect(await _turned_away(Client(context), bench.base), f"a client that offers only {what} was served")
    answer = await bench.send(bench.router, "GET", "sessions/AAAAAAAAAAAAAAAAAAAAAA/output?from=0")
    return f"HTTP/1.1 and TLS 1.2 turned away, h2 over TLS 1.3 answered {answer.status}"


@table("SDCP-043", MUST, "5.1", "no service without a client certificate")
async def mutual_tls(bench: Bench) -> str:
    client = anonymous(bench.certs)
    try:
        answer = await client.request("GET", bench.base + "sessions/AAAAAAAAAAAAAAAAAAAAAA/output?from=0")
    except NoAnswer as failure:
        return f"connection refused ({failure})"
    finally:
        client.close()
    return rejected(answer, (403,), "without a certificate")


@table("SDCP-044", MUST, "5.1", "bodies are application/sdcp+cbor")
async def media_type(bench: Bench) -> str:
    session = await bench.open()
    answers = [await session.assign(), await session.propose(await session.right(1)), await session.get()]
    for answer in answers:
        expect(answer.media_type == wire.MEDIA_TYPE, f"a response of type {answer.media_type!r}")
    opening = wire.encode(bench.opening())
    answer = await bench.send(bench.router, "POST", "sessions", opening, {"content-type": "application/json"})
    return rejected(answer, (415,), "responses have the type; application/json")


@table("AMB-009", DECISION, "5.1", "missing type 415, unacceptable type 406")
async def media_errors(bench: Bench) -> str:
    session = await bench.open()
    body = wire.encode(session.proposal(await session.right(1)))
    url = bench.base + "proposals"
    answer = await bench.drafter.client.request("POST", url, body, {"accept": wire.MEDIA_TYPE})
    rejected(answer, (415,), "no Content-Type")
    answer = await bench.send(session.drafter, "POST", "proposals", body, {"accept": "application/json"})
    return rejected(answer, (406,), "no Content-Type 415; Accept: application/json")


@table("SDCP-206", MUST, "10.1", "media type parameters are accepted, none are sent")
async def media_parameters(bench: Bench) -> str:
    session = await bench.open()
    headers = {"content-type": f"{wire.MEDIA_TYPE}; v=1"}
    body = wire.encode(session.proposal(await session.right(1)))
    answer = await bench.send(session.drafter, "POST", "proposals", body, headers)
    expect(answer.status == 200 and ";" not in answer.media_type, f"{told(answer)}, type {answer.media_type!r}")
    return "accepted with v=1, none sent"


@table("SDCP-045", MUST, "5.1", "errors are problem details")
async def problem_details(bench: Bench) -> str:
    session = await bench.open()
    unknown = "sessions/AAAAAAAAAAAAAAAAAAAAAA"
    answers = {
        "malformed": await bench.send(bench.router, "POST", "sessions", b"\xff"),
        "bad contract": await bench.post(bench.opening(bench.contract(m_max=65))),
        "unknown session": await bench.send(bench.router, "GET", f"{unknown}/output?from=0"),
        "unknown resource": await bench.send(bench.router, "GET", "nothing-here"),
        "stale base": await session.propose([0], base=3),
        "wrong role": await bench.post(bench.opening(), bench.drafter),
    }
    for what, answer in answers.items():
        document = wire.problem(answer.body)
        expect(answer.status >= 400, f"{what}: {told(answer)}")
        expect(answer.media_type.split(";")[0] == wire.PROBLEM_TYPE, f"{what}: type {answer.media_type!r}")
        missing = [member for member in ("type", "title", "status") if member not in document]
        expect(not missing, f"{what}: without {', '.join(missing)}")
        expect(document["status"] == answer.status, f"{what}: status {document['status']} in a {answer.status}")
    return f"{len(answers)} kinds of error"


async def _each_problem(bench: Bench) -> Mapping[str, tuple[tuple[int, str], Response]]:
    """One answer of each problem type that greedy sessions can show."""
    session = await bench.open(max_new=4)
    stale_epoch = await session.propose([0], epoch=9)
    stale_base = await session.propose([0], base=3)
    limit = await session.propose([0] * 9)
    other = await session.propose([0], by=bench.router)
    contract = await bench.post(bench.opening(bench.contract(rule=0)))
    token = await session.propose([bench.card.vocab_size])
    while not session.ended:
        await session.verdict(await session.right(1))
    closed = await session.propose([0])
    return {
        "sdcp-stale-epoch": (wire.STALE_EPOCH, stale_epoch),
        "sdcp-stale-base": (wire.STALE_BASE, stale_base),
        "sdcp-limit": (wire.LIMIT, limit),
        "sdcp-not-assigned": (wire.NOT_ASSIGNED, other),
        "sdcp-bad-contract": (wire.BAD_CONTRACT, contract),
        "sdcp-bad-proposal": (wire.BAD_PROPOSAL, token),
        "sdcp-session-closed": (wire.CLOSED, closed),
    }


@table("SDCP-183", MUST, "7", "problem type URIs")
async def type_uris(bench: Bench) -> str:
    problems = await _each_problem(bench)
    for suffix, (_, answer) in problems.items():
        if suffix == "sdcp-bad-proposal":  # a token beyond the vocabulary is AMB-083
            continue
        seen = wire.problem(answer.body).get("type")
        expect(seen == wire.PREFIX + suffix, f"{suffix}: type {seen!r}")
    return f"{len(problems) - 1} types, each {wire.PREFIX}..."


@table("SDCP-209", SHOULD, "10.2.1", "titles are there and constant per type")
async def titles(bench: Bench) -> str:
    first, second = await _each_problem(bench), await _each_problem(bench)
    for suffix in first:
        pair = [wire.problem(problems[suffix][1].body).get("title") for problems in (first, second)]
        expect(pair[0] and pair[0] == pair[1], f"{suffix}: titles {pair}")
    distinct = {wire.problem(answer.body).get("title") for _, answer in first.values()}
    expect(len(distinct) == len(first), "one title for several types")
    return f"{len(first)} titles"


@table("AMB-171", DECISION, "5.1", "responses are not cached")
async def no_store(bench: Bench) -> str:
    session = await bench.open()
    verdict, problem = await session.propose(await session.right(1)), await session.propose([0], base=9)
    for answer in (await session.get(), verdict, problem):
        expect("no-store" in answer.headers.get("cache-control", ""), f"{answer.status} without no-store")
    return "Cache-Control: no-store on output, verdict and problem"


@table("AMB-144", DECISION, "5.1", "PUT drafter, POST proposals and POST policy answer 200")
async def codes(bench: Bench) -> str:
    session = await bench.open()
    answers = [await session.assign(), await session.propose(await session.right(1)), await session.policy(9)]
    expect([answer.status for answer in answers] == [200] * 3, f"{[answer.status for answer in answers]}")
    return "200, 200, 200"


@table("SDCP-055", MUST, "5.1", "{id} is base64url of 16 octets, 22 characters")
async def ids_in_paths(bench: Bench) -> str:
    session = await bench.open()
    good = wire.session_path(session.id)
    stray = good[:-1] + chr(ord(good[-1]) + 1)
    for bad in (good + "==", good[:-1], good + "A", "++++++++++++++++++++++", stray):
        answer = await bench.send(bench.router, "GET", f"sessions/{bad}/output?from=0", None, {"prefer": "wait=0"})
        rejected(answer, (400, 404), f"id {bad}")
    expect((await session.get()).status == 200, "the right id was not found")
    return "padding, 21 and 23 characters, another alphabet and stray bits refused"


@table("AMB-007", DECISION, "5.1", "what is no message is 400")
async def malformed(bench: Bench) -> str:
    session = await bench.open()
    for what, body in (("0xff", b"\xff"), ("a truncated map", b"\xa5\x61"), ("an array", wire.encode([1]))):
        rejected(await bench.send(session.drafter, "POST", "proposals", body), (400,), what)
    return rejected(await session.post(session.proposal([0], base=...)), (400,), "no CBOR, no map, no base")


@table("AMB-008", DECISION, "5.2", "trailing bytes are refused")
async def trailing(bench: Bench) -> str:
    session = await bench.open()
    body = wire.encode(session.proposal(await session.right(1))) + b"\0"
    return rejected(await session.post(body), (400,), "one octet more")


@table("AMB-010", DECISION, "5.1", "a proposal beyond 64 KiB is 413")
async def body_limit(bench: Bench) -> str:
    session = await bench.open()
    answer = await session.post(session.proposal([0], padding=b"p" * (65 * 1024)))
    return rejected(answer, (413,), "65 KiB")


@table("SDCP-004", MUST, "1.4", "a proposal is a chain: nested tokens are refused")
async def linear(bench: Bench) -> str:
    session = await bench.open()
    return rejected(await session.propose([[1], [2]]), (400, 422), "tokens [[1], [2]]")  # type: ignore[list-item]


@table("SDCP-061", MUST, "5.2", "proposal: required members and types")
async def proposal_members(bench: Bench) -> str:
    session = await bench.open()
    required = [member for member in wire.SCHEMAS["proposal"] if not member.endswith("?")]
    for member in required:
        answer = await session.post(session.proposal([0], **{member: ...}))
        rejected(answer, (400, 403), f"without {member}")
    wrong: Mapping[str, Any] = {
        "tokens": [], "round": "1", "epoch": -1, "base": 0.0, "base_digest": bytes(31), "session": bytes(15),
        "q_rows": b"x",
    }  # fmt: skip
    for member, value in wrong.items():
        rejected(await session.post(session.proposal([0], **{member: value})), (400, 403), f"{member} {value!r}")
    expect((await session.propose(await session.right(1))).status == 200, "a proposal with all members was refused")
    return f"{len(required)} missing and {len(wrong)} ill-typed members refused"


@table("SDCP-066", MUST, "5.2", "status: members and ranges")
async def status_members(bench: Bench) -> str:
    session = await bench.open()
    good = session.proposal([0])["status"]
    for change in ({"role": 0}, {"role": 3}, {"load": 101}, {"accept_milli": 1001}, {"ttl_ms": "1"}):
        rejected(await session.propose([0], status={**good, **change}), (400,), f"status {change}")
    for member in ("instance", "role", "load", "queue", "ttl_ms"):
        lacking = {key: value for key, value in good.items() if key != member}
        rejected(await session.propose([0], status=lacking), (400,), f"status without {member}")
    return "five bad values and five missing members refused"


@table("SDCP-059", MUST, "5.2", "assignment: required members")
async def assignment_members(bench: Bench) -> str:
    session = await bench.open()
    for member in (member for member in wire.SCHEMAS["assignment"] if not member.endswith("?")):
        message = session.assignment()
        del message[member]
        answer = await bench.send(bench.router, "PUT", f"{session.path}/drafter", message)
        rejected(answer, (400, 422), f"without {member}")
    return "each required member is required"


@table("SDCP-048", MUST, "5.1", "PUT drafter answers session-state")
async def put_drafter(bench: Bench) -> str:
    session = await bench.open()
    answer = await session.assign()
    expect(answer.status == 200, told(answer))
    found = wire.defects("session-state", wire.decode(answer.body))
    expect(not found, "; ".join(found))
    other = session.assignment(session=bytes(16))
    answer = await bench.send(bench.router, "PUT", f"{session.path}/drafter", other)
    return rejected(answer, (400,), "session-state; with another session in the body")


@table("SDCP-049", MUST, "5.1", "POST proposals answers a verdict")
async def post_proposals(bench: Bench) -> str:
    session = await bench.open()
    await session.verdict(await session.right(2))
    answer = await bench.send(session.drafter, "GET", "proposals")
    return rejected(answer, (405, 404), "verdict; GET proposals")


@table("SDCP-050", MUST, "5.1", "GET output answers output")
async def get_output(bench: Bench) -> str:
    session = await bench.open()
    answer = await session.get()
    expect(answer.status == 200, told(answer))
    found = wire.defects("output", wire.decode(answer.body))
    expect(not found, "; ".join(found))
    return "200 with output"


@table("SDCP-051", MUST, "5.1", "POST policy answers session-state")
async def post_policy(bench: Bench) -> str:
    session = await bench.open()
    answer = await session.policy(1, temperature_milli=0)
    expect(answer.status == 200, told(answer))
    found = wire.defects("session-state", wire.decode(answer.body))
    expect(not found, "; ".join(found))
    return "200 with session-state"


@table("SDCP-068", MUST, "5.2", "policy: members, and the session of the path")
async def policy_members(bench: Bench) -> str:
    session = await bench.open()
    good = {"session": session.id, "from_round": 1, "sampling": {}}
    for member in good:
        lacking = {key: value for key, value in good.items() if key != member}
        rejected(await bench.send(bench.router, "POST", f"{session.path}/policy", lacking), (400,), f"without {member}")
    other = {**good, "session": bytes(16)}
    return rejected(await bench.send(bench.router, "POST", f"{session.path}/policy", other), (400,), "another session")


@table("SDCP-058", MUST, "5.2", "session-state: members, from all three resources")
async def state_members(bench: Bench) -> str:
    answers = [await bench.post(bench.opening())]
    session = bench.opened[-1]
    answers += [await session.assign(), await session.policy(9)]
    for answer in answers:
        found = wire.defects("session-state", wire.decode(answer.body))
        expect(not found, "; ".join(found))
    return "POST sessions, PUT drafter, POST policy"


@table("SDCP-070", MUST, "5.2", "unknown keys are ignored outside the contract")
async def unknown_keys(bench: Bench) -> str:
    extra: wire.Message = {"zz": 1, 99: [1]}
    opening = {**bench.opening(), **extra}
    expect((await bench.post(opening)).status // 100 == 2, "session-open with unknown keys was refused")
    session = await bench.open(m_init=None)
    expect((await session.assign(zz=1)).status == 200, "assignment with an unknown key was refused")
    message = session.proposal(await session.right(1))
    message["status"] = {**message["status"], **extra}
    answer = await session.post({**message, **extra})
    expect(answer.status == 200, f"proposal and status with unknown keys: {told(answer)}")
    policy = {"session": session.id, "from_round": 5, "sampling": {"min_p": 1, 7: 7}, **extra}
    answer = await bench.send(bench.router, "POST", f"{session.path}/policy", policy)
    expect(answer.status == 200, f"policy and its sampling with unknown keys: {told(answer)}")
    return "in session-open, assignment, proposal, status, policy and its sampling"


# ---- who may do what (6.3 step 1, 9) -------------------------------------------------------------


@table("SDCP-196", MUST, "9", "only the router opens, assigns and sets policy")
async def router_only(bench: Bench) -> str:
    session = await bench.open()
    refusals = {
        "POST sessions": await bench.post(bench.opening(), bench.drafter),
        "PUT drafter": await session.assign(by=bench.drafter),
        "POST policy": await bench.send(
            bench.drafter, "POST", f"{session.path}/policy", {"session": session.id, "from_round": 1, "sampling": {}}
        ),
    }
    for what, answer in refusals.items():
        rejected(answer, (403,), f"a drafter's {what}")
    return f"{', '.join(refusals)} by a drafter: 403"


@table("SDCP-197", MUST, "9", "only the assigned drafter proposes")
async def drafter_only(bench: Bench) -> str:
    session = await bench.open()
    answer = await session.propose(await session.right(1), by=bench.router)
    return refused(answer, wire.NOT_ASSIGNED, "the router's certificate")


@table("SDCP-198", MUST, "9", "output is for those it concerns")
async def output_readers(bench: Bench) -> str:
    other = bench.need_other()
    session = await bench.open()
    return rejected(await session.get(who=other), (403, 404), "GET output by an unassigned drafter")


@table("AMB-043", DECISION, "7", "the wrong role gets 403 about:blank")
async def wrong_role_type(bench: Bench) -> str:
    return refused(await bench.post(bench.opening(), bench.drafter), (403, "about:blank"), "POST sessions by a drafter")


@table("AMB-049", DECISION, "6.7", "the assigned drafter may read output")
async def drafter_reads(bench: Bench) -> str:
    session = await bench.open()
    answer = await session.get(who=session.drafter)
    expect(answer.status == 200, told(answer))
    return "200"


@table("AMB-050", DECISION, "7", "an unknown session is 404, on proposals not assigned")
async def unknown_session(bench: Bench) -> str:
    session = await bench.open()
    path = "sessions/AAAAAAAAAAAAAAAAAAAAAA/output?from=0"
    rejected(await bench.send(bench.router, "GET", path), (404,), "GET output")
    return refused(await session.propose([0], session=bytes(16)), wire.NOT_ASSIGNED, "GET output 404; POST proposals")


async def _turned_away(client: Client, base: str) -> bool:
    """Whether a connection of this kind gets no service; a 4xx by the host counts, an SDCP answer does not."""
    try:
        answer = await client.request("GET", base + "sessions/AAAAAAAAAAAAAAAAAAAAAA/output?from=0", seconds=10)
    except NoAnswer:
        return True
    finally:
        client.close()
    if answer.status == 404:
        return False
    if answer.status >= 400:
        return True
    raise Skipped(f"answered {answer.status}")

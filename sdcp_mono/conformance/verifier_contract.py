"""What is asked of a verifier about contracts, opening sessions and the digest chain (4.1, 4.2, 6.1)."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import cbor2

from sdcp_mono.conformance import wire
from sdcp_mono.conformance.bench import M_MAX, Bench, refused, rejected, told
from sdcp_mono.conformance.kit import Level, Table, expect

MUST, SHOULD, DECISION = Level.MUST, Level.SHOULD, Level.DECISION
table = Table()

BIG: Final = 2**32

# One row per contract member: what is refused as sdcp-bad-contract, and what is accepted. "..." removes the member.
MEMBERS: Final[Sequence[tuple[str, str, Sequence[dict[str, Any]], Sequence[dict[str, Any]]]]] = (
    ("SDCP-012", "target", ({"target": ...}, {"target": b"t" * 31}, {"target": b"t" * 33}, {"target": "t" * 32}), ()),
    ("SDCP-013", "tokenizer", (
        {"tokenizer": ...}, {"tokenizer": b"t" * 31}, {"tokenizer": b"t" * 33}, {"tokenizer": "t" * 32}), ()),
    ("SDCP-014", "drafters", (
        {"drafters": []}, {"drafters": [b"d" * 31]}, {"drafters": b"d" * 32}), ({"drafters": [b"d" * 32]},)),
    ("SDCP-015", "rule", (
        {"rule": ...}, {"rule": 0}, {"rule": 3}, {"rule": 200}, {"rule": -1}, {"rule": "1"}, {"rule": True}),
        ({"rule": 1}, {"rule": 2})),
    ("SDCP-016", "sampling", ({"sampling": 1}, {"sampling": []}), ({"sampling": {}}, {})),
    ("SDCP-017", "m_max", ({"m_max": ...}, {"m_max": 65}, {"m_max": "8"}), ({"m_max": 64}, {"m_max": 1})),
    ("SDCP-018", "max_new", ({"max_new": ...}, {"max_new": -1}, {"max_new": 1.5}), ({"max_new": 1},)),
    ("SDCP-019", "stop", (
        {"stop": ...}, {"stop": 2}, {"stop": [-1]}, {"stop": ["2"]}), ({"stop": []}, {"stop": [2, 2]})),
    ("SDCP-020", "low_rounds", ({"low_rounds": ...}, {"low_rounds": 0}, {"low_rounds": "1"}), ({"low_rounds": 1},)),
    ("SDCP-021", "low_ratio", ({"low_ratio": 101}, {"low_ratio": -1}), ({"low_ratio": 0}, {"low_ratio": 100})),
    ("SDCP-022", "fallback", (
        {"fallback": ...}, {"fallback": []}, {"fallback": [0]}, {"fallback": [4]}, {"fallback": [6]},
        {"fallback": [1, "2"]}), ({"fallback": [1, 2, 3, 5]}, {"fallback": [5]}, {"fallback": [3, 3]})),
    ("SDCP-023", "self_load", ({"self_load": 101}, {"self_load": -1}), ({"self_load": 0}, {"self_load": 100})),
    ("SDCP-024", "self_max", ({"self_max": -1}, {"self_max": "4"}), ({"self_max": 4},)),
    ("SDCP-025", "scope", (
        {"scope": b"s" * 15}, {"scope": b"s" * 17}, {"scope": "s" * 16}), ({"scope": b"s" * 16},)),
    ("SDCP-026", "the sampling members", (
        {"sampling": {"top_p_milli": 1001}}, {"sampling": {"temperature_milli": -1}},
        {"sampling": {"temperature_milli": 0.5}}, {"sampling": {"top_k": "4"}}, {"sampling": {"seed": -1}}),
        ({"sampling": {"temperature_milli": 700, "top_k": 4, "top_p_milli": 1000, "seed": 2**64 - 1}},)),
)  # fmt: skip


def _member(bad: Sequence[dict[str, Any]], good: Sequence[dict[str, Any]]) -> Callable[[Bench], Awaitable[str]]:
    async def check(bench: Bench) -> str:
        for changes in bad:
            answer = await bench.post(bench.opening(bench.contract(**changes)))
            refused(answer, wire.BAD_CONTRACT, f"{changes}")
        for changes in good:
            answer = await bench.post(bench.opening(bench.contract(**changes)))
            expect(answer.status // 100 == 2, f"{changes}: {told(answer)}")
        return f"{len(bad)} bad ones refused, {len(good)} good ones accepted"

    return check


for _id, _name, _bad, _good in MEMBERS:
    table(_id, MUST, "4.1", f"contract: {_name}")(_member(_bad, _good))


@table("SDCP-011", MUST, "4.1", "no resource changes the contract")
async def contract_immutable(bench: Bench) -> str:
    session = await bench.open()
    for changes in ({"m_max": 4}, {"rule": 2}, {"stop": [1]}):
        answer = await session.assign(contract={**session.contract, **changes})
        refused(answer, wire.BAD_CONTRACT, f"PUT drafter with {changes}")
    verdict = await session.verdict(await session.right(2))
    expect(verdict["digest"] == session.digest(), "the digest chain changed after the refused contract")
    return "three changed contracts refused, the chain goes on"


@table("SDCP-028", MUST, "4.1", "an unknown key in the contract is refused")
async def contract_unknown_key(bench: Bench) -> str:
    bad: tuple[dict[Any, Any], ...] = ({"x": 1}, {99: 1}, {"sampling": {"min_p": 1}})
    for extra in bad:
        answer = await bench.post(opening := bench.opening({**bench.contract(), **extra}))
        refused(answer, wire.BAD_CONTRACT, f"session-open with {extra}")
        await bench.gone(opening["session"])
    session = await bench.open()
    answer = await session.assign(contract={**session.contract, "x": 1})
    return refused(answer, wire.BAD_CONTRACT, "session-open with a text, an integer and a nested key, and PUT drafter")


@table("SDCP-029", MUST, "4.1", "contract digest, seen in d[0] for every optional member")
async def contract_digest(bench: Bench) -> str:
    everything: dict[str, Any] = {
        "drafters": [b"d" * 32, b"e" * 32], "low_ratio": 50, "self_load": 80, "self_max": 4, "scope": b"s" * 16,
        "sampling": {"temperature_milli": 0, "top_k": 5, "top_p_milli": 900, "seed": 7}, "stop": [BIG - 1, 24, 23, 256],
    }  # fmt: skip
    cases: Sequence[dict[str, Any]] = (everything, {"drafters": [b"d" * 32]}, {"sampling": {}}, {"max_new": 24})
    for changes in cases:
        opening = bench.opening(bench.contract(**changes))
        state = _state(await bench.post(opening))
        expect(state["digest"] == wire.first_digest(opening["contract"], bench.prompt), f"d[0] differs for {changes}")
    return "d[0] as computed here for four contracts"


@table("SDCP-030", MUST, "4.1", "the digest is over the deterministic encoding, whatever was sent")
async def deterministic(bench: Bench) -> str:
    opening = bench.opening(bench.contract(sampling={"seed": 1, "top_k": 2}, low_ratio=10))
    answer = await bench.send(bench.router, "POST", "sessions", wire.loose(opening))
    expect(answer.status // 100 == 2, f"keys in another order, long integers, indefinite lengths: {told(answer)}")
    await bench.post(opening)  # the same session again, so that it is closed at the end
    expected = wire.first_digest(opening["contract"], bench.prompt)
    expect(_state(answer)["digest"] == expected, "d[0] depends on how the contract was encoded")
    return "d[0] is that of the deterministic encoding"


@table("SDCP-031", MUST, "4.1", "a policy update leaves the contract digest alone")
async def digest_as_created(bench: Bench) -> str:
    session = await bench.open()
    answer = await session.policy(1, temperature_milli=500)
    expect(answer.status == 200, f"POST policy: {told(answer)}")
    verdict = await session.verdict(await session.right(2))
    expect(verdict["digest"] == session.digest(), "d[n] no longer continues the chain of the contract as created")
    return "the chain goes on over a policy update"


@table("SDCP-035", MUST, "6.1", "a contract for another target is refused")
async def refuse_target(bench: Bench) -> str:
    other = bytes((bench.card.target[0] ^ 1, *bench.card.target[1:]))
    answer = await bench.post(bench.opening(bench.contract(target=other)))
    return refused(answer, wire.BAD_CONTRACT, "one bit of target flipped")


@table("SDCP-036", MUST, "4.2", "d[0] over contract digest, prompt length and prompt")
async def first_digest(bench: Bench) -> str:
    for prompt in ([0], [bench.card.vocab_size - 1, 0], bench.prompt * 8):
        opening = bench.opening(prompt=prompt)
        state = _state(await bench.post(opening))
        expect(state["digest"] == wire.first_digest(opening["contract"], prompt), f"d[0] differs, P = {len(prompt)}")
    return "d[0] as computed here for P = 1, 2, 32"


@table("SDCP-037", MUST, "4.2", "one link per committed token")
async def chain(bench: Bench) -> str:
    together, single = await bench.open(), await bench.open()
    verdict = await together.verdict(await together.right(5))
    expect(verdict["digest"] == together.digest(), "d[n] after a round of several tokens differs")
    while len(single.tokens) < len(together.tokens):
        verdict = await single.verdict(await single.wrong(1))
        expect(verdict["digest"] == single.digest(), f"d[{len(single.tokens)}] differs")
    return f"d[1..{len(single.tokens)}] as computed here, in one round and one by one"


@table("SDCP-038", MUST, "4.2", "token ids fit 32 bits")
async def uint32(bench: Bench) -> str:
    answer = await bench.post(bench.opening(prompt=[BIG]))
    return rejected(answer, (400, 422), "prompt token 2^32")


@table("SDCP-006", MUST, "2", "a session id is 16 octets")
async def session_id(bench: Bench) -> str:
    for size in (15, 17):
        answer = await bench.post(bench.opening(session=secrets.token_bytes(size)))
        rejected(answer, (400, 422), f"{size} octets")
    state = _state(await bench.post(bench.opening()))
    return f"15 and 17 octets refused, {len(state['session'])} accepted"


@table("SDCP-047", MUST, "5.1", "POST sessions answers session-state")
async def post_sessions(bench: Bench) -> str:
    opening = bench.opening()
    state = _state(answer := await bench.post(opening))
    expect((state["session"], state["epoch"]) == (opening["session"], 1), "session and epoch are not those sent")
    return f"{answer.status} with session-state"


@table("SDCP-077", MUST, "6.1", "a fresh session has round 0, committed 0, d[0]")
async def open_reply(bench: Bench) -> str:
    opening = bench.opening()
    state = _state(await bench.post(opening))
    seen = (state["round"], state["committed"], state["digest"])
    expected = (0, 0, wire.first_digest(opening["contract"], bench.prompt))
    expect(seen == expected, f"answered {seen[:2]} and {seen[2].hex()}")
    return "round 0, committed 0, d[0]"


@table("SDCP-007", MUST, "2", "n counts output tokens only")
async def n_counts_output(bench: Bench) -> str:
    session = await bench.open()
    verdict = await session.verdict(await session.wrong(1))
    expect(verdict["committed"] == len(verdict["emitted"]) == 1, f"committed {verdict['committed']} after one token")
    committed = wire.decode((await session.assign()).body)["committed"]
    expect(committed == 1, f"session-state.committed {committed} after one token")
    return f"committed 1 after one token, prompt of {len(bench.prompt)}"


@table("SDCP-056", MUST, "5.2", "session-open: required members")
async def open_members(bench: Bench) -> str:
    return await _members(bench, "session-open", lambda member: bench.post(bench.opening(**{member: ...})))


@table("SDCP-057", MUST, "5.2", "resume: required members and types")
async def resume_members(bench: Bench) -> str:
    resume = {"round": 0, "committed": 0, "digest": bytes(32), "committed_tokens": f"{bench.prefix}-/tokens/none"}
    bad = [{key: value for key, value in resume.items() if key != gone} for gone in resume]
    for broken in (*bad, {**resume, "digest": bytes(31)}):
        answer = await bench.post(bench.opening(epoch=2, resume=broken))
        rejected(answer, (400, 422), f"resume with {sorted(broken)}")
    return "each missing member and a digest of 31 octets refused"


@table("SDCP-075", MUST, "6.1", "a refused contract leaves no session")
async def open_validates(bench: Bench) -> str:
    for changes in ({"m_max": 65}, {"fallback": [0]}, {"low_rounds": 0}):
        opening = bench.opening(bench.contract(**changes))
        refused(await bench.post(opening), wire.BAD_CONTRACT, f"{changes}")
        await bench.gone(opening["session"])
    return "GET output answers 404 after three refusals"


@table("SDCP-069", MUST, "5.2", "a cache-ref is text that holds a URI")
async def cache_ref(bench: Bench) -> str:
    for bad in (b"mlc://x", 5, "not a uri"):
        rejected(await bench.post(bench.opening(commit_log=bad)), (400, 422), f"commit_log {bad!r}")
    return "octets, a number and text that is no URI refused"


@table("SDCP-060", MUST, "5.2", "a prompt may be a reference")
async def prompt_reference(bench: Bench) -> str:
    cache = bench.need_cache()
    scope = secrets.token_bytes(16)
    reference = await cache.put("tokens", wire.encode(bench.prompt), scope)
    opening = bench.opening(bench.contract(scope=scope), prompt=reference)
    state = _state(await bench.post(opening))
    expect(state["digest"] == wire.first_digest(opening["contract"], bench.prompt), "d[0] differs from the inline form")
    return "same d[0] as for the inline prompt"


# ---- decisions -----------------------------------------------------------------------------------


@table("AMB-004", DECISION, "4.1", "encodings that are well-formed but not deterministic are accepted")
async def loose_encoding(bench: Bench) -> str:
    session = await bench.open()
    answer = await session.post(wire.loose(session.proposal(await session.right(2))))
    expect(answer.status == 200, f"a proposal with indefinite lengths: {told(answer)}")
    return "a proposal with indefinite lengths and long integers got its verdict"


@table("AMB-005", DECISION, "4.1", "duplicate keys are refused")
async def duplicate_keys(bench: Bench) -> str:
    contract = wire.encode(bench.contract())
    doubled = bytes((contract[0] + 1,)) + contract[1:] + wire.encode("m_max") + wire.encode(8)
    body = wire.encode(bench.opening(bench.contract())).replace(contract, doubled)
    return refused(await bench.post(body), wire.BAD_CONTRACT, "two m_max in the contract")


@table("AMB-006", DECISION, "5.2", "uint is CBOR major type 0 only")
async def only_major_type_0(bench: Bench) -> str:
    for value in (8.0, cbor2.CBORTag(2, b"\x08"), True):
        answer = await bench.post(bench.opening(bench.contract(m_max=value)))
        refused(answer, wire.BAD_CONTRACT, f"m_max {value!r}")
    return rejected(await bench.post(bench.opening(epoch=1.0)), (400,), "m_max as float, bignum, bool; epoch as float")


@table("AMB-014", DECISION, "4.1", "an absent member and its default give different digests")
async def default_differs(bench: Bench) -> str:
    absent, explicit = bench.opening(), bench.opening(bench.contract(low_ratio=0))
    digests = [_state(await bench.post(opening))["digest"] for opening in (absent, explicit)]
    expected = [wire.first_digest(opening["contract"], bench.prompt) for opening in (absent, explicit)]
    expect(digests == expected and digests[0] != digests[1], "low_ratio absent and 0 were normalised")
    return "low_ratio absent and 0 differ in d[0]"


@table("AMB-016", DECISION, "4.1", "m_max 0 is refused")
async def m_max_0(bench: Bench) -> str:
    return refused(await bench.post(bench.opening(bench.contract(m_max=0))), wire.BAD_CONTRACT, "m_max 0")


@table("AMB-017", DECISION, "4.1", "max_new 0 is finished at once")
async def max_new_0(bench: Bench) -> str:
    session = await bench.open(m_init=None, max_new=0)
    output = await session.output()
    seen = (output["tokens"], output["final"], output.get("finish"))
    expect(seen == ([], True, wire.FINISH), f"output {seen}")
    return "final output without tokens, finish 4"


@table("AMB-018", DECISION, "4.1", "prompt and max_new beyond the context are refused")
async def beyond_context(bench: Bench) -> str:
    contract = bench.contract(max_new=bench.card.context)
    return refused(await bench.post(bench.opening(contract)), wire.BAD_CONTRACT, "max_new of the whole context")


@table("AMB-019", DECISION, "4.1", "stop tokens beyond 32 bits are refused, beyond the vocabulary accepted")
async def stop_range(bench: Bench) -> str:
    refused(await bench.post(bench.opening(bench.contract(stop=[BIG]))), wire.BAD_CONTRACT, "stop 2^32")
    _state(await bench.post(bench.opening(bench.contract(stop=[bench.card.vocab_size]))))
    return "2^32 refused, V accepted"


@table("AMB-032", DECISION, "4.1", "a contract for another tokenizer is refused")
async def refuse_tokenizer(bench: Bench) -> str:
    answer = await bench.post(bench.opening(bench.contract(tokenizer=b"?" * 32)))
    return refused(answer, wire.BAD_CONTRACT, "another tokenizer")


@table("AMB-035", DECISION, "5.2", "an empty prompt is refused")
async def empty_prompt(bench: Bench) -> str:
    return rejected(await bench.post(bench.opening(prompt=[])), (422,), "prompt []")


@table("AMB-036", DECISION, "5.2", "a prompt token beyond the vocabulary is refused")
async def prompt_range(bench: Bench) -> str:
    return rejected(await bench.post(bench.opening(prompt=[bench.card.vocab_size])), (422,), "prompt [V]")


@table("AMB-053", DECISION, "5.1", "201 with Location first, 200 for the same again")
async def open_status(bench: Bench) -> str:
    opening = bench.opening()
    first, second = await bench.post(opening), await bench.post(opening)
    location = first.headers.get("location", "")
    expect((first.status, second.status) == (201, 200), f"{first.status}, then {second.status}")
    expect(location.endswith(f"sessions/{wire.session_path(opening['session'])}"), f"Location {location!r}")
    return "201 with Location, then 200"


@table("AMB-054", DECISION, "6.1", "the same session-open again answers the state; other contents are a conflict")
async def open_replay(bench: Bench) -> str:
    opening = bench.opening()
    await bench.post(opening)
    state = _state(await bench.post(opening))
    expect(state["session"] == opening["session"], "another session")
    return rejected(await bench.post({**opening, "prompt": [1]}), (409,), "again: state; with another prompt")


@table("AMB-057", DECISION, "5.2", "epochs start at 1; resume exactly above 1")
async def epoch_rule(bench: Bench) -> str:
    resume = {"round": 0, "committed": 0, "digest": bytes(32), "committed_tokens": f"{bench.prefix}-/tokens/none"}
    cases: tuple[dict[str, Any], ...] = ({"epoch": 0}, {"epoch": 2}, {"epoch": 1, "resume": resume})
    for changes in cases:
        rejected(await bench.post(bench.opening(**changes)), (400,), f"{sorted(changes)} {changes['epoch']}")
    return "epoch 0, epoch 2 without resume, epoch 1 with resume: 400"


@table("AMB-153", DECISION, "6.8", "one commit log belongs to one session")
async def log_reuse(bench: Bench) -> str:
    session = await bench.open()
    await session.verdict(await session.right(1))
    answer = await bench.post(bench.opening(commit_log=session.opening["commit_log"]))
    return rejected(answer, (409,), "a second session on a log with records")


async def _members(bench: Bench, name: str, ask: Callable[[str], Awaitable[Any]]) -> str:
    required = [member for member in wire.SCHEMAS[name] if not member.endswith("?")]
    for member in required:
        rejected(await ask(member), (400, 422), f"{name} without {member}")
    return f"each of {', '.join(required)} is required"


def _state(answer: Any) -> dict[str, Any]:
    expect(answer.status // 100 == 2, f"POST sessions: {told(answer)}")
    state = wire.decode(answer.body)
    found = wire.defects("session-state", state)
    expect(not found, "; ".join(found))
    return dict(state)


assert M_MAX >= 5  # the chain check proposes five tokens

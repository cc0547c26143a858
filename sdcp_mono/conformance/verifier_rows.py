"""What is asked of a verifier about speculative sampling, caches, commit logs and taking over (6.3 to 6.9, 9).

To know p from outside, the temperature is so high that p is uniform for any model: 1/V, to one part in ten thousand.
A draft row then decides everything: mass 2/V on the proposed token is accepted when r < 1/2, and the residual is
spread evenly over the tokens that the row leaves at zero.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from sdcp_mono.conformance import wire
from sdcp_mono.conformance.bench import Bench, Cache, Session, changed, refused, rejected, told
from sdcp_mono.conformance.kit import Level, Skipped, Table, expect

MUST, MAY, DECISION = Level.MUST, Level.MAY, Level.DECISION
table = Table()

UNIFORM: Final = 10**9  # temperature x 1000; logits of any size become differences below 1e-4
EDGE: Final = 1e-3  # draws nearer than this to a boundary may fall either way, by rounding in p
GREEDY_AS_SAMPLING: Final = {"temperature_milli": 0}


async def _open(bench: Bench, sampling: Mapping[str, int], **changes: Any) -> Session:
    """A rule 2 session with the drafter assigned; skips where the verifier does not trust the drafter."""
    session = await bench.open(
        m_init=None, rule=wire.SPECULATIVE_SAMPLING, sampling=dict(sampling), scope=secrets.token_bytes(16), **changes
    )
    answer = await session.assign()
    if answer.status == 422:
        raise Skipped(f"the verifier does not trust {bench.drafter.uri} with rule 2 ({told(answer)})")
    expect(answer.status == 200, f"PUT drafter under rule 2: {told(answer)}")
    return session


async def _rows(session: Session, rows: Sequence[Mapping[int, float]]) -> str:
    body = wire.rows(rows, session.bench.card.vocab_size)
    return await session.bench.need_cache().put("rows", body, session.contract["scope"])


def _row(token: int, zeros: Sequence[int], vocab_size: int, times: float) -> dict[int, float]:
    """A row under which ``token`` is accepted with probability 1/``times``, and the residual lies on ``zeros``.

    The other tokens get a little more than 1/V each, as long as ``times`` is less than the number of zeros.
    """
    mass = times / vocab_size
    rest = (1 - mass) / (vocab_size - 1 - len(zeros))
    return {-1: rest, token: mass, **dict.fromkeys(zeros, 0.0)}


def _zeros(token: int, vocab_size: int) -> list[int]:
    """Every fourth token but the proposed one: the residual's support."""
    return [x for x in range(1, vocab_size, 4) if x != token][:64]


async def _predicted(session: Session, m: int) -> tuple[wire.Message, range, Sequence[int]]:
    """A proposal of m tokens, and what the seed makes of it: the values a may have, and the additional tokens."""
    v, seed = session.bench.card.vocab_size, session.contract["sampling"]["seed"]
    tokens = [(3 + 8 * i) % v for i in range(m)]
    support = [_zeros(token, v) for token in tokens]
    q_rows = await _rows(session, [_row(token, zeros, v, 2) for token, zeros in zip(tokens, support, strict=True)])

    def draw(i: int, purpose: int) -> float:
        return wire.uniform(seed, session.id, session.round + 1, i + 1, purpose)

    accepted = range(m, m + 1)
    for i in range(m):
        if draw(i, 0) >= 0.5 - EDGE:
            accepted = range(i, i + 1) if draw(i, 0) > 0.5 + EDGE else range(m + 1)
            break
    a = accepted[0]
    outcomes: Sequence[int] = range(v) if a == m else support[a]
    u, count = draw(a, 1), len(outcomes)
    extras = outcomes[max(0, int((u - EDGE) * count)) : int((u + EDGE) * count) + 1]
    return session.proposal(tokens, q_rows=q_rows), accepted, extras if len(accepted) == 1 else range(v)


async def _as_predicted(session: Session, m: int) -> int:
    message, accepted, extras = await _predicted(session, m)
    answer = await session.post(message)
    expect(answer.status == 200, told(answer))
    verdict = wire.decode(answer.body)
    expect(verdict["accepted"] in accepted, f"{verdict['accepted']} of {m} accepted, by the seed {accepted[0]}")
    expect(verdict["emitted"][-1] in extras, f"drew {verdict['emitted'][-1]}, by the seed {list(extras)[:3]}")
    return int(verdict["accepted"])


# ---- step 5 --------------------------------------------------------------------------------------


@table("SDCP-102", MUST, "6.3", "rows that can't be obtained: refused, nothing committed, the round stays free")
async def unavailable(bench: Bench) -> str:
    cache = bench.need_cache()
    session = await _open(bench, GREEDY_AS_SAMPLING)
    missing = cache.reference(session.contract["scope"], "rows")
    token = await session.right(1)
    refused(await session.propose(token, q_rows=missing), wire.Q_UNAVAILABLE, "a missing object")
    expect((await session.output())["tokens"] == [], "tokens were committed")
    verdict = await session.verdict(token, q_rows=await _rows(session, [{token[0]: 1.0}]))
    expect(verdict["round"] == 1, f"the corrected retry was round {verdict['round']}")
    return "409, nothing committed, then the same round with rows"


@table("SDCP-186", MUST, "7", "sdcp-q-unavailable is 409")
async def q_unavailable_type(bench: Bench) -> str:
    session = await _open(bench, GREEDY_AS_SAMPLING)
    missing = f"{bench.prefix}{session.contract['scope'].hex()}/rows/missing"
    return refused(await session.propose([0], q_rows=missing), wire.Q_UNAVAILABLE, "a missing object")


@table("SDCP-101", MUST, "6.3", "rows of every position are checked before anything is drawn")
async def rows_first(bench: Bench) -> str:
    session = await _open(bench, GREEDY_AS_SAMPLING)
    wrong = await session.wrong(2)  # rejected at position 1, so a lazy verifier never looks at row 2
    q_rows = await _rows(session, [{wrong[0]: 1.0}, {(wrong[1] + 1) % bench.card.vocab_size: 1.0}])
    refused(await session.propose(wrong, q_rows=q_rows), wire.BAD_PROPOSAL, "q is 0 behind a rejected position")
    one_row = await _rows(session, [{wrong[0]: 1.0}])
    answer = await session.propose(wrong, q_rows=one_row)
    rejected(answer, (409, 422), "one row for two positions, the first rejected")
    expect((await session.output())["tokens"] == [], "tokens were committed")
    return "a zero and a missing row behind a rejected position are noticed"


@table("SDCP-103", MUST, "6.4", "q(x) = 0 is refused, nothing committed")
async def zero(bench: Bench) -> str:
    session = await _open(bench, GREEDY_AS_SAMPLING)
    right = await session.right(2)
    q_rows = await _rows(session, [{right[0]: 1.0}, {(right[1] + 1) % bench.card.vocab_size: 1.0}])
    refused(await session.propose(right, q_rows=q_rows), wire.BAD_PROPOSAL, "q is 0 at the last position")
    expect((await session.output())["tokens"] == [], "tokens were committed")
    return "422, nothing committed"


@table("SDCP-190", MUST, "7", "sdcp-bad-proposal is 422")
async def bad_proposal_type(bench: Bench) -> str:
    session = await _open(bench, GREEDY_AS_SAMPLING)
    q_rows = await _rows(session, [{1: 1.0}])
    return refused(await session.propose([0], q_rows=q_rows), wire.BAD_PROPOSAL, "q(x) = 0")


@table("SDCP-130", MUST, "6.4", "a proposal under rule 2 without q_rows is refused")
async def q_required(bench: Bench) -> str:
    session = await _open(bench, GREEDY_AS_SAMPLING)
    rejected(await session.propose([0]), (400, 409, 422), "no q_rows")
    expect((await session.output())["tokens"] == [], "tokens were committed")
    return "refused, nothing committed"


@table("AMB-135", DECISION, "6.4", "no q_rows is sdcp-q-unavailable")
async def q_absent(bench: Bench) -> str:
    session = await _open(bench, GREEDY_AS_SAMPLING)
    return refused(await session.propose([0]), wire.Q_UNAVAILABLE, "no q_rows")


@table("AMB-133", DECISION, "6.4", "rows that are no distribution are refused")
async def q_normalised(bench: Bench) -> str:
    session = await _open(bench, GREEDY_AS_SAMPLING)
    nan = float("nan")
    defects = {"NaN": {0: 1.0, 1: nan}, "negative": {0: 1.5, 1: -0.5}, "sum 0.5": {0: 0.5}, "sum 2": {0: 2.0}}
    for what, row in defects.items():
        refused(await session.propose([0], q_rows=await _rows(session, [row])), wire.BAD_PROPOSAL, what)
    return "NaN, negative, sums 0.5 and 2"


@table("AMB-134", DECISION, "5.2", "rows too short are unavailable, too long inconsistent")
async def q_length(bench: Bench) -> str:
    session = await _open(bench, GREEDY_AS_SAMPLING)
    short, long = await _rows(session, [{0: 1.0}]), await _rows(session, [{0: 1.0}] * 2)
    refused(await session.propose([0, 0], q_rows=short), wire.Q_UNAVAILABLE, "one row for two tokens")
    return refused(await session.propose([0], q_rows=long), wire.BAD_PROPOSAL, "two rows for one token")


@table("SDCP-072", MUST, "5.2", "q_rows: M rows of V little-endian binary32")
async def layout(bench: Bench) -> str:
    session = await _open(bench, GREEDY_AS_SAMPLING)
    v, right = bench.card.vocab_size, await session.right(3)
    rows = [{-1: 0.5 / (v - 1), token: 0.5} for token in right]
    verdict = await session.verdict(right, q_rows=await _rows(session, rows))
    expect(verdict["accepted"] == 3, f"{verdict['accepted']} of 3 accepted")
    return "three rows read as meant"


# ---- rule 2 --------------------------------------------------------------------------------------


@table("SDCP-126", MUST, "6.4", "rule 2: accepted if r < p/q; certain where p is 1 or 0")
async def accept(bench: Bench) -> str:
    session = await _open(bench, GREEDY_AS_SAMPLING)
    for m, at in ((3, 3), (3, 1), (2, 0)):
        tokens = await session.right(m) if at == m else await session.wrong(m, at)
        verdict = await session.verdict(tokens, q_rows=await _rows(session, [{token: 1.0} for token in tokens]))
        expect(verdict["accepted"] == at, f"temperature 0, first wrong token at {at}: {verdict['accepted']} accepted")
    return "p = 1 always, p = 0 never"


@table("SDCP-127", MUST, "6.4", "rule 2: after a rejection the residual is drawn from")
async def residual(bench: Bench) -> str:
    session = await _open(bench, {"temperature_milli": UNIFORM})
    v, drawn = bench.card.vocab_size, []
    zeros = _zeros(7 % v, v)
    for row in [{7 % v: 1.0}] * 2 + [_row(7 % v, zeros, v, len(zeros) / 2)] * 6:
        verdict = await session.verdict([7 % v], q_rows=await _rows(session, [row]))
        if verdict["accepted"] == 0:
            drawn.append(verdict["emitted"][0])
            expect(drawn[-1] != 7 % v, "the rejected token was drawn although there p < q")
            expect(len(row) == 1 or drawn[-1] in zeros, f"drew {drawn[-1]}, where p < q")
    if not drawn:
        raise Skipped("every proposal was accepted by chance")
    return f"drew {drawn}"


@table("SDCP-128", MUST, "6.4", "rule 2: after full acceptance p[M+1] is drawn from")
async def bonus(bench: Bench) -> str:
    session = await _open(bench, GREEDY_AS_SAMPLING)
    right = await session.right(3)
    verdict = await session.verdict(right[:2], q_rows=await _rows(session, [{token: 1.0} for token in right[:2]]))
    expect(verdict["emitted"] == right, f"emitted {verdict['emitted']}, not {right}")
    return "the most probable token at temperature 0"


@table("SDCP-132", MUST, "6.4", "with a seed, the draws are the HMAC's")
async def seeded(bench: Bench) -> str:
    seen = []
    for seed in (0, 1, 2**63 + 5):
        session = await _open(bench, {"temperature_milli": UNIFORM, "seed": seed})
        seen += [await _as_predicted(session, m) for m in (1, 2, 3, 4)]
    return f"a and additional token as computed here in {len(seen)} rounds, a = {seen}"


@table("SDCP-135", MUST, "6.4", "without a seed, runs differ")
async def unseeded(bench: Bench) -> str:
    drawn = set()
    for _ in range(4):
        session = await _open(bench, {"temperature_milli": UNIFORM})
        for _ in range(3):
            token = 1 % bench.card.vocab_size
            verdict = await session.verdict([token], q_rows=await _rows(session, [{token: 1.0}]))
            drawn.add((verdict["round"], tuple(verdict["emitted"])))
    expect(len(drawn) > 3, f"only {len(drawn)} outcomes in twelve draws over the vocabulary")
    return f"{len(drawn)} outcomes in twelve draws"


@table("SDCP-161", MUST, "6.6", "a policy applies from from_round on, not earlier")
async def policy_applies(bench: Bench) -> str:
    session = await _open(bench, GREEDY_AS_SAMPLING)
    answer = await session.policy(2, temperature_milli=UNIFORM, seed=5)
    expect(answer.status == 200, told(answer))
    right = await session.right(1)
    verdict = await session.verdict(right, q_rows=await _rows(session, [{right[0]: 1.0}]))
    expect(verdict["accepted"] == 1, "round 1 was not at temperature 0, although the policy starts at 2")
    session.contract = {**session.contract, "sampling": {"seed": 5}}  # for the prediction only
    await _as_predicted(session, 4)
    return "round 1 by the contract, round 2 by the policy"


@table("SDCP-033", MUST, "4.1", "temperature 0 is the most probable token, under rule 2 too")
async def temperature_0(bench: Bench) -> str:
    session = await _open(bench, GREEDY_AS_SAMPLING)
    v = bench.card.vocab_size
    while len(session.tokens) < 6:
        tokens = [(len(session.tokens) * 5 + 2) % v]
        await session.verdict(tokens, q_rows=await _rows(session, [{tokens[0]: 1.0}]))
    expect(session.tokens == await bench.greedy(len(session.tokens)), f"{session.tokens}")
    return f"{len(session.tokens)} greedy tokens whatever was proposed"


@table("SDCP-032", MUST, "4.1", "top_k 1 and top_p 0 leave the most probable token")
async def profile(bench: Bench) -> str:
    for sampling in ({"top_k": 1}, {"top_p_milli": 0}, {"temperature_milli": 2000, "top_k": 1}):
        session = await _open(bench, sampling)
        right = await session.right(3)
        verdict = await session.verdict(right, q_rows=await _rows(session, [{token: 1.0} for token in right]))
        expect(verdict["accepted"] == 3, f"{sampling}: {verdict['accepted']} of 3 greedy tokens accepted")
    return "greedy under top_k 1, top_p 0 and both with a temperature"


@table("SDCP-200", MUST, "9", "rule 2 only with a trusted drafter")
async def trust(bench: Bench) -> str:
    other = bench.need_other()
    session = await bench.open(m_init=None, rule=wire.SPECULATIVE_SAMPLING)
    answer = await session.assign(other)
    if answer.status == 200 and not bench.untrusted:
        raise Skipped(f"the verifier takes {other.uri}; say --untrusted if it should not")
    refused(answer, wire.BAD_CONTRACT, "an untrusted drafter under rule 2")
    answer = await session.propose([0], by=other, drafter=other.uri)
    refused(answer, wire.NOT_ASSIGNED, "its proposal")
    greedy = await bench.open(m_init=None)
    expect((await greedy.assign(other)).status == 200, "the same drafter was refused under rule 1")
    return f"{other.uri} refused under rule 2, welcome under rule 1"


@table("SDCP-204", MUST, "9", "no reference leads the verifier outside its caches")
async def trusted_cache(bench: Bench) -> str:
    session = await _open(bench, GREEDY_AS_SAMPLING)
    async with _trap() as (port, visits):
        for reference in (
            f"http://127.0.0.1:{port}/rows", f"https://127.0.0.1:{port}/rows", "file:///etc/hostname",
            "http://169.254.169.254/latest/meta-data/", f"mlc://127.0.0.1:{port}/-/rows/x",
        ):  # fmt: skip
            refused(await session.propose([0], q_rows=reference), wire.Q_UNAVAILABLE, f"q_rows {reference}")
        await asyncio.sleep(0)
        expect(not visits, f"{len(visits)} connections to an address that only a proposal named")
    return "five foreign references refused, no connection"


@asynccontextmanager
async def _trap() -> AsyncIterator[tuple[int, list[str]]]:
    """A port that counts who connects."""
    visits: list[str] = []

    async def visited(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visits.append(str(writer.get_extra_info("peername")))
        writer.close()

    server = await asyncio.start_server(visited, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], visits
    finally:
        server.close()
        await server.wait_closed()


# ---- commit log and failover (6.8, 6.9) ----------------------------------------------------------


async def _logged(bench: Bench) -> tuple[Cache, Session]:
    """A session of two rounds whose commit log can be read."""
    cache = bench.need_cache()
    session = await bench.open(scope=secrets.token_bytes(16))
    await session.verdict(await session.wrong(3, at=1))
    await session.verdict(await session.right(2))
    return cache, session


@table("SDCP-111", MUST, "6.3", "one commit record a round, written before the verdict is answered")
async def commit_records(bench: Bench) -> str:
    cache, session = await _logged(bench)
    records, _ = await cache.log(session.opening["commit_log"])
    expect(len(records) == 2, f"{len(records)} records after two rounds")
    await session.verdict(await session.right(1))
    records, _ = await cache.log(session.opening["commit_log"])
    expect(len(records) == 3, f"{len(records)} records once the third verdict is here")
    return "three rounds, three records"


@table("SDCP-174", MUST, "6.8", "commit record: epoch, round, emitted, n, d[n]")
async def record_fields(bench: Bench) -> str:
    cache, session = await _logged(bench)
    records, _ = await cache.log(session.opening["commit_log"])
    tokens: list[int] = []
    for number, record in enumerate(records, 1):
        found = wire.defects("commit record", record)
        expect(not found, "; ".join(found))
        tokens += record["emitted"]
        seen = (record["epoch"], record["round"], record["committed"], record["digest"])
        expect(seen == (1, number, len(tokens), session.digest(len(tokens))), f"record {number}: {seen[:3]}")
    expect(tokens == session.tokens, "the log's tokens are not those of the verdicts")
    return f"{len(records)} records; their chain leads to d[{len(tokens)}]"


@table("SDCP-113", MUST, "6.3", "a fenced verifier discards the round and stops")
async def fenced(bench: Bench) -> str:
    cache, session = await _logged(bench)
    await _fence(cache, session, 2)
    n = len(session.tokens)
    answer = await session.propose(await session.right(2))
    expect(answer.status >= 400, "a verdict after the fence")
    records, _ = await cache.log(session.opening["commit_log"])
    expect(len(records) == 3, f"{len(records)} records after two rounds and a fence")
    answer = await session.get()
    released = wire.decode(answer.body)["tokens"] if answer.status == 200 else []
    expect(len(released) <= n, "output of the discarded round was released")
    return f"round discarded ({told(await session.propose([0]))})"


@table("AMB-157", DECISION, "6.8", "a fenced verifier answers stale-epoch")
async def fenced_response(bench: Bench) -> str:
    cache, session = await _logged(bench)
    await _fence(cache, session, 2)
    refused(await session.propose(await session.right(2)), wire.STALE_EPOCH, "proposal")
    refused(await session.assign(), wire.STALE_EPOCH, "PUT drafter")
    return refused(await session.get(), wire.STALE_EPOCH, "proposal, PUT drafter and output")


@table("SDCP-180", MUST, "6.9", "a resumed session goes on with round, n and d[n] under the new epoch")
async def resume(bench: Bench) -> str:
    cache, session = await _logged(bench)
    await _fence(cache, session, 2)
    answer = await bench.post(await _resuming(cache, session))
    expect(answer.status // 100 == 2, f"session-open with resume: {told(answer)}")
    state = wire.decode(answer.body)
    seen = (state["epoch"], state["round"], state["committed"], state["digest"])
    expect(seen == (2, session.round, len(session.tokens), session.digest()), f"epoch, round, n: {seen[:3]}")
    session.epoch = 2
    await session.assign()
    verdict = await session.verdict(await session.right(2))
    seen_ = (verdict["epoch"], verdict["round"], verdict["digest"])
    expect(seen_ == (2, 3, session.digest()), f"then epoch, round: {seen_[:2]}")
    return "state as in resume, then round 3 in epoch 2"


@table("SDCP-181", MUST, "6.9", "proposals of an older epoch are rejected")
async def old_epoch(bench: Bench) -> str:
    cache, session = await _logged(bench)
    await _fence(cache, session, 2)
    await bench.post(await _resuming(cache, session))
    session.epoch = 2
    await session.assign()
    answer = await session.propose(await session.right(1), epoch=1)
    return refused(answer, wire.STALE_EPOCH, "epoch 1 after the session was resumed in epoch 2")


@table("AMB-059", DECISION, "6.9", "resume is checked against prompt and tokens")
async def resume_digest(bench: Bench) -> str:
    cache, session = await _logged(bench)
    await _fence(cache, session, 2)
    flipped = [(session.tokens[0] + 1) % bench.card.vocab_size, *session.tokens[1:]]
    answer = await bench.post(await _resuming(cache, session, flipped))
    return rejected(answer, (422,), "one flipped token in committed_tokens")


async def _fence(cache: Cache, session: Session, epoch: int) -> None:
    """What a router does before it opens a session elsewhere."""
    log = session.opening["commit_log"]
    _, etag = await cache.log(log)
    answer = await cache.append(log, {"epoch": epoch}, etag)
    if answer.status // 100 != 2:
        raise Skipped(f"the log can't be fenced through the cache: {answer.status}")


async def _resuming(cache: Cache, session: Session, tokens: Sequence[int] | None = None) -> wire.Message:
    written = session.tokens if tokens is None else list(tokens)
    reference = await cache.put("tokens", wire.encode(written), session.contract["scope"])
    resume = {
        "round": session.round, "committed": len(session.tokens), "digest": session.digest(),
        "committed_tokens": reference,
    }  # fmt: skip
    return changed(dict(session.opening), {"epoch": 2, "resume": resume})

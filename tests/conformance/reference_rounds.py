"""The nine steps of the reference verifier (6.3), its two rules and its ladder (6.4, 6.5)."""

from __future__ import annotations

import asyncio
import math
import struct
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from reference_host import CBOR, Refuse
from reference_octets import encode

from sdcp_mono.conformance.http2 import Response

if TYPE_CHECKING:
    from reference_verifier import Session, Verifier

V = 64
CONTINUE, REDUCE, SWITCH, SELF, FINISH, FAIL = range(6)


async def steps(host: Verifier, session: Session, message: dict[str, Any]) -> Response:
    """Steps 3 to 9, under the session's lock."""
    bad, tokens, n = host.bad, message["tokens"], len(session.tokens)
    if bad("closed before replay"):
        host.open_only(session)
    stored = session.verdicts.get(message["round"])
    if bad("limit before replay") and len(tokens) > session.cap:
        raise Refuse("sdcp-limit")
    if stored is not None and not bad("replays nothing"):
        if bad("replay compares") and message["base"] != n - 1 and message["base"] > n:
            raise host.stale(session)
        return Response(200, {"content-type": CBOR}, stored)
    if not (bad("commits after the end") and session.ended):
        host.open_only(session)
    if session.released and not bad("the assignment outlives a switch"):
        raise Refuse("sdcp-not-assigned")
    if bad("limit before base") and len(tokens) > session.cap:
        raise Refuse("sdcp-limit")
    check_base(host, session, message)
    limit = session.m_max if bad("only m_max enforced") else session.cap
    if len(tokens) > limit and not bad("no limit"):
        if bad("a long proposal uses the round up"):
            session.round += 1
        raise Refuse("sdcp-limit")
    if bad("M of 5 and more refused") and len(tokens) > 4:
        raise Refuse("sdcp-limit")
    if len(tokens) > session.contract["max_new"] - n and bad("no room is a refusal"):
        raise Refuse("sdcp-limit")
    if max(tokens) >= V and not bad("any token"):
        raise Refuse("sdcp-bad-proposal")
    q: list[list[float]] = []
    if session.contract["rule"] == 2 and not ("q_rows" not in message and bad("rule 2 without rows")):
        q = await rows(host, session, message)
    elif "q_rows" in message and bad("rows fetched under rule 1"):
        raise Refuse("sdcp-q-unavailable")
    await asyncio.sleep(0.001)  # a forward pass; others come in meanwhile
    accepted, kept = accept(host, session, [token % V for token in tokens], q)
    return commit(host, session, tokens, accepted, kept)


def check_base(host: Verifier, session: Session, message: dict[str, Any]) -> None:
    bad, n = host.bad, len(session.tokens)
    wrong_digest = message["base_digest"] != session.digests[-1] and not bad("digest ignored")
    if bad("one link a round"):
        wrong_digest = False
    if (message["base"] != n or wrong_digest) and not bad("stale base accepted"):
        raise host.stale(session)
    if message["round"] != session.round + 1 and not bad("any round"):
        raise host.stale(session)


async def rows(host: Verifier, session: Session, message: dict[str, Any]) -> list[list[float]]:
    bad, tokens = host.bad, message["tokens"]
    reference = message.get("q_rows")
    if reference is None:
        raise Refuse("sdcp-bad-proposal" if bad("absent rows are 422") else "sdcp-q-unavailable")
    if not reference.startswith("mlc://local/"):
        if bad("rows fetched from anywhere") and urlsplit(reference).port:
            _, writer = await asyncio.open_connection("127.0.0.1", urlsplit(reference).port)
            writer.close()
        raise Refuse("sdcp-q-unavailable")
    body = host.objects.get(reference.removeprefix("mlc://local/"))
    if body is None:
        if bad("missing rows use the round up"):
            session.round += 1
        raise Refuse("sdcp-q-unavailable")
    lazily = bad("rows checked lazily")
    if len(body) < 4 * V * len(tokens) and not lazily:
        raise Refuse("sdcp-q-unavailable")
    if len(body) > 4 * V * len(tokens) and not bad("long rows accepted"):
        raise Refuse("sdcp-bad-proposal")
    order = ">" if bad("rows are big-endian") else "<"
    q = [list(struct.unpack_from(f"{order}{V}f", body, 4 * V * i)) for i in range(len(body) // (4 * V))]
    for i, (token, row) in enumerate(zip(tokens, q, strict=False)):
        if lazily and token != host.best(session, [*session.tokens, *tokens[:i]]):
            break
        broken = any(not math.isfinite(x) or x < 0 for x in row) or abs(sum(row) - 1) > 1e-3
        if (row[token] == 0 and not bad("q of 0 accepted")) or (broken and not bad("rows not summed")):
            raise Refuse("sdcp-bad-proposal")
    return q


def accept(host: Verifier, session: Session, tokens: list[int], q: list[list[float]]) -> tuple[int, list[int]]:
    """Step 7 without truncation: a, and the tokens of the round."""
    bad, prefix = host.bad, session.tokens
    if session.contract["rule"] == 2 and q:
        return sample(host, session, tokens, q)
    best = [host.best(session, [*prefix, *tokens[:i]]) for i in range(len(tokens) + 1)]
    hits = [token == best[i] for i, token in enumerate(tokens)]
    accepted = hits.index(False) if False in hits else len(tokens)
    if bad("everything accepted"):
        accepted = len(tokens)
    if bad("hits counted over gaps"):
        accepted = sum(hits)
    extra = best[accepted]
    if bad("the rejected token is emitted") and accepted < len(tokens):
        extra = tokens[accepted]
    if bad("a wrong bonus") and accepted == len(tokens):
        extra = (extra + 1) % V
    kept = [*tokens[:accepted], extra]
    if bad("no additional token") and accepted:
        kept = kept[:-1]
    session.junk = tokens if bad("rejected tokens stay") and accepted < len(tokens) else []
    return accepted, kept


def sample(host: Verifier, session: Session, tokens: list[int], q: list[list[float]]) -> tuple[int, list[int]]:
    bad, prefix, round_ = host.bad, session.tokens, session.round + 1
    profile = host.profile(session, round_)
    for i, x in enumerate(tokens):
        p = host.p(session, [*prefix, *tokens[:i]], profile)
        q_row = q[i] if i < len(q) else [1.0] * V
        ratio = p[x] / q_row[x] if q_row[x] else 1.0
        r = host.uniform(session, round_, i + 1, 0)
        if r < min(1.0, 1.0 - p[x] if bad("acceptance upside down") else ratio):
            continue
        residual = [max(0.0, a - b) for a, b in zip(p, q_row, strict=True)]
        weights = p if bad("residual ignored") or not sum(residual) else residual
        return i, [*tokens[:i], draw(weights, host.uniform(session, round_, i + 1, 1))]
    at = [*prefix, *tokens][:-1] if bad("bonus from the last row") else [*prefix, *tokens]
    extra = draw(host.p(session, at, profile), host.uniform(session, round_, len(tokens) + 1, 1))
    return len(tokens), [*tokens, extra]


def draw(weights: list[float], u: float) -> int:
    reached, total = 0.0, sum(weights)
    for x, weight in enumerate(weights):
        reached += weight
        if reached > u * total:
            return x
    return max(x for x, weight in enumerate(weights) if weight)


def truncate(host: Verifier, session: Session, kept: list[int]) -> tuple[list[int], bool]:
    room = session.contract["max_new"] - len(session.tokens)
    if host.bad("max_new ignored"):
        room = len(kept) + 1
    stops = [] if host.bad("stop ignored") else session.contract["stop"]
    end = next((i for i, token in enumerate(kept) if token in stops), None)
    if end is not None:
        kept = kept[: end if host.bad("stop token dropped") and end else end + 1]
    return kept[:room], end is not None or len(kept) >= room


def commit(host: Verifier, session: Session, tokens: list[int], a: int, kept: list[int]) -> Response:
    """Steps 7 to 9."""
    bad, m = host.bad, len(tokens)
    emitted, finished = truncate(host, session, kept)
    fence = any(record["epoch"] > session.epoch for record in host.logs[session.log])
    if fence and not bad("fence ignored"):
        session.fenced = True
        host.open_only(session)
    session.round += 1
    if not (bad("the failing round is dropped") and session.contract["fallback"] == [FAIL] and not finished):
        host.commit(session, kept if bad("digest over truncated tokens") else emitted)
        if bad("digest over truncated tokens"):
            session.tokens = session.tokens[: len(session.tokens) - len(kept) + len(emitted)]
    action, low = control(host, session, a, m, finished)
    verdict = {
        "session": session.id, "epoch": session.epoch, "round": session.round,
        "accepted": max(0, len(emitted) - 1) if bad("accepted is truncated") else a, "emitted": emitted,
        "committed": len(session.tokens) - (len(emitted) if bad("committed lags") else 0),
        "digest": session.digests[-1], "action": action, "m_cap": session.cap, "low": low, "load": 10,
    }  # fmt: skip
    if bad("m_cap 0"):
        verdict["m_cap"] = 0
    if bad("load per mille"):
        verdict["load"] = 450
    if action in (FINISH, FAIL):
        session.ended = action
        session.news.set()
    body = session.verdicts[session.round] = encode(verdict)
    session.released = action in (SWITCH, SELF)
    if action == SELF:
        self_decode(host, session)
    if session.released:
        host.idle(session)
    if bad("verdicts change"):
        session.verdicts[session.round] = encode({**verdict, "load": 11})
    return Response(201 if bad("201 for everything") else 200, {"content-type": CBOR}, body)


def control(host: Verifier, session: Session, a: int, m: int, finished: bool) -> tuple[int, int]:
    """6.5.2: the action, and what verdict.low says."""
    bad, contract = host.bad, session.contract
    ratio = 0 if bad("low_ratio ignored") else contract.get("low_ratio", 0)
    low = 100 * a < ratio * m if ratio else a == 0
    if low:
        session.c, session.g = session.c + 1, 0
    else:
        session.c, session.g = 0, session.g + 1
        if session.g >= contract["low_rounds"] and not bad("g never resets j"):
            session.j = 0
        if not bad("no restoration"):
            session.cap = min(session.m_max, session.cap + 1)
    told = 0 if bad("low is always 0") else session.c
    action = CONTINUE
    late = 1 if bad("escalates one round late") else 0
    if low and session.c >= contract["low_rounds"] + late:
        action = entry(host, session)
        session.c = 0
        told = 0 if bad("low after the reset") else told
    if finished and not (bad("escalation before finish") and action):
        action = FINISH
    if action == REDUCE:
        session.cap = session.cap - 1 if bad("reduce by one") else max(1, session.cap // 2)
    if bad("codes swapped"):
        action = {REDUCE: SWITCH, SWITCH: REDUCE}.get(action, action)
    if bad("switch is fail") and action == SWITCH:
        action = FAIL
    return action, told


def entry(host: Verifier, session: Session) -> int:
    fallback = session.contract["fallback"]
    while session.j < len(fallback):
        action: int = fallback[session.j]
        session.j += 1
        if action != SELF or "self_load" in session.contract or host.bad("self_decode unpermitted"):
            return action
    return CONTINUE if host.bad("exhausted is continue") else FAIL


def self_decode(host: Verifier, session: Session) -> None:
    """6.5.2: token by token, up to self_max."""
    count = session.contract.get("self_max", 1000)
    if host.bad("self_decode does nothing"):
        session.ended = FAIL
        return
    if host.bad("self_max ignored"):
        count += 3
    if host.bad("self-decoding is one round"):
        tokens: list[int] = []
        for _ in range(count):
            tokens.append(host.best(session, session.tokens + tokens))
        session.round += 1
        host.commit(session, tokens)
        return
    for _ in range(count):
        if session.ended:
            return
        host.commit_self(session, host.best(session, session.tokens))
        if host.bad("self rounds have verdicts"):
            session.verdicts[session.round] = next(iter(session.verdicts.values()))

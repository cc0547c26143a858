"""Our drafter role against a verifier that is not ours: h2, cbor2 and hashlib on a plain socket (issue, point 4)."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import struct
from collections.abc import Sequence
from typing import Any

import cbor2
import pytest

from sdcp_mono import certs
from sdcp_mono.core import problems
from sdcp_mono.core.ports import Draft, DraftRequest, RowsProblem
from sdcp_mono.http_gateway.client import Verifiers
from sdcp_mono.roles.drafter import Drafter, Source

VOCAB = 64
MAX_NEW = 30
CBOR = {"content-type": "application/sdcp+cbor"}


class ForeignVerifier:
    """Greedy over last + 1. ``trouble`` maps the nth proposal to what happens to it."""

    def __init__(self, session: bytes, d0: bytes, trouble: dict[int, str]) -> None:
        self.session = session
        self.digests = [d0]
        self.tokens: list[int] = []
        self.round = 0
        self.verdicts: dict[int, bytes] = {}
        self.trouble = trouble
        self.proposals: list[dict[str, Any]] = []
        self.done = asyncio.Event()

    def answer(self, method: str, path: str, body: bytes, nth: int) -> Any:
        if method == "GET":
            from_ = int(path.partition("from=")[2])
            output = {"session": self.session, "epoch": 1, "from": from_, "tokens": self.tokens[from_:], "final": False}
            return 200, CBOR, cbor2.dumps(output)
        if not path.endswith("/proposals"):
            return 404, {"content-type": "text/plain"}, b"no such thing"
        proposal = cbor2.loads(body)
        self.proposals.append(proposal)
        match self.trouble.pop(len(self.proposals), ""):
            case "drop":
                return None
            case "lost":  # committed, and the answer never arrives
                self.verdict(proposal)
                return None
            case "busy":
                return 503, {"retry-after": "0"}, b""
            case "overtaken":  # somebody else's round came first: the drafter is behind
                self.commit([(self.last + 1) % VOCAB], self.round + 1)
        if proposal["round"] in self.verdicts:
            return 200, CBOR, self.verdicts[proposal["round"]]
        if (proposal["base"], proposal["base_digest"]) != (len(self.tokens), self.digests[-1]):
            return 409, {"content-type": "application/problem+json"}, json.dumps(
                {
                    "type": "https://iana.org/assignments/sdcp#sdcp-stale-base", "title": "x", "status": 409,
                    "session_state": {
                        "session": base64.urlsafe_b64encode(self.session).rstrip(b"=").decode(), "epoch": 1,
                        "round": self.round, "committed": len(self.tokens),
                        "digest": base64.urlsafe_b64encode(self.digests[-1]).rstrip(b"=").decode(), "new": [1],
                    },
                }
            ).encode()  # fmt: skip
        return 200, CBOR, self.verdict(proposal)

    @property
    def last(self) -> int:
        return self.tokens[-1] if self.tokens else 4

    def commit(self, tokens: list[int], round: int) -> None:
        for token in tokens:
            self.digests.append(hashlib.sha256(self.digests[-1] + struct.pack(">I", token)).digest())
        self.tokens += tokens
        self.round = round

    def verdict(self, proposal: dict[str, Any]) -> bytes:
        right = [(self.last + 1 + i) % VOCAB for i in range(len(proposal["tokens"]) + 1)]
        a = next((i for i, token in enumerate(proposal["tokens"]) if token != right[i]), len(proposal["tokens"]))
        emitted = right[: a + 1][: MAX_NEW - len(self.tokens)]
        self.commit(emitted, proposal["round"])
        over = len(self.tokens) >= MAX_NEW
        verdict = {
            "session": self.session, "epoch": 1, "round": self.round, "accepted": a, "emitted": emitted,
            "committed": len(self.tokens), "digest": self.digests[-1], "action": 4 if over else 0, "m_cap": 6,
            "low": 0, "load": 3, "unknown": {"a": 1},
        }  # fmt: skip
        self.verdicts[self.round] = cbor2.dumps(verdict)
        if over:
            self.done.set()
        return self.verdicts[self.round]


class NothingToSay:
    """A draft model that never has a proposal."""

    name, identity, vocab_size = "nothing", b"n" * 32, VOCAB

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        return [Draft(()) for _ in requests]

    def release(self, session: bytes) -> None: ...


class NoRows:
    async def fetch(self, uri: str, tokens: Any, scope: Any) -> Any:
        raise RowsProblem("none", unavailable=True)

    async def publish(self, rows: Any, scope: Any) -> str:
        raise AssertionError("rule 1 publishes nothing")

    async def release(self, uri: str) -> None: ...


async def no_tokens(uri: str, scope: bytes | None) -> tuple[int, ...]:
    raise problems.Unprocessable("none")


@pytest.mark.parametrize(
    "trouble",
    [{}, {2: "drop"}, {2: "lost", 4: "lost"}, {1: "busy", 3: "busy"}, {3: "overtaken"}, {0: "speechless"}],
    ids=str,
)
def test_our_drafter_serves_a_foreign_verifier(kit: Any, trouble: dict[int, str]) -> None:
    """Every commit exactly once and in order, whatever happens to proposals and answers on their way.

    A verifier that doesn't know ``decline`` is proposed to even by a drafter that has nothing to propose.
    """
    model = NothingToSay() if "speechless" in trouble.values() else kit.ToyDraft()

    async def both() -> None:
        contract = kit.contract(max_new=MAX_NEW, stop=())
        foreign = ForeignVerifier(kit.SESSION, kit.digest(contract, (1, 3, 3, 4), ()), dict(trouble))
        async with kit.stub(certs.files(kit.directory, "verifier"), foreign.answer) as url:
            verifiers = Verifiers({kit.BASES["verifier"]: url}, certs.files(kit.directory, "drafter"))
            drafter = Drafter(
                kit.BASES["drafter"], [Source(model, None)], verifiers, NoRows(), kit.HeardRouter(), no_tokens,
                m_fixed=4,
            )  # fmt: skip
            drafter.start()
            state = {"session": kit.SESSION, "epoch": 1, "round": 0, "committed": 0, "digest": foreign.digests[0]}
            await drafter.assign(kit.assignment(state, contract))
            await asyncio.wait_for(foreign.done.wait(), kit.WAIT_S)
            await drafter.stop()
            await verifiers.close()
        assert foreign.tokens == [(5 + i) % kit.VOCAB for i in range(MAX_NEW)]
        for proposal in foreign.proposals:
            assert proposal["drafter"] == kit.BASES["drafter"]
            assert 1 <= len(proposal["tokens"]) <= 6
            assert proposal["status"]["instance"]  # 5.2: a name
        by_round: dict[int, Any] = {}
        for proposal in foreign.proposals:  # SDCP-182: a round that is sent again is the same round
            told = {name: value for name, value in proposal.items() if name != "status"}
            if "overtaken" not in trouble.values():
                assert by_round.setdefault(proposal["round"], told) == told

    asyncio.run(both())

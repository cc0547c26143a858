"""A drafter that knows nothing of this project drives our verifier to the end of a session, under both rules.

It speaks h2 and cbor2 on a plain socket, keeps the digest chain with hashlib, and stores its rows in our MLC by PUT.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import pytest

MAX_NEW = 40


class IndependentDrafter:
    """Proposes M tokens a round; every third proposal is wrong at its second token."""

    def __init__(self, wire: Any, base: str, state: dict[str, Any], last: int, vocab: int, rows_at: str | None) -> None:
        self.wire = wire
        self.base = base
        self.state = dict(state)
        self.last = last
        self.vocab = vocab
        self.rows_at = rows_at  # path of the scope in the MLC, under rule 2
        self.output: list[int] = []
        self.rounds = 0

    def draft(self, m: int) -> list[int]:
        tokens = [(self.last + 1 + i) % self.vocab for i in range(m)]
        if self.rounds % 3 == 2 and m > 1:
            tokens[1] = 0
        return tokens

    async def rows(self, tokens: list[int]) -> str:
        """q is certain of the proposed token: what was sampled from is what is published."""
        rows = [[float(i == token) for i in range(self.vocab)] for token in tokens]
        name = f"{self.rows_at}/q_rows/round-{self.state['round'] + 1}"
        body = b"".join(struct.pack(f"<{self.vocab}f", *row) for row in rows)
        put = await self.wire.request("PUT", name, body, if_none_match="*", content_type="application/octet-stream")
        assert put.status == 201
        return f"https://127.0.0.1:8443{name}"

    async def propose(self, m: int) -> Any:
        tokens = self.draft(m)
        proposal = {
            "session": self.state["session"], "epoch": self.state["epoch"], "round": self.state["round"] + 1,
            "drafter": self.base, "base": self.state["committed"], "base_digest": self.state["digest"],
            "tokens": tokens, "status": {"instance": "i", "role": 1, "load": 1, "queue": 0, "ttl_ms": 1000},
        }  # fmt: skip
        if self.rows_at:
            proposal["q_rows"] = await self.rows(tokens)
        reply = await self.wire.request("POST", "/verifier/proposals", proposal, accept="application/sdcp+cbor")
        assert reply.status == 200, reply.body
        return reply.cbor

    async def run(self) -> int:
        m = 4
        while True:
            verdict = await self.propose(m)
            self.rounds += 1
            digest = self.state["digest"]
            for token in verdict["emitted"]:
                digest = hashlib.sha256(digest + struct.pack(">I", token)).digest()
            assert verdict["digest"] == digest
            assert verdict["committed"] == self.state["committed"] + len(verdict["emitted"])
            self.output += verdict["emitted"]
            self.last = self.output[-1]
            self.state |= {name: verdict[name] for name in ("round", "committed", "digest")}
            m = min(4, verdict["m_cap"])
            if verdict["action"] != 0:
                return int(verdict["action"])


@pytest.mark.parametrize("rule", [1, 2])
def test_an_independent_drafter_finishes_a_session(kit: Any, rule: int) -> None:
    async def test(site: Any) -> None:
        contract = kit.contract(rule=rule, max_new=MAX_NEW, stop=(), scope=kit.SESSION)
        state = await kit.assigned(site, contract)
        async with kit.Wire.connect(site.gateway.port, site.files("drafter")) as wire:
            rows_at = f"/mlc/{kit.SESSION.hex()}" if rule == 2 else None
            drafter = IndependentDrafter(wire, kit.BASES["drafter"], state, 4, kit.VOCAB, rows_at)
            assert await drafter.run() == 4  # finish
            # The target is certain of the last token plus 1, so the output is the same under either rule.
            assert drafter.output == [(5 + i) % kit.VOCAB for i in range(MAX_NEW)]
            assert drafter.rounds < MAX_NEW
            output = await wire.request("GET", f"/verifier/sessions/{kit.path}/output")
            assert (output.cbor["tokens"], output.cbor["final"], output.cbor["finish"]) == (drafter.output, True, 4)
            late = await wire.request("POST", "/verifier/proposals", kit.proposal(drafter.state, (1,)))
            assert late.kind == (410, "sdcp-session-closed")

    kit.run(test)


def test_rule_2_rows_that_cannot_be_used(kit: Any) -> None:
    """AMB-133 to 137, SDCP-186, SDCP-190, over the wire; nothing is committed."""

    async def test(site: Any) -> None:
        contract = kit.contract(rule=2, stop=(), scope=kit.SESSION)
        state = await kit.assigned(site, contract)
        at = f"/mlc/{kit.SESSION.hex()}/q_rows"
        row = struct.pack(f"<{kit.VOCAB}f", *(float(i == 5) for i in range(kit.VOCAB)))
        async with kit.Wire.connect(site.gateway.port, site.files("drafter")) as wire:
            for name, body in (("short", row[:-4]), ("long", row + row), ("zero", row[4:] + row[:4])):
                assert (await wire.request("PUT", f"{at}/{name}", body)).status == 201
            await wire.request("PUT", f"/mlc/{bytes(16).hex()}/q_rows/good", row)

            async def kind(uri: str | None) -> Any:
                extra = {} if uri is None else {"q_rows": uri}
                return (await wire.request("POST", "/verifier/proposals", kit.proposal(state, (5,), **extra))).kind

            ours = f"https://127.0.0.1:8443{at}"
            assert await kind(None) == (409, "sdcp-q-unavailable")
            assert await kind(f"{ours}/missing") == (409, "sdcp-q-unavailable")
            assert await kind(f"{ours}/short") == (409, "sdcp-q-unavailable")
            assert await kind(f"{ours}/long") == (422, "sdcp-bad-proposal")
            assert await kind(f"{ours}/zero") == (422, "sdcp-bad-proposal")
            assert await kind(f"https://127.0.0.1:8443/mlc/{bytes(16).hex()}/q_rows/good") == (
                409,
                "sdcp-q-unavailable",
            )
            assert await kind("http://169.254.169.254/") == (409, "sdcp-q-unavailable")
            assert site.engine.sessions[kit.SESSION].round == 0

    kit.run(test)

"""A drafter written from the draft for the kit to test; wrong in one named way if asked to be."""

from __future__ import annotations

import asyncio
import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Any

from reference_host import CBOR, Host, Refuse
from reference_octets import ASSIGNMENT, CONTRACT, SAMPLING, Defect, Reader, encode, fault, sha, u32

from sdcp_mono.conformance.http2 import Client, NoAnswer, Request, Response

V = 64
MODEL = sha(b"reference drafter")
RETRIES = 3


class Drafter(Host):
    def __init__(self, bug: str, client: Client, router: str) -> None:
        super().__init__(bug)
        self.client, self.router, self.base = client, router, ""
        self.work: dict[bytes, tuple[dict[str, Any], asyncio.Task[None]]] = {}

    async def answer(self, request: Request) -> Response | None:
        caller = next(iter(request.names), "")
        if not caller and not self.bad("no certificate needed"):
            raise Refuse(403)
        if request.method != "POST" or not request.path.endswith("/assignments"):
            raise Refuse(404)
        if caller != self.router and not self.bad("anyone assigns") and not self.bad("no certificate needed"):
            raise Refuse(403)
        message = self.read(request)
        self.check(message)
        known = self.work.get(message["session"])
        if known is not None:
            old, task = known
            if message["epoch"] < old["epoch"] and not self.bad("old epochs taken"):
                raise Refuse("sdcp-stale-epoch")
            same = (message["epoch"], message["round"]) == (old["epoch"], old["round"])
            if same and not task.done() and not self.bad("a second worker"):
                return Response(204)
            if not self.bad("a second worker"):
                task.cancel()
        self.work[message["session"]] = (message, asyncio.create_task(Work(self, message).run()))
        return self.reply({}, 200) if self.bad("200 with a body") else Response(204)

    def check(self, message: dict[str, Any]) -> None:
        wrong = fault(message, ASSIGNMENT, ("m_init", "round") if self.bad("members not required") else ())
        contract = message.get("contract")
        if wrong == "contract" or not isinstance(contract, dict):
            raise Refuse("sdcp-bad-contract")
        sampling = contract.get("sampling", {})
        extra = {*contract} - {name.rstrip("?") for name in CONTRACT} | {*sampling} - {n.rstrip("?") for n in SAMPLING}
        if extra and not self.bad("unknown contract keys ignored"):
            raise Refuse("sdcp-bad-contract")
        if fault(contract, CONTRACT) and not self.bad("contract unchecked"):
            raise Refuse("sdcp-bad-contract")
        if wrong:
            raise Defect(wrong)
        if MODEL not in contract.get("drafters", [MODEL]) and not self.bad("drafters ignored"):
            raise Refuse("sdcp-bad-contract")
        if message["drafter"] != self.base and not self.bad("any drafter"):
            raise Refuse("sdcp-bad-contract")
        if "elsewhere" in message["verifier"] and not self.bad("any verifier"):
            raise Refuse(403)


class Work:
    """One session."""

    def __init__(self, host: Drafter, assignment: dict[str, Any]) -> None:
        self.host, self.assignment = host, assignment
        self.contract, self.verifier = assignment["contract"], assignment["verifier"]
        self.round, self.tokens = assignment["round"], list[int]()
        self.truth = (assignment["committed"], assignment["digest"])
        self.cap = self.clamp(assignment["m_init"], host.bad("m_init as sent"))
        self.junk = 0
        digest = sha(b"SDCP-CONTRACT-1\0", encode(self.contract))
        prompt = assignment["prompt"]
        self.first = sha(b"SDCP-PREFIX-1\0", digest, u32(len(prompt)), *map(u32, prompt))

    def clamp(self, value: int, as_sent: bool = False) -> int:
        return max(1, value) if as_sent else max(1, min(value, self.contract["m_max"]))

    def digest(self) -> bytes:
        digest = self.first
        for token in self.tokens:
            digest = sha(digest, u32(token))
        return digest

    async def run(self) -> None:
        bad = self.host.bad
        while True:
            behind = (len(self.tokens), self.digest()) != self.truth and not bad("no resynchronisation")
            if behind and not await self.resync():
                return
            if bad("base from the assignment"):
                self.truth = (self.assignment["committed"], self.assignment["digest"])
            message = self.proposal()
            if bad("two outstanding"):
                asyncio.ensure_future(self.post(message))  # noqa: RUF006
            answer = await self.send(message)
            if answer is None:
                return
            if answer.status == 200:
                if not self.adopt(message, Reader(answer.body).whole()):
                    return
            elif not self.told(answer):
                return

    def proposal(self) -> dict[str, Any]:
        bad = self.host.bad
        m = self.cap + (1 if bad("one more than m_cap") else 0)
        last, tokens = [*self.assignment["prompt"], *self.tokens][-1] + self.junk, []
        for _ in range(0 if bad("no tokens") else m):
            last = (last * 5 + 3) % V
            tokens.append(last)
        message = {
            "session": self.assignment["session"], "epoch": self.assignment["epoch"],
            "round": self.round + (0 if bad("rounds from 0") else 1), "drafter": self.host.base,
            "base": self.truth[0] - (1 if bad("base - 1") and self.truth[0] else 0), "base_digest": self.truth[1],
            "tokens": tokens, "status": {"instance": "d", "role": 1, "load": 1, "queue": 0, "ttl_ms": 3000},
        }  # fmt: skip
        if self.contract["rule"] == 2 and not bad("no q_rows"):
            message["q_rows"] = "mlc://local/-/rows/1"
        if bad("draft state in the proposal"):
            message["kv"] = bytes(4096)
        return message

    async def post(self, message: dict[str, Any]) -> Response:
        kind = "application/cbor" if self.host.bad("proposals of another type") else CBOR
        return await self.host.client.request(
            "POST", self.verifier + "proposals", encode(message), {"content-type": kind, "accept": CBOR}
        )

    async def send(self, message: dict[str, Any]) -> Response | None:
        for attempt in range(RETRIES):
            try:
                return await self.post(message)
            except NoAnswer:
                if self.host.bad("no retry"):
                    return None
                if self.host.bad("a retry drafts anew"):
                    message = {**message, "tokens": message["tokens"][:-1] or [1]}
                await asyncio.sleep(0.02 * (attempt + 1))
        return None

    def adopt(self, message: dict[str, Any], verdict: dict[str, Any]) -> bool:
        bad = self.host.bad
        if bad("unknown keys refused") and "zz" in verdict:
            return False
        self.round = verdict["round"]
        self.cap = max(1, verdict["m_cap"]) if bad("m_cap as sent") else self.clamp(verdict["m_cap"])
        if bad("m_cap ignored"):
            self.cap = self.clamp(self.assignment["m_init"])
        emitted = verdict["emitted"]
        if bad("accepted counts"):
            emitted = [*message["tokens"][: verdict["accepted"]], *emitted[-1:]]
        self.tokens += emitted
        self.truth = (verdict["committed"], verdict["digest"])
        if bad("verdict.digest unchecked") or bad("accepted counts"):
            self.truth = (len(self.tokens), self.digest())
        if bad("rejected state kept") and verdict["accepted"] < len(message["tokens"]):
            self.junk += 1
        goes_on = [0, 1]
        for wrong, action in (("stops at continue", 0), ("stops at reduce", 1)):
            if bad(wrong):
                goes_on.remove(action)
        if bad("goes on after a switch"):
            goes_on.append(2)
        if bad("goes on after the end"):
            goes_on += [3, 4, 5]
        return verdict["action"] in goes_on or (bad("unknown actions ignored") and verdict["action"] > 5)

    def told(self, answer: Response) -> bool:
        problem = json.loads(answer.body)
        if problem["type"].endswith("sdcp-stale-base") and not self.host.bad("session_state ignored"):
            state = problem["session_state"]
            self.round = state["round"]
            self.truth = (state["committed"], urlsafe_b64decode(state["digest"] + "=="))
            return True
        if self.host.bad("never gives up"):
            return answer.status in (403, 410)
        return self.host.bad("session_state ignored") and answer.status == 409

    async def resync(self) -> bool:
        path = urlsafe_b64encode(self.assignment["session"]).decode().rstrip("=")
        answer = await self.host.client.request("GET", f"{self.verifier}sessions/{path}/output?from=0")
        if answer.status != 200:
            return False
        self.tokens = Reader(answer.body).whole()["tokens"][: self.truth[0]]
        if self.host.bad("only the last token is known") and self.tokens:
            self.junk = 1
        return True

"""What the checks of a router work with: verifiers and drafters that the kit plays, and requests that it triggers."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import parse_qs, quote, urlsplit

from sdcp_mono.conformance import wire
from sdcp_mono.conformance.bench import Peer, changed, identity, peer, told
from sdcp_mono.conformance.http2 import Request, Response
from sdcp_mono.conformance.kit import Failed, Options, Skipped, expect
from sdcp_mono.conformance.stage import Place, refuse, reply, serving

STEP_SECONDS: Final = 5.0  # from one step of the router to the next
OPENING_SECONDS: Final = 10.0  # from a request to its session-open: tokenising, queueing
LONG_TTL_MS: Final = 60_000
WAIT_SECONDS: Final = 0.2  # of a long poll at the verifiers that the kit plays


@dataclass(frozen=True, slots=True)
class Step:
    """Something the router did: at which role the kit plays, and what it sent."""

    role: str
    kind: str
    message: wire.Message
    request: Request


@dataclass(slots=True)
class Held:
    """A session at a verifier that the kit plays."""

    opening: wire.Message
    digest: bytes
    round: int = 0
    tokens: list[int] = field(default_factory=list)
    finish: int | None = None

    def state(self) -> wire.Message:
        opening = self.opening
        return {
            "session": opening["session"], "epoch": opening["epoch"], "round": self.round,
            "committed": len(self.tokens), "digest": wire.next_digest(self.digest, self.tokens),
        }  # fmt: skip


class Depot:
    """A router under test. ``lie`` changes the next session-states that the kit's verifiers answer."""

    def __init__(self, base: str, options: Options) -> None:
        self.base, self.options = base, options
        self.peers: dict[str, Peer] = {}
        self.place: Place | None = None
        self.steps: asyncio.Queue[Step] = asyncio.Queue()
        self.held: dict[bytes, Held] = {}
        self.lie: wire.Message = {}
        self.reported: set[str] = set()
        self.outcome: asyncio.Task[tuple[int, str]] | None = None
        self.unused = ""  # why triggered requests do not come to the kit

    # ---- the roles' requests to the router -------------------------------------------------------

    def who(self, role: str) -> Peer:
        if role not in self.peers:
            raise Skipped(f"needs {role}.pem")
        return self.peers[role]

    def uri(self, role: str) -> str:
        assert self.place is not None
        return self.place.base(role) if self.options.listen else self.who(role).uri

    def status(self, role: str, /, **changes: Any) -> wire.Message:
        message: wire.Message = {
            "instance": self.uri(role), "role": 2 if role.startswith("verifier") else 1, "load": 5, "queue": 0,
            "ttl_ms": LONG_TTL_MS, "base": self.uri(role),
        }  # fmt: skip
        if role.startswith("drafter"):
            message["models"] = [b"d" * 32]
        elif self.options.target is not None:
            message["models"] = [self.options.target]
        if self.options.tokenizer is not None:
            message["tokenizer"] = self.options.tokenizer
        return changed(message, changes)

    async def put(
        self, role: str, message: object, instance: str | None = None, kind: str = wire.MEDIA_TYPE
    ) -> Response:
        """PUT status with the certificate of ``role``."""
        body = message if isinstance(message, bytes) else wire.encode(message)
        path = f"instances/{quote(self.uri(role) if instance is None else instance, safe='')}/status"
        return await self.who(role).client.request("PUT", self.base + path, body, {"content-type": kind})

    async def event(self, role: str, message: object) -> Response:
        headers = {"content-type": wire.MEDIA_TYPE}
        return await self.who(role).client.request("POST", self.base + "events", wire.encode(message), headers)

    async def report(self, role: str, /, **changes: Any) -> None:
        answer = await self.put(role, self.status(role, **changes))
        if answer.status in (403, 422):
            raise Skipped(f"the router does not know {self.uri(role)} ({told(answer)})")
        expect(answer.status == 204, f"PUT status of {role}: {told(answer)}")
        self.reported.add(role)

    async def withdraw(self) -> None:
        """Report every role of the kit as gone (AMB-184)."""
        for role in sorted(self.reported):
            await self.put(role, self.status(role, ttl_ms=0))
        self.reported.clear()

    # ---- triggered requests ----------------------------------------------------------------------

    async def trigger(self) -> Step:
        """Make the router open a session; answers its session-open, which it must send to the kit."""
        if self.options.trigger is None:
            raise Skipped("needs --trigger: a completions URL whose requests this router serves")
        if self.unused:
            raise Skipped(self.unused)
        self.outcome = asyncio.create_task(asyncio.to_thread(_complete, self.options.trigger))
        opening = asyncio.create_task(self.steps.get())
        await asyncio.wait((self.outcome, opening), timeout=OPENING_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if not opening.done():
            opening.cancel()
            ended = f"; the request ended: {self.outcome.result()}" if self.outcome.done() else ""
            self.unused = f"the router opened no session at the kit's verifier{ended}"[:300]
            raise Skipped(self.unused)
        step = opening.result()
        if step.kind != "POST sessions":
            raise Failed(f"the first thing that came was {step.kind}")
        return step

    async def step(self, kind: str, seconds: float = STEP_SECONDS) -> Step:
        """The router's next step, which has to be this one."""
        try:
            step = await asyncio.wait_for(self.steps.get(), seconds)
        except TimeoutError:
            raise Failed(f"no {kind} within {seconds:g} s") from None
        expect(step.kind == kind, f"{step.kind} at {step.role} instead of {kind}")
        return step

    async def quiet(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self.steps.get(), seconds)
        except TimeoutError:
            return True
        return False

    async def running(self, *drafters: str) -> tuple[Held, Step]:
        """A session with a drafter at work, of verifier and drafters that have just reported."""
        for role in ("verifier", *drafters):
            await self.report(role)
        opening = await self.trigger()
        await self.step("PUT drafter")
        assignment = await self.step("POST assignments")
        return self.held[opening.message["session"]], assignment

    def happened(self, held: Held, kind: int, **changes: Any) -> wire.Message:
        """The event that a verifier sends about this session."""
        state = held.state()
        message = {name: state[name] for name in ("session", "epoch", "committed", "digest")}
        return changed({**message, "kind": kind}, changes)

    # ---- the roles that the kit plays ------------------------------------------------------------

    async def handle(self, request: Request) -> Response | None:
        parts = urlsplit(request.path)
        role, *path = parts.path.strip("/").split("/")
        message: Any = wire.decode(request.body) if request.body else {}
        match request.method, path:
            case "POST", ["sessions"]:
                resume = message.get("resume")
                prompt = message["prompt"] if isinstance(message["prompt"], list) else []
                digest = resume["digest"] if resume else wire.first_digest(message["contract"], prompt)
                held = self.held[message["session"]] = Held(message, digest)
                await self.create_log(str(message.get("commit_log", "")))
                self.steps.put_nowait(Step(role, "POST sessions", message, request))
                return reply({**held.state(), **self.lie}, 201)
            case "PUT", ["sessions", id_, "drafter"] if (known := self.held.get(wire.unpath(id_))) is not None:
                self.steps.put_nowait(Step(role, "PUT drafter", message, request))
                return reply({**known.state(), **self.lie})
            case "GET", ["sessions", id_, "output"] if (known := self.held.get(wire.unpath(id_))) is not None:
                return await self.output(known, int(parse_qs(parts.query).get("from", ["0"])[0]))
            case "DELETE", ["sessions", _]:
                return Response(204)
            case "POST", ["sessions", id_, "policy"] if (known := self.held.get(wire.unpath(id_))) is not None:
                return reply(known.state())
            case "POST", ["assignments"]:
                self.steps.put_nowait(Step(role, "POST assignments", message, request))
                return Response(204)
        return refuse(404)

    async def create_log(self, reference: str) -> None:
        """What a verifier does at opening (AMB-071), where the kit reaches the router's cache."""
        mlc = self.options.mlc
        base = "" if mlc is None else mlc.rstrip("/") + "/"
        prefix = self.options.mlc_prefix or base
        if base and reference.startswith(prefix):
            url = base + reference.removeprefix(prefix)
            await self.who("verifier").client.request("PUT", url, b"", {"if-none-match": "*"})

    async def output(self, held: Held, from_: int) -> Response:
        if from_ >= len(held.tokens) and held.finish is None:
            await asyncio.sleep(WAIT_SECONDS)
        message: wire.Message = {
            "session": held.opening["session"], "epoch": held.opening["epoch"], "from": from_,
            "tokens": held.tokens[from_:], "final": held.finish is not None,
        }  # fmt: skip
        if held.finish is not None:
            message["finish"] = held.finish
        return reply(message)

    @asynccontextmanager
    async def workplace(self) -> AsyncIterator[Depot]:
        """The same depot for one check; afterwards its sessions have ended and its roles are withdrawn."""
        try:
            yield self
        finally:
            self.lie = {}
            for held in self.held.values():
                held.finish = wire.FINISH if held.finish is None else held.finish
            if self.outcome is not None:
                with suppress(Exception):  # how the request ended is its check's business
                    await asyncio.wait_for(self.outcome, STEP_SECONDS)
                self.outcome = None
            with suppress(Exception):  # the router may be gone
                await self.withdraw()
            self.held.clear()
            while not self.steps.empty():
                self.steps.get_nowait()


def _complete(url: str) -> tuple[int, str]:
    """One completion request; status and body."""
    body = json.dumps({"model": "default", "prompt": "The kit asks.", "max_tokens": 8, "temperature": 0}).encode()
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")


@asynccontextmanager
async def depot(options: Options) -> AsyncIterator[Depot]:
    made = Depot(options.url.rstrip("/") + "/", options)
    for role in ("verifier", "verifier-b", "drafter", "drafter-b"):
        if identity(options.certs, role) is not None and (known := peer(options.certs, role)) is not None:
            made.peers[role] = known
    if not {"verifier", "drafter"} <= made.peers.keys():
        raise ValueError(f"{options.certs}: verifier.pem and drafter.pem are needed")
    async with serving(options, made.handle) as made.place:
        try:
            yield made
        finally:
            for known in made.peers.values():
                known.client.close()

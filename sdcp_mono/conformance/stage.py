"""The server side of the kit: where the roles that it plays are called, and who they are."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from sdcp_mono.conformance import wire
from sdcp_mono.conformance.bench import Peer, changed, identity, peer, told
from sdcp_mono.conformance.http2 import Request, Response, Server, context
from sdcp_mono.conformance.kit import Failed, Options, expect

ARRIVAL_SECONDS: Final = 10.0  # for a proposal after an assignment or a verdict: a draft model on a busy machine
ANSWER_SECONDS: Final = 20.0  # how long a proposal is held for the check that wants it
PROMPT: Final = [5, 9, 17, 33] * 4  # repetitive, so that a drafter that only looks things up has something to propose


def reply(value: object, status: int = 200) -> Response:
    return Response(status, {"content-type": wire.MEDIA_TYPE, "cache-control": "no-store"}, wire.encode(value))


def refuse(status: int, suffix: str = "", **members: Any) -> Response:
    import json

    type_ = wire.PREFIX + suffix if suffix else "about:blank"
    document = {"type": type_, "title": suffix or "Refused", "status": status, **members}
    return Response(status, {"content-type": wire.PROBLEM_TYPE}, json.dumps(document).encode())


@dataclass(frozen=True, slots=True)
class Place:
    """Where the kit is called: ``origin`` is https://host:port, the base URIs are below it."""

    origin: str
    host: str
    port: int

    def base(self, role: str) -> str:
        return f"{self.origin}/{role}/"


@asynccontextmanager
async def serving(options: Options, handler: Callable[[Request], Awaitable[Response | None]]) -> AsyncIterator[Place]:
    """Serve at ``options.listen``, else where verifier.pem says; with gateway.pem, which names all roles, if there."""
    name = "gateway" if (options.certs / "gateway.pem").exists() else "verifier"
    told_ = urlsplit("//" + options.listen) if options.listen else urlsplit(identity(options.certs, "verifier") or "")
    host, port = told_.hostname or "127.0.0.1", told_.port
    if port is None:
        raise ValueError("verifier.pem names no address to listen at; give --listen HOST:PORT")
    server = Server(context(options.certs, name, server=True), handler)
    port = await server.start(host, port)
    try:
        yield Place(f"https://{host}:{port}", host, port)
    finally:
        await server.stop()


class Arrival:
    """A proposal that waits for its answer."""

    def __init__(self, request: Request, message: wire.Message) -> None:
        self.request, self.message = request, message
        self.gone = False  # the drafter has given this request up
        self.response: asyncio.Future[Response | None] = asyncio.get_running_loop().create_future()

    def answer(self, response: Response | None) -> None:
        if not self.response.done():
            self.response.set_result(response)


class Play:
    """One session at the verifier that the kit plays: it commits what the check says."""

    def __init__(self, stage: Stage, contract: wire.Message, prompt: list[int]) -> None:
        self.stage, self.contract, self.prompt = stage, contract, prompt
        self.id = secrets.token_bytes(16)
        self.epoch, self.round, self.tokens = 1, 0, list[int]()
        self.arrivals: asyncio.Queue[Arrival] = asyncio.Queue()
        self.reads = 0  # of output
        self.closed = False
        self._first = wire.first_digest(contract, prompt)

    def digest(self) -> bytes:
        return wire.next_digest(self._first, self.tokens)

    def assignment(self, **changes: Any) -> wire.Message:
        message = {
            "session": self.id, "epoch": self.epoch, "contract": self.contract, "verifier": self.stage.verifier,
            "drafter": self.stage.base, "prompt": self.prompt, "round": self.round, "committed": len(self.tokens),
            "digest": self.digest(), "m_init": 4,
        }  # fmt: skip
        return changed(message, changes)

    async def assign(self, **changes: Any) -> Response:
        return await self.stage.send(self.assignment(**changes))

    async def start(self, **changes: Any) -> Arrival:
        """Assign, expect 204, and wait for the first proposal."""
        answer = await self.assign(**changes)
        expect(answer.status == 204, f"a valid assignment was answered {told(answer)}")
        return await self.arrival()

    async def arrival(self, seconds: float = ARRIVAL_SECONDS) -> Arrival:
        try:
            return await asyncio.wait_for(self.arrivals.get(), seconds)
        except TimeoutError:
            raise Failed(f"no proposal within {seconds:g} s") from None

    async def silent(self, seconds: float) -> bool:
        """Whether no proposal comes for a while."""
        return await self.another(seconds) is None

    async def another(self, seconds: float) -> Arrival | None:
        """The next proposal; None if none comes."""
        try:
            return await asyncio.wait_for(self.arrivals.get(), seconds)
        except TimeoutError:
            return None

    def commit(self, arrival: Arrival, accepted: int, extra: int, **changes: Any) -> wire.Message:
        """Commit a round of the proposal; answers the verdict that says so."""
        emitted = [*arrival.message["tokens"][:accepted], extra]
        self.tokens += emitted
        self.round += 1
        verdict = {
            "session": self.id, "epoch": self.epoch, "round": self.round, "accepted": accepted, "emitted": emitted,
            "committed": len(self.tokens), "digest": self.digest(), "action": wire.CONTINUE, "m_cap": 4, "low": 0,
            "load": 10,
        }  # fmt: skip
        return changed(verdict, changes)

    def decide(self, arrival: Arrival, accepted: int = 0, extra: int = 7, **changes: Any) -> None:
        """Commit a round and answer its verdict."""
        arrival.answer(reply(self.commit(arrival, accepted, extra, **changes)))

    def state(self) -> wire.Message:
        """session_state of a problem document."""
        return {
            "session": wire.session_path(self.id), "epoch": self.epoch, "round": self.round,
            "committed": len(self.tokens), "digest": wire.session_path(self.digest()),
        }  # fmt: skip

    async def propose(self, request: Request, message: wire.Message) -> Response | None:
        if self.closed:
            return refuse(410, "sdcp-session-closed")
        arrival = Arrival(request, message)
        self.arrivals.put_nowait(arrival)
        try:
            return await asyncio.wait_for(arrival.response, ANSWER_SECONDS)
        except TimeoutError:
            return refuse(503)
        except asyncio.CancelledError:
            arrival.gone = True
            raise

    def output(self, from_: int) -> Response:
        self.reads += 1
        message: wire.Message = {
            "session": self.id, "epoch": self.epoch, "from": from_, "tokens": self.tokens[from_:], "final": self.closed,
        }  # fmt: skip
        if self.closed:
            message["finish"] = wire.FAIL
        return reply(message)

    def close(self) -> None:
        self.closed = True
        while not self.arrivals.empty():
            self.arrivals.get_nowait().answer(refuse(410, "sdcp-session-closed"))


@dataclass(slots=True)
class Stage:
    """A drafter under test, and the verifier that the kit plays for it."""

    base: str
    router: Peer
    other: Peer
    options: Options
    verifier: str = ""
    target: bytes = b"t" * 32
    tokenizer: bytes = b"k" * 32
    all_plays: dict[bytes, Play] = field(default_factory=dict)
    plays: list[Play] = field(default_factory=list)

    def contract(self, **changes: Any) -> wire.Message:
        contract: wire.Message = {
            "target": self.target, "tokenizer": self.tokenizer, "rule": wire.GREEDY, "m_max": 8, "max_new": 256,
            "stop": [], "low_rounds": 1_000_000, "fallback": [wire.FAIL],
        }  # fmt: skip
        return changed(contract, changes)

    def play(self, prompt: list[int] | None = None, **changes: Any) -> Play:
        play = Play(self, self.contract(**changes), PROMPT if prompt is None else prompt)
        self.all_plays[play.id] = play
        self.plays.append(play)
        return play

    async def send(self, message: object, who: Peer | None = None, **headers: str) -> Response:
        body = message if isinstance(message, bytes) else wire.encode(message)
        fields = {"content-type": wire.MEDIA_TYPE, **{name.replace("_", "-"): value for name, value in headers.items()}}
        return await (who or self.router).client.request("POST", self.base + "assignments", body, fields)

    async def handle(self, request: Request) -> Response | None:
        """The verifier's side (Table 1)."""
        parts = urlsplit(request.path)
        match request.method, parts.path.rstrip("/").split("/")[2:]:
            case "POST", ["proposals"]:
                message = wire.decode(request.body)
                play = self.all_plays.get(message.get("session"))
                return refuse(403, "sdcp-not-assigned") if play is None else await play.propose(request, message)
            case "GET", ["sessions", id_, "output"]:
                play = self.all_plays.get(wire.unpath(id_))
                from_ = int(parse_qs(parts.query).get("from", ["0"])[0])
                return refuse(404) if play is None else play.output(from_)
        return refuse(404)

    @asynccontextmanager
    async def workplace(self) -> AsyncIterator[Stage]:
        """The same stage for one check; its sessions end with it."""
        place = Stage(
            self.base, self.router, self.other, self.options, self.verifier, self.target, self.tokenizer, self.all_plays
        )
        try:
            yield place
        finally:
            for play in place.plays:
                play.close()


@asynccontextmanager
async def stage(options: Options) -> AsyncIterator[Stage]:
    router, other = peer(options.certs, "router"), peer(options.certs, "drafter-b") or peer(options.certs, "drafter")
    if router is None or other is None:
        raise ValueError(f"{options.certs}: router.pem, verifier.pem and drafter.pem are needed")
    made = Stage(options.url.rstrip("/") + "/", router, other, options)
    made.target, made.tokenizer = options.target or made.target, options.tokenizer or made.tokenizer
    async with serving(options, made.handle) as place:
        made.verifier = place.base("verifier")
        try:
            yield made
        finally:
            for play in made.all_plays.values():
                play.close()
            router.client.close()
            other.client.close()

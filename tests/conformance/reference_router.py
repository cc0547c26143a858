"""A router written from the draft for the kit to test, with a completions endpoint that triggers it; see ``bug``."""

from __future__ import annotations

import asyncio
import secrets
import time
from base64 import urlsafe_b64encode
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

from reference_host import CBOR, Host, Refuse
from reference_octets import EVENT, STATUS, Defect, Reader, encode, fault, sha, u32

from sdcp_mono.conformance.http2 import Client, NoAnswer, Request, Response

PROMPT = [1, 2, 3]
TICK_SECONDS = 0.02


class Instance:
    def __init__(self, role: int, status: dict[str, Any], owner: str) -> None:
        self.role, self.status, self.owner = role, status, owner
        self.until = time.monotonic() + status["ttl_ms"] / 1000
        self.base = status.get("base", status["instance"])


class Router(Host):
    """``identities``: role of each certificate's URI (1 drafter, 2 verifier)."""

    def __init__(self, bug: str, client: Client, identities: dict[str, int]) -> None:
        super().__init__(bug)
        self.client, self.identities = client, identities
        self.instances: dict[str, Instance] = {}
        self.sessions: dict[bytes, Line] = {}

    async def answer(self, request: Request) -> Response | None:
        caller = next(iter(request.names), "")
        if not caller and not self.bad("no certificate needed"):
            raise Refuse(403)
        path = request.path.strip("/").split("/")[1:]
        match request.method, path:
            case "PUT", ["instances", id_, "status"]:
                return self.status(request, unquote(id_), caller)
            case "POST", ["events"]:
                return self.event(request, caller)
        raise Refuse(404)

    def status(self, request: Request, id_: str, caller: str) -> Response:
        message = self.read(request)
        wrong = fault(message, STATUS, tuple(STATUS) if self.bad("status unchecked") else ())
        if wrong:
            raise Defect(wrong)
        if message.get("instance") != id_ and not self.bad("any instance in the path"):
            raise Refuse(400)
        role = self.identities.get(caller)
        known = self.instances.get(id_)
        if known is not None and known.owner != caller and not self.bad("anyone reports"):
            raise Refuse(403)
        if role != message.get("role", role) and not self.bad("any role"):
            raise Refuse(403)
        if not self.bad("status unchecked"):
            self.instances[id_] = Instance(message["role"], message, caller)
        return self.reply({}, 200) if self.bad("200 with a body") else Response(204)

    def event(self, request: Request, caller: str) -> Response:
        anyone = self.bad("anyone sends events") or self.bad("no certificate needed")
        if self.identities.get(caller) != 2 and not anyone:
            raise Refuse(403)
        message = self.read(request)
        wrong = fault(message, EVENT, tuple(EVENT) if self.bad("event unchecked") else ())
        if wrong:
            raise Defect(wrong)
        line = self.sessions.get(message.get("session", b""))
        if line is None:
            raise Refuse(204 if self.bad("unknown is fine") else 404)
        line.event(message)
        return self.reply({}, 200) if self.bad("events answer 200") else Response(204)

    def alive(self, role: int) -> list[Instance]:
        now = time.monotonic()
        found = [i for i in self.instances.values() if i.role == role and (now < i.until or self.bad("expiry ignored"))]
        return sorted(found, key=lambda i: (i.status["load"] + 100 * i.status["queue"], i.base))

    async def post(self, method: str, url: str, message: Any) -> Any:
        answer = await self.client.request(method, url, encode(message), {"content-type": CBOR, "accept": CBOR})
        if answer.status // 100 != 2:
            raise NoAnswer(str(answer.status))
        return Reader(answer.body).whole() if answer.body else None

    async def complete(self) -> bool:
        """One request from its opening to its end."""
        line = Line(self)
        try:
            return await line.run()
        finally:
            self.sessions.pop(line.id, None)


class Line:
    """One session's steps, one after the other."""

    def __init__(self, router: Router) -> None:
        self.router, self.id, self.epoch = router, secrets.token_bytes(16), 2 if router.bad("epoch 2") else 1
        self.contract = {
            "target": b"t" * 32, "tokenizer": b"k" * 32, "rule": 1, "m_max": 0 if router.bad("m_max 0") else 8,
            "max_new": 8, "stop": [2], "low_rounds": 3, "fallback": [2, 5],
            "drafters": [(b"e" if router.bad("unlisted") else b"d") * 32],
        }  # fmt: skip
        self.verifier = self.drafter = ""
        self.wishes: asyncio.Queue[str] = asyncio.Queue()
        self.over = False
        self.heard: set[tuple[int, int, int]] = set()

    def event(self, message: dict[str, Any]) -> None:
        key = (message["epoch"], message["kind"], message["committed"])
        if (message["epoch"] < self.epoch or key in self.heard) and not self.router.bad("old events acted on"):
            return
        self.heard.add(key)
        kind = message["kind"]
        if kind in (4, 5) or (kind > 5 and not self.router.bad("unknown kinds are switches")):
            self.over = True
        elif not (self.router.bad("events ignored")):
            self.wishes.put_nowait("self" if kind == 3 else "switch")

    async def run(self) -> bool:
        bad = self.router.bad
        first = sha(b"SDCP-PREFIX-1\0", sha(b"SDCP-CONTRACT-1\0", encode(self.contract)), u32(3), *map(u32, PROMPT))
        verifier = self.router.alive(2)[0]
        self.verifier = verifier.base
        self.router.sessions[self.id] = self
        state = await self.open(None)
        if state["digest"] != first and not bad("digest unchecked"):
            return False
        await self.assign(state)
        while not self.over:
            await asyncio.sleep(TICK_SECONDS)
            with suppress(asyncio.QueueEmpty):
                wish = self.wishes.get_nowait()
                await self.assign(state, avoid=self.drafter if wish == "switch" else "")
            if self.verifier not in [i.base for i in self.router.alive(2)] and self.router.alive(2):
                self.verifier = self.router.alive(2)[0].base
                self.epoch += 0 if bad("the same epoch") else 1
                resume = {"round": 0, "committed": 0, "digest": bytes(32) if bad("resume at nothing") else first,
                          "committed_tokens": "mlc://local/-/tokens/1"}  # fmt: skip
                await self.assign(await self.open(resume))
            drafters = [i.base for i in self.router.alive(1)]
            if drafters and self.drafter not in drafters and not bad("dead drafters kept"):
                await self.assign(state, avoid=self.drafter)
            with suppress(NoAnswer):
                self.over |= (await self.output())["final"]
        return True

    async def open(self, resume: dict[str, Any] | None) -> Any:
        message: dict[str, Any] = {"session": self.id, "epoch": self.epoch, "contract": self.contract, "prompt": PROMPT,
                                   "commit_log": "mlc://local/-/log/" + self.id.hex()}  # fmt: skip
        if self.router.bad("no commit log"):
            del message["commit_log"]
        if resume:
            message["resume"] = resume
        return await self.router.post("POST", self.verifier + "sessions", message)

    async def assign(self, state: dict[str, Any], avoid: str = "") -> None:
        bad = self.router.bad
        if self.drafter and bad("never reassigns"):
            return
        drafters = [i.base for i in self.router.alive(1) if i.base != avoid or bad("the same drafter again")]
        if not drafters:
            return
        self.drafter = avoid if bad("the same drafter again") and avoid else drafters[0]
        message = {
            "session": self.id, "epoch": self.epoch, "contract": self.contract, "verifier": self.verifier,
            "drafter": self.drafter, "prompt": PROMPT, "round": state["round"], "committed": state["committed"],
            "digest": state["digest"], "m_init": 4,
        }  # fmt: skip
        if bad("assignment without m_init"):
            del message["m_init"]
        path = session_path(self.id)
        if bad("the drafter first"):
            await self.router.post("POST", self.drafter + "assignments", message)
        answer = await self.router.post("PUT", f"{self.verifier}sessions/{path}/drafter", message)
        if not bad("assignment of the opening"):
            message |= {name: answer[name] for name in ("round", "committed", "digest")}
        if not bad("the drafter first"):
            await self.router.post("POST", self.drafter + "assignments", message)

    async def output(self) -> Any:
        url = f"{self.verifier}sessions/{session_path(self.id)}/output?from=0"
        answer = await self.router.client.request("GET", url)
        if answer.status != 200:
            raise NoAnswer(str(answer.status))
        return Reader(answer.body).whole()


def session_path(session: bytes) -> str:
    return urlsafe_b64encode(session).decode().rstrip("=")


async def front_end(router: Router) -> tuple[asyncio.Server, str]:
    """A completions endpoint of a few lines; answers when the session has ended."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split()[0])
        await reader.readexactly(length)
        try:
            good = await router.complete()
        except NoAnswer:
            good = False
        writer.write(b"HTTP/1.1 %d X\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}" % (200 if good else 502))
        with suppress(OSError):
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/completions"

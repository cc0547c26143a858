"""A verifier written from the draft for the kit to test, on a toy model; wrong in one named way if asked to be."""

from __future__ import annotations

import asyncio
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Any
from urllib.parse import parse_qs, urlsplit

from reference_host import CBOR, Refuse
from reference_model import Model, V
from reference_octets import (
    ASSIGNMENT,
    CONTRACT,
    OPEN,
    POLICY,
    PROPOSAL,
    RESUME,
    SAMPLING,
    STATUS,
    Defect,
    Reader,
    encode,
    fault,
    sha,
    u32,
)
from reference_rounds import steps

from sdcp_mono.conformance.http2 import Request, Response

CONTEXT = 4096
TARGET, TOKENIZER = sha(b"reference target"), sha(b"reference tokenizer")
CONTINUE, REDUCE, SWITCH, SELF, FINISH, FAIL = range(6)


class Session:
    def __init__(self, message: dict[str, Any], prompt: list[int]) -> None:
        self.message, self.prompt = message, prompt
        self.id, self.epoch, self.contract = message["session"], message["epoch"], message["contract"]
        self.log, self.tokens, self.digests = message["commit_log"], list[int](), list[bytes]()
        self.round, self.verdicts = 0, dict[int, bytes]()
        self.c = self.g = self.j = 0
        self.cap = self.m_max = self.contract["m_max"]
        self.assigned: str | None = None
        self.assignment: tuple[Any, ...] = ()
        self.released, self.fenced, self.ended = False, False, 0
        self.policies: dict[int, dict[str, int]] = {}
        self.lock, self.news = asyncio.Lock(), asyncio.Event()
        self.junk: list[int] = []


class Verifier(Model):
    def __init__(self, bug: str = "", *, routers: set[str], drafters: set[str], trusted: set[str]) -> None:
        super().__init__(bug)
        self.routers, self.drafters, self.trusted = routers, drafters, trusted
        self.sessions: dict[bytes, Session] = {}
        self.objects: dict[str, bytes] = {}
        self.logs: dict[str, list[dict[str, Any]]] = {}

    # ---- resources -------------------------------------------------------------------------------

    async def answer(self, request: Request) -> Response | None:
        caller = next(iter(request.names), "")
        if not caller and not self.bad("no certificate needed"):
            raise Refuse(403)
        parts = urlsplit(request.path)
        base, _, rest = parts.path.lstrip("/").partition("/")
        query = parse_qs(parts.query, keep_blank_values=True)
        if base == "mlc":
            return self.mlc(request, rest)
        match request.method, rest.split("/"):
            case "GET", [""]:
                card = {"target": TARGET, "tokenizer": TOKENIZER, "vocab_size": V, "context": CONTEXT}
                return self.reply(card)
            case "POST", ["sessions"]:
                self.only_router(caller, "anyone opens")
                return await self.open(request)
            case "PUT", ["sessions", id_, "drafter"]:
                self.only_router(caller, "anyone assigns")
                return await self.assign(self.session(id_), request)
            case "POST", ["sessions", id_, "policy"]:
                self.only_router(caller, "anyone sets policy")
                return self.policy(self.session(id_), request)
            case "GET", ["sessions", id_, "output"]:
                return await self.output(self.session(id_), caller, query, request)
            case "DELETE", ["sessions", id_]:
                if self.bad("DELETE unknown"):
                    raise Refuse(405)
                return self.delete(self.session(id_))
            case "POST", ["proposals"]:
                return await self.propose(request, caller)
            case "GET", ["proposals"] if self.bad("GET proposals served"):
                return self.reply({})
            case _, ["proposals"]:
                raise Refuse(405)
        raise Refuse(404)

    def only_router(self, caller: str, bug: str) -> None:
        if caller not in self.routers and not self.bad(bug):
            raise Refuse("sdcp-not-assigned" if self.bad("not-assigned for every role") else 403)

    def session(self, id_: str) -> Session:
        text = id_.rstrip("=")[:22] if self.bad("any id") else id_
        try:
            raw = urlsafe_b64decode(text + "==")
        except ValueError:
            raise Refuse(400) from None
        if not self.bad("any id") and urlsafe_b64encode(raw).decode().rstrip("=") != text:
            raise Refuse(400)
        if raw not in self.sessions:
            raise Refuse(410 if self.bad("unknown is 410") else 404)
        return self.sessions[raw]

    # ---- opening ---------------------------------------------------------------------------------

    def check_contract(self, contract: Any) -> None:
        members = {name.rstrip("?"): name for name in CONTRACT}
        unchecked = tuple(key for key in members if self.bad(f"{key} unchecked"))
        wrong = fault(contract, CONTRACT, unchecked)
        sampling = contract.get("sampling")
        sampling = sampling if isinstance(sampling, dict) else None
        if not wrong and sampling is not None and not self.bad("sampling members unchecked"):
            wrong = fault(sampling, SAMPLING)
        if self.bad("m_max 0") and wrong == "m_max" and contract.get("m_max") == 0:
            wrong = None
        if self.bad("floats as integers") and wrong == "m_max" and contract.get("m_max") == 8.0:
            wrong = None
        if self.bad("wide stop tokens") and wrong == "stop" and contract.get("stop") == [2**32]:
            wrong = None
        extra = {*contract} - {*members} | ({*(sampling or {})} - {name.rstrip("?") for name in SAMPLING})
        if wrong or (extra and not self.bad("unknown contract keys ignored")):
            raise Refuse("sdcp-bad-contract", detail=str(wrong or extra))
        if contract["target"] != TARGET and not self.bad("any target") and not self.bad("target unchecked"):
            raise Refuse("sdcp-bad-contract")
        if contract["tokenizer"] != TOKENIZER and not any(map(self.bad, ("any tokenizer", "tokenizer unchecked"))):
            raise Refuse("sdcp-bad-contract")

    def check_open(self, message: dict[str, Any]) -> list[int]:
        unchecked = ("session",) if self.bad("any session id") else ("commit_log",) if self.bad("any log") else ()
        wrong = fault(message, OPEN, unchecked)
        if self.bad("epoch as float") and wrong == "epoch":
            wrong = None
        if wrong:
            raise Defect(wrong)
        resume, epoch = message.get("resume"), message["epoch"]
        if resume is not None and not self.bad("resume unchecked") and fault(resume, RESUME):
            raise Defect("resume")
        if not self.bad("any epoch") and (epoch == 0 or (epoch > 1) != (resume is not None)):
            raise Defect("epoch")
        prompt = message["prompt"]
        if isinstance(prompt, str):
            if self.bad("no prompt references"):
                raise Refuse(422)
            prompt = self.tokens_at(prompt)
        if not prompt and not self.bad("empty prompt"):
            raise Refuse(422)
        limit = 2**32 if self.bad("prompt beyond the vocabulary") else 2**60 if self.bad("wide tokens") else V
        if any(token >= limit for token in prompt):
            raise Refuse(422)
        if len(prompt) + message["contract"]["max_new"] > CONTEXT and not self.bad("context ignored"):
            raise Refuse("sdcp-bad-contract")
        return prompt

    def tokens_at(self, reference: str) -> list[int]:
        body = self.objects.get(reference.removeprefix("mlc://local/"))
        if body is None:
            raise Refuse(503)
        return list(Reader(body).whole())

    async def open(self, request: Request) -> Response:
        message = self.read(request)
        contract = message.get("contract")
        if not isinstance(contract, dict):
            raise Refuse("sdcp-bad-contract")
        try:
            self.check_contract(contract)
        except Refuse:
            if self.bad("a session before its contract is checked") and {*CONTRACT} & {*contract}:
                self.sessions[message["session"]] = Session({**message, "contract": {**contract, "m_max": 8}}, [0])
            raise
        prompt = self.check_open(message)
        known = self.sessions.get(message["session"])
        if known is not None and message["epoch"] == known.epoch and not self.bad("opening replaces"):
            if known.message != message:
                raise Refuse(409)
            return self.reply(self.state(known), 200)
        if known is not None and message["epoch"] < known.epoch:
            raise Refuse("sdcp-stale-epoch")
        log = self.logs.setdefault(message["commit_log"], [])
        if log and "resume" not in message and not self.bad("logs are shared"):
            raise Refuse(409)
        session = Session(message, prompt)
        session.digests.append(self.first(session, request.body))
        if "resume" in message:
            self.resume(session, message["resume"])
        if len(session.tokens) >= contract["max_new"] and not self.bad("max_new 0 runs"):
            session.ended = FINISH
        self.sessions[session.id] = session
        state = self.state(session)
        if self.bad("epoch not echoed"):
            state["epoch"] += 1
        if self.bad("round starts at 1"):
            state["round"] = 1
        self.idle(session)
        status = 200 if self.bad("always 200") else 201
        return self.reply(state, status, location=f"sessions/{urlsafe_b64encode(session.id).decode().rstrip('=')}")

    def first(self, session: Session, body: bytes) -> bytes:
        contract = dict(session.contract)
        if self.bad("digest of the required members"):
            contract = {key: value for key, value in contract.items() if key in CONTRACT}
        if self.bad("defaults added"):
            contract.setdefault("low_ratio", 0)
        encoded = body if self.bad("digest of what was received") else encode(contract)
        digest = sha(b"SDCP-CONTRACT-1\0", encoded)
        if self.bad("digest of what was received") and body == encode(session.message):
            digest = sha(b"SDCP-CONTRACT-1\0", encode(contract))
        length = u32(len(session.prompt), "little" if self.bad("P in little-endian") else "big")
        return sha(b"SDCP-PREFIX-1\0", digest, length, *(u32(token % 2**32) for token in session.prompt))

    def resume(self, session: Session, resume: dict[str, Any]) -> None:
        tokens = self.tokens_at(resume["committed_tokens"])
        for token in tokens:
            session.digests.append(sha(session.digests[-1], u32(token)))
        fits = (len(tokens), session.digests[-1]) == (resume["committed"], resume["digest"])
        if not fits and not self.bad("resume trusted"):
            raise Refuse(422)
        session.tokens, session.round = tokens, 0 if self.bad("rounds restart") else resume["round"]

    def state(self, session: Session) -> dict[str, Any]:
        committed = len(session.tokens) + (len(session.prompt) if self.bad("the prompt counts") else 0)
        return {"session": session.id, "epoch": session.epoch, "round": session.round, "committed": committed,
                "digest": session.digests[-1]}  # fmt: skip

    def idle(self, session: Session) -> None:
        """Without a drafter for a while, decode (section 8)."""

        async def wait() -> None:
            await asyncio.sleep(0.3)
            while (session.assigned is None or session.released) and not session.ended and not session.fenced:
                token = self.best(session, session.tokens)
                self.commit_self(session, (token + 1) % V if self.bad("idle decoding is wrong") else token)

        task = asyncio.create_task(wait())
        session.idle = task  # type: ignore[attr-defined]

    # ---- assignments, policies -------------------------------------------------------------------

    def open_only(self, session: Session) -> None:
        if session.fenced:
            raise Refuse("sdcp-session-closed" if self.bad("fenced is 410") else "sdcp-stale-epoch")
        if session.ended and not self.bad("never closed"):
            raise Refuse("sdcp-session-closed")

    async def assign(self, session: Session, request: Request) -> Response:
        message = self.read(request)
        unchecked = tuple(ASSIGNMENT) if self.bad("assignment unchecked") else ()
        wrong = fault(message, ASSIGNMENT, unchecked)
        if wrong == "contract":
            raise Refuse("sdcp-bad-contract")
        if wrong:
            raise Defect(wrong)
        if message.get("session", session.id) != session.id and not self.bad("session of the path ignored"):
            raise Defect("session")
        if message.get("epoch", session.epoch) != session.epoch and not self.bad("PUT of any epoch"):
            raise Refuse("sdcp-stale-epoch")
        self.open_only(session)
        contract = message.get("contract", session.contract)
        if contract != session.contract:
            if not self.bad("PUT changes the contract"):
                raise Refuse("sdcp-bad-contract")
            session.contract = contract
        stale = (message.get("round"), message.get("committed")) != (session.round, len(session.tokens))
        if stale and self.bad("PUT of old values refused"):
            raise Refuse(409)
        drafter = message.get("drafter", session.assigned)
        if session.contract["rule"] == 2 and drafter not in self.trusted and not self.bad("everybody is trusted"):
            raise Refuse("sdcp-bad-contract")
        async with session.lock:
            key = (drafter, message.get("epoch"), message.get("round"))
            again = key == session.assignment and not session.released
            if (not again or self.bad("PUT again resets m_cap")) and not self.bad("m_cap kept"):
                m_init = message.get("m_init", 1)
                session.cap = m_init if self.bad("m_init as sent") else max(1, min(m_init, session.m_max))
            if self.bad("j reset by an assignment"):
                session.j = 0
            session.assigned, session.assignment, session.released = drafter, key, False
            return self.reply(self.state(session), 201 if self.bad("201 for everything") else 200)

    def policy(self, session: Session, request: Request) -> Response:
        message = self.read(request)
        wrong = fault(message, POLICY, ("sampling",) if self.bad("policy unchecked") else ())
        if wrong or message["session"] != session.id:
            raise Defect(wrong or "session")
        sampling = message.get("sampling", {})
        if fault(sampling, SAMPLING) and not self.bad("profile unchecked"):
            raise Defect("sampling")
        self.open_only(session)
        if message["from_round"] <= session.round and not self.bad("late policies"):
            if self.bad("late policy is 400"):
                raise Refuse(400)
            raise self.stale(session)
        session.policies[0 if self.bad("policies at once") else message["from_round"]] = sampling
        if self.bad("policy changes the rule") and "rule" in message:
            session.contract = {**session.contract, "rule": message["rule"]}
        if self.bad("policy enters the digest"):
            session.digests[-1] = sha(session.digests[-1], b"policy")
        state = self.state(session)
        if self.bad("state without digest"):
            del state["digest"]
        return Response(204) if self.bad("policy answers nothing") else self.reply(state)

    def delete(self, session: Session) -> Response:
        session.ended = session.ended or FAIL
        session.news.set()
        return Response(204)

    def stale(self, session: Session) -> Refuse:
        if self.bad("no session_state"):
            return Refuse("sdcp-stale-base")
        encode_ = bytes.hex if self.bad("session_state in hex") else lambda b: urlsafe_b64encode(b).decode().rstrip("=")
        state = {key: encode_(v) if isinstance(v, bytes) else v for key, v in self.state(session).items()}
        return Refuse("sdcp-stale-base", session_state=state)

    # ---- output ----------------------------------------------------------------------------------

    async def output(self, session: Session, caller: str, query: dict[str, list[str]], request: Request) -> Response:
        reader = caller in self.routers or (caller == session.assigned and not self.bad("drafter may not read"))
        if not reader and not self.bad("anyone reads") and not self.bad("no certificate needed"):
            raise Refuse(403)
        if session.fenced:
            raise Refuse("sdcp-session-closed" if self.bad("fenced is 410") else "sdcp-stale-epoch")
        given = query.get("from", ["" if self.bad("from required") else "0"])[0]
        if not given.isdigit():
            raise Refuse(400)
        start = int(given)
        wait = 0.0 if "wait=0" in request.headers.get("prefer", "") else 5.0
        if self.bad("Prefer ignored"):
            wait = 2.2
        while start >= len(session.tokens) and not session.ended and wait > 0:
            session.news.clear()
            try:
                await asyncio.wait_for(session.news.wait(), wait)
            except TimeoutError:
                break
        if start > len(session.tokens) and self.bad("from beyond is 416"):
            raise Refuse(416)
        tokens = session.tokens[max(0, start - 1 if self.bad("from is 1-based") else start) :]
        if self.bad("nothing new is 404") and not tokens and not session.ended:
            raise Refuse(404)
        final = bool(session.ended) and not (self.bad("final without tokens") and tokens)
        output: dict[str, Any] = {"session": session.id, "epoch": session.epoch, "from": start, "tokens": tokens,
                                  "final": final}  # fmt: skip
        if final or self.bad("finish always"):
            output["finish"] = FINISH if self.bad("finish is always 4") else session.ended
        if self.bad("fail is silent") and session.ended == FAIL:
            output = {**output, "final": False}
            del output["finish"]
        if self.bad("epoch 0 in output"):
            output["epoch"] = 0
        if self.bad("output without from"):
            del output["from"]
        return self.reply(output)

    # ---- proposals (6.3) -------------------------------------------------------------------------

    async def propose(self, request: Request, caller: str) -> Response:
        message = self.read(request, 64 * 1024)
        unchecked = ("status",) if self.bad("status not required") else ("tokens",) if self.bad("nested tokens") else ()
        wrong = fault(message, PROPOSAL, unchecked)
        if not wrong and not self.bad("status unchecked") and "status" in message:
            wrong = fault(message["status"], STATUS)
        if wrong:
            raise Defect(wrong)
        if self.bad("nested tokens"):
            message["tokens"] = [t[0] if isinstance(t, list) else t for t in message["tokens"]] or [0]
        session = self.sessions.get(message["session"])
        if session is None:
            raise Refuse(404 if self.bad("unknown is 404 on proposals") else "sdcp-not-assigned")
        if self.bad("epoch before authorization") and message["epoch"] != session.epoch:
            raise Refuse("sdcp-stale-epoch")
        named = caller if self.bad("drafter member ignored") else message["drafter"]
        router = caller in self.routers and self.bad("the router proposes")
        former = caller in self.drafters and self.bad("former drafter heard")
        if (session.assigned is None or caller != session.assigned or named != caller) and not router and not former:
            raise Refuse("sdcp-not-assigned")
        replay = session.verdicts.get(message["round"])
        if replay is not None and self.bad("replay before epoch"):
            return Response(200, {"content-type": CBOR}, replay)
        if message["epoch"] != session.epoch and not self.bad("any epoch proposes"):
            raise Refuse("sdcp-stale-epoch")
        if self.bad("no lock"):
            return await steps(self, session, message)
        if session.lock.locked() and self.bad("no waiting for a round in flight"):
            raise Refuse("sdcp-stale-base")
        async with session.lock:
            return await steps(self, session, message)

    # ---- commits -------------------------------------------------------------------------------

    def commit_self(self, session: Session, token: int) -> None:
        session.round += 1
        self.commit(session, [token])
        stop = token in session.contract["stop"] and not self.bad("self-decoding ignores stop")
        if stop or len(session.tokens) >= session.contract["max_new"]:
            session.ended = FINISH

    def commit(self, session: Session, emitted: list[int]) -> None:
        session.tokens += emitted
        if self.bad("one link a round"):
            session.digests.append(sha(session.digests[-1], *(u32(token) for token in emitted)))
        else:
            for token in emitted:
                session.digests.append(sha(session.digests[-1], u32(token)))
        record = {"epoch": session.epoch, "round": session.round, "emitted": emitted, "committed": len(session.tokens),
                  "digest": session.digests[-1]}  # fmt: skip
        if self.bad("record without digest"):
            del record["digest"]
        if not (self.bad("a record is missing") and session.round % 2 == 0):
            self.logs[session.log].append(record)
        session.news.set()

    # ---- the cache -------------------------------------------------------------------------------

    def mlc(self, request: Request, name: str) -> Response:
        log = "mlc://local/" + name
        if "/log/" in name:
            records = self.logs.get(log)
            if records is None:
                raise Refuse(404)
            tag = f'"{len(records)}"'
            if request.method == "POST":
                if request.headers.get("if-match") != tag:
                    raise Refuse(412)
                records.append(Reader(request.body).whole())
                return Response(204)
            return Response(200, {"etag": tag, "content-type": "application/cbor-seq"}, b"".join(map(encode, records)))
        if request.method == "PUT":
            self.objects[name] = request.body
            return Response(201)
        if name not in self.objects:
            raise Refuse(404)
        return Response(200, {}, self.objects[name])

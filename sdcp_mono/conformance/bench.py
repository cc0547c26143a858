"""What the checks of a verifier work with: the roles the kit plays, and sessions whose state it follows by itself."""

from __future__ import annotations

import asyncio
import secrets
import ssl
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import EllipsisType
from typing import Any, Final

from cryptography import x509

from sdcp_mono.conformance import wire
from sdcp_mono.conformance.http2 import Client, NoAnswer, Response, context
from sdcp_mono.conformance.kit import Failed, Options, Skipped, expect

M_MAX: Final = 8
MAX_NEW: Final = 96  # enough for the longest check; prompt and output fit the smallest context in use
PATIENCE: Final = 8  # answers 429 and 503 to one request before it counts as refused
# Prompts to choose from; ids of frequent words in many tokenizers, taken modulo the vocabulary.
PROMPTS: Final = (
    (5, 9, 17, 33),
    (504, 2365, 6354, 16438, 27003, 690, 260, 23790, 2767),
    (464, 2068, 7586, 21831, 18045, 625, 262),
    tuple(37 * i * i + 11 for i in range(1, 25)),
)
VARIED_IN, VARIED = 12, 6  # this many different tokens among the first ones are varied enough
OUTPUT_SECONDS: Final = 15.0  # for tokens that a verifier decodes by itself
CLOSING_ROUNDS: Final = 2 * MAX_NEW  # proposals to end a session where DELETE is not offered


@dataclass(frozen=True, slots=True)
class Peer:
    """A role that the kit plays: its connection and the URI its certificate names."""

    client: Client
    uri: str


def identity(folder: Path, role: str) -> str | None:
    """The URI name in the role's certificate; None where there is no such certificate."""
    path = folder / f"{role}.pem"
    if not path.exists():
        return None
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ""
    return next(iter(names.get_values_for_type(x509.UniformResourceIdentifier)), "")


def peer(folder: Path, role: str) -> Peer | None:
    uri = identity(folder, role)
    return None if uri is None else Peer(Client(context(folder, role)), uri)


def anonymous(folder: Path) -> Client:
    return Client(context(folder, None))


def outdated(folder: Path, role: str, *, alpn: str = "h2", tls12: bool = False) -> ssl.SSLContext:
    """A client that offers something that 5.1 rules out."""
    made = context(folder, role)
    if tls12:
        made.minimum_version = ssl.TLSVersion.TLSv1_2
        made.maximum_version = ssl.TLSVersion.TLSv1_2
    made.set_alpn_protocols([alpn])
    return made


@dataclass(frozen=True, slots=True)
class Card:
    """What the verifier serves; vocab_size and context in tokens."""

    target: bytes
    tokenizer: bytes
    vocab_size: int
    context: int


@dataclass(slots=True)
class Cache:
    """A cache that kit and verifier both reach: ``base`` is its URL, ``prefix`` how references to it begin."""

    base: str
    prefix: str
    writer: Peer
    owner: Peer

    def reference(self, scope: bytes | None, kind: str) -> str:
        return f"{self.prefix}{'-' if scope is None else scope.hex()}/{kind}/{secrets.token_hex(16)}"

    def url(self, reference: str) -> str:
        return self.base + reference.removeprefix(self.prefix)

    async def put(self, kind: str, body: bytes, scope: bytes | None = None) -> str:
        """Write an object; returns its reference."""
        reference = self.reference(scope, kind)
        headers = {"content-type": "application/octet-stream", "if-none-match": "*"}
        answer = await self.writer.client.request("PUT", self.url(reference), body, headers)
        if answer.status // 100 != 2:
            raise Skipped(f"the cache refused an object: {answer.status} {answer.body[:80]!r}")
        return reference

    async def log(self, reference: str) -> tuple[list[Any], str]:
        """The records of a commit log and its entity tag."""
        answer = await self.owner.client.request("GET", self.url(reference))
        if answer.status != 200:
            raise Skipped(f"the commit log can't be read through the cache: {answer.status}")
        return wire.sequence(answer.body), answer.headers.get("etag", "")

    async def append(self, reference: str, record: wire.Message, etag: str) -> Response:
        headers = {"content-type": wire.MEDIA_TYPE, "if-match": etag}
        return await self.owner.client.request("POST", self.url(reference), wire.encode(record), headers)


@dataclass(slots=True)
class Learnt:
    """The target's greedy continuation of the kit's prompt, as far as it was needed; shared by all checks."""

    tokens: list[int] = field(default_factory=list)
    learner: Session | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(slots=True)
class Bench:
    """A verifier under test. ``other`` is a second drafter's identity, ``cache`` one that both reach."""

    base: str
    card: Card
    certs: Path
    router: Peer
    drafter: Peer
    other: Peer | None
    cache: Cache | None
    prefix: str = "mlc://local/"
    untrusted: bool = False
    prompt: list[int] = field(default_factory=list)
    learnt: Learnt = field(default_factory=lambda: Learnt())
    opened: list[Session] = field(default_factory=list)

    def need_other(self) -> Peer:
        if self.other is None:
            raise Skipped("needs a second drafter's certificate (drafter-b.pem)")
        return self.other

    def need_cache(self) -> Cache:
        if self.cache is None:
            raise Skipped("needs a cache that kit and verifier both reach (--mlc)")
        return self.cache

    async def send(
        self, who: Peer, method: str, path: str, message: object = None, headers: Mapping[str, str] | None = None
    ) -> Response:
        """One request to the verifier; ``message`` is encoded unless it is octets already. Waits where told to."""
        body = message if isinstance(message, bytes) else b"" if message is None else wire.encode(message)
        fields = {"accept": wire.MEDIA_TYPE, **({"content-type": wire.MEDIA_TYPE} if body else {}), **(headers or {})}
        for attempt in range(PATIENCE):
            answer = await who.client.request(method, self.base + path, body, fields)
            wait = answer.headers.get("retry-after", "")
            if answer.status not in (429, 503) or not wait.isdigit() or attempt == PATIENCE - 1:
                break
            await asyncio.sleep(min(float(wait), 2.0))
        return answer

    # ---- sessions --------------------------------------------------------------------------------

    def contract(self, **changes: Any) -> wire.Message:
        """A valid contract with members changed, or removed where the change is ``...``."""
        contract: wire.Message = {
            "target": self.card.target, "tokenizer": self.card.tokenizer, "rule": wire.GREEDY, "m_max": M_MAX,
            "max_new": MAX_NEW, "stop": [], "low_rounds": 1_000_000, "fallback": [wire.FAIL],
        }  # fmt: skip
        return changed(contract, changes)

    def opening(self, contract: wire.Message | None = None, /, **changes: Any) -> wire.Message:
        """A session-open with members changed, or removed where the change is ``...``."""
        contract = self.contract() if contract is None else contract
        scope = contract.get("scope")
        place = scope.hex() if isinstance(scope, bytes) else "-"
        opening: wire.Message = {
            "session": secrets.token_bytes(16), "epoch": 1, "contract": contract, "prompt": self.prompt,
            "commit_log": f"{self.prefix}{place}/log/{secrets.token_hex(16)}",
        }  # fmt: skip
        return changed(opening, changes)

    async def post(self, opening: wire.Message | bytes, who: Peer | None = None) -> Response:
        """POST sessions; what it opens is closed at the end."""
        answer = await self.send(who or self.router, "POST", "sessions", opening)
        if answer.status // 100 == 2 and isinstance(opening, dict):
            self.opened.append(Session(self, opening))
        return answer

    async def open(self, m_init: int | None = M_MAX, **changes: Any) -> Session:
        """A session of a valid contract with members changed, with the drafter assigned unless ``m_init`` is None."""
        opening = self.opening(self.contract(**changes))
        answer = await self.post(opening)
        expect(answer.status // 100 == 2, f"POST sessions answered {told(answer)}")
        session = next(known for known in self.opened if known.id == opening["session"])
        if m_init is not None:
            answer = await session.assign(m_init=m_init)
            expect(answer.status == 200, f"PUT drafter answered {told(answer)}")
        return session

    async def gone(self, session: bytes) -> None:
        """Expect that no session of this id exists."""
        path = f"sessions/{wire.session_path(session)}/output?from=0"
        answer = await self.send(self.router, "GET", path, None, {"prefer": "wait=0"})
        expect(answer.status == 404, f"a session exists after the refusal: GET output answered {told(answer)}")

    async def greedy(self, count: int) -> list[int]:
        """The first tokens of the target's greedy continuation, learnt by letting it correct proposals."""
        learnt = self.learnt
        async with learnt.lock:
            if learnt.learner is None:
                learnt.learner = await self.open()
                self.opened.remove(learnt.learner)  # it outlives this check
            while len(learnt.tokens) < count:
                guess = (learnt.tokens or self.prompt)[-1:] * M_MAX
                learnt.tokens += (await learnt.learner.verdict(guess))["emitted"]
        return learnt.tokens[:count]

    async def choose_prompt(self) -> None:
        """Take the prompt whose continuation varies most; where one token repeats, checks can't see a shift by one.

        A verifier that can't serve them gets the first prompt; its checks will tell what is wrong.
        """
        best, variety = (self._prompt(PROMPTS[0]), Learnt()), 0
        for candidate in PROMPTS:
            self.prompt, self.learnt = self._prompt(candidate), Learnt()
            try:
                known = len(set(await self.greedy(VARIED_IN)))
            except Exception:
                break
            finally:
                if self.learnt.learner is not None:
                    self.opened.append(self.learnt.learner)
            if known > variety:
                best, variety = (self.prompt, self.learnt), known
            if known >= VARIED:
                break
        self.prompt, self.learnt = best

    def _prompt(self, candidate: Sequence[int]) -> list[int]:
        return [token % self.card.vocab_size for token in candidate]

    @asynccontextmanager
    async def workplace(self) -> AsyncIterator[Bench]:
        """The same bench for one check; what the check opens is closed after it."""
        place = replace(self, opened=[])
        try:
            yield place
        finally:
            await place.close()

    async def close(self) -> None:
        """Leave nothing open: DELETE (an extension), or propose until the session has ended."""
        for session in self.opened:
            try:
                await session.close()
            except (NoAnswer, Failed, Skipped):
                continue  # the peer is gone or does not let the session end; it will expire there
        self.opened.clear()


class Session:
    """One session as the kit follows it: its digests are computed here, never taken from the verifier."""

    def __init__(self, bench: Bench, opening: wire.Message) -> None:
        self.bench = bench
        self.opening = opening
        self.id: bytes = opening["session"]
        self.contract: wire.Message = opening["contract"]
        self.epoch: int = opening["epoch"]
        self.round = 0
        self.tokens: list[int] = []
        self.m_cap = self.contract["m_max"]
        self.ended = False
        self.drafter = bench.drafter
        self.path = f"sessions/{wire.session_path(self.id)}"
        self._first = wire.first_digest(self.contract, bench.prompt)

    def digest(self, n: int | None = None) -> bytes:
        """d[n] over what was committed; n defaults to all."""
        return wire.next_digest(self._first, self.tokens if n is None else self.tokens[:n])

    # ---- the router's part -----------------------------------------------------------------------

    def assignment(self, who: Peer | None = None, **changes: Any) -> wire.Message:
        message = {
            "session": self.id, "epoch": self.epoch, "contract": self.contract, "verifier": self.bench.base,
            "drafter": (who or self.drafter).uri, "prompt": self.bench.prompt, "round": self.round,
            "committed": len(self.tokens), "digest": self.digest(), "m_init": M_MAX,
        }  # fmt: skip
        return changed(message, changes)

    async def assign(self, who: Peer | None = None, *, by: Peer | None = None, **changes: Any) -> Response:
        """PUT drafter; follows the state that is answered."""
        message = self.assignment(who, **changes)
        answer = await self.bench.send(by or self.bench.router, "PUT", f"{self.path}/drafter", message)
        if answer.status == 200:
            self.drafter = who or self.drafter
            self.m_cap = max(1, min(message["m_init"], self.contract["m_max"]))
            await self.follow(wire.decode(answer.body))
        return answer

    async def follow(self, state: wire.Message) -> None:
        """Adopt rounds that the verifier decoded without a drafter."""
        self.round = max(self.round, state["round"])
        if state["committed"] > len(self.tokens):
            output = await self.output(len(self.tokens))
            self.tokens += output["tokens"][: state["committed"] - len(self.tokens)]

    async def policy(self, from_round: int, **sampling: Any) -> Response:
        message = {"session": self.id, "from_round": from_round, "sampling": sampling}
        return await self.bench.send(self.bench.router, "POST", f"{self.path}/policy", message)

    async def get(self, query: str = "?from=0", who: Peer | None = None, wait: int | None = 0) -> Response:
        headers = {} if wait is None else {"prefer": f"wait={wait}"}
        return await self.bench.send(who or self.bench.router, "GET", f"{self.path}/output{query}", None, headers)

    async def output(self, from_: int = 0) -> wire.Message:
        answer = await self.get(f"?from={from_}")
        expect(answer.status == 200, f"GET output answered {told(answer)}")
        return dict(wire.decode(answer.body))

    async def until(self, n: int) -> wire.Message:
        """Read output until n tokens are there or it is final; gives up after a while."""
        deadline = time.monotonic() + OUTPUT_SECONDS
        while time.monotonic() < deadline:
            answer = await self.get(f"?from={len(self.tokens)}", wait=1)
            expect(answer.status == 200, f"GET output answered {told(answer)}")
            output = dict(wire.decode(answer.body))
            self.tokens += output["tokens"]
            if len(self.tokens) >= n or output["final"]:
                return output
        raise Failed(f"{len(self.tokens)} tokens after {OUTPUT_SECONDS:g} s, not {n}")

    # ---- the drafter's part ----------------------------------------------------------------------

    def proposal(self, tokens: Sequence[int], /, **changes: Any) -> wire.Message:
        message = {
            "session": self.id, "epoch": self.epoch, "round": self.round + 1, "drafter": self.drafter.uri,
            "base": len(self.tokens), "base_digest": self.digest(), "tokens": list(tokens),
            "status": {"instance": self.drafter.uri, "role": 1, "load": 10, "queue": 0, "ttl_ms": 3000},
        }  # fmt: skip
        return changed(message, changes)

    async def post(self, message: wire.Message | bytes, by: Peer | None = None) -> Response:
        """POST proposals; a verdict of the next round is followed."""
        answer = await self.bench.send(by or self.drafter, "POST", "proposals", message)
        if answer.status == 200:
            self.adopt(wire.decode(answer.body))
        return answer

    def adopt(self, verdict: wire.Message) -> None:
        if verdict.get("round") == self.round + 1:
            self.round += 1
            self.tokens += verdict["emitted"]
            self.m_cap = verdict["m_cap"]
            self.ended = verdict["action"] in (wire.FINISH, wire.FAIL)

    async def propose(self, tokens: Sequence[int], by: Peer | None = None, **changes: Any) -> Response:
        return await self.post(self.proposal(tokens, **changes), by)

    async def verdict(self, tokens: Sequence[int], /, **changes: Any) -> wire.Message:
        answer = await self.propose(tokens, **changes)
        expect(answer.status == 200, f"a valid proposal was answered {told(answer)}")
        return dict(wire.decode(answer.body))

    async def right(self, m: int) -> list[int]:
        """The m tokens that greedy decoding gives next."""
        return (await self.bench.greedy(len(self.tokens) + m))[len(self.tokens) :]

    async def wrong(self, m: int, at: int = 0) -> list[int]:
        """The same with another token at index ``at``: at most ``at`` of them can be accepted."""
        tokens = await self.right(m)
        tokens[at] = (tokens[at] + 1) % self.bench.card.vocab_size
        return tokens

    async def close(self) -> None:
        if self.ended:
            return
        answer = await self.bench.send(self.bench.router, "DELETE", self.path)
        if answer.status in (200, 202, 204, 404, 410):
            return
        await self.assign(m_init=M_MAX)
        for _ in range(CLOSING_ROUNDS):
            if self.ended or (await self.propose([0] * self.m_cap)).status != 200:
                return


def changed(message: wire.Message, changes: Mapping[str, Any]) -> wire.Message:
    for member, value in changes.items():
        if isinstance(value, EllipsisType):
            message.pop(member, None)
        else:
            message[member] = value
    return message


def told(answer: Response) -> str:
    """An answer in one line: status and, of a problem, its type and detail."""
    problem = wire.problem(answer.body)
    if problem:
        type_ = str(problem.get("type", "")).removeprefix(wire.PREFIX)
        return f"{answer.status} {type_} {problem.get('detail', '')}"[:160]
    return f"{answer.status} {answer.media_type} ({len(answer.body)} octets)"


def refused(answer: Response, expected: tuple[int, str], what: str) -> str:
    """Expect this status and problem type; answers what was seen."""
    seen = (answer.status, wire.problem(answer.body).get("type"))
    expect(seen == expected, f"{what}: {told(answer)}, not {expected[0]} {expected[1].removeprefix(wire.PREFIX)}")
    return f"{what}: {expected[0]} {expected[1].removeprefix(wire.PREFIX)}"


def rejected(answer: Response, statuses: Sequence[int], what: str) -> str:
    """Expect one of these statuses, whatever the problem type."""
    expect(answer.status in statuses, f"{what}: {told(answer)}, not {' or '.join(map(str, statuses))}")
    return f"{what}: {answer.status}"


async def discover(base: str, router: Peer, options: Options) -> tuple[Card, wire.Message]:
    """What the verifier serves: as the options say, else as its base URI answers (an extension)."""
    answer = await router.client.request("GET", base, headers={"accept": wire.MEDIA_TYPE})
    told_: Any = {}
    if answer.status == 200 and answer.media_type.startswith(wire.MEDIA_TYPE):
        told_ = wire.decode(answer.body)
    given = {
        "target": options.target, "tokenizer": options.tokenizer, "vocab_size": options.vocab_size,
        "context": options.context,
    }  # fmt: skip
    values: dict[str, Any] = {name: told_.get(name) if value is None else value for name, value in given.items()}
    missing = [name for name, value in values.items() if value is None]
    if missing:
        flags = " ".join("--" + name.replace("_", "-") for name in missing)
        raise ValueError(f"GET {base} does not say what the verifier serves ({answer.status}); give {flags}")
    return Card(**values), told_


@asynccontextmanager
async def bench(options: Options) -> AsyncIterator[Bench]:
    """Connect as router and drafters; everything that was opened is closed again."""
    router, drafter = peer(options.certs, "router"), peer(options.certs, "drafter")
    if router is None or drafter is None:
        raise ValueError(f"{options.certs}: router.pem and drafter.pem are needed")
    base = options.url.rstrip("/") + "/"
    card, said = await discover(base, router, options)
    mlc = options.mlc or said.get("mlc")
    base_of_cache = None if mlc is None else mlc.rstrip("/") + "/"
    prefix = options.mlc_prefix or said.get("mlc_prefix") or base_of_cache or "mlc://local/"
    cache = None if base_of_cache is None else Cache(base_of_cache, prefix, drafter, router)
    made = Bench(
        base,
        card,
        options.certs,
        router,
        drafter,
        peer(options.certs, "drafter-b"),
        cache,
        prefix,
        options.untrusted,
    )
    try:
        await made.choose_prompt()
        yield made
    finally:
        await made.close()
        for who in (made.router, made.drafter, made.other):
            if who is not None:
                who.client.close()

"""Coverage-guided fuzzing of everything that reads what a peer sent: messages, records, problem documents, requests.

    make fuzz                   # installs atheris and runs ten minutes
    make fuzz FUZZ_SECONDS=60

The corpus, a folder that is named last, is created and seeded with one valid body of every message. A finding is an
exception outside the problem table (``core/problems.py``), a response of status 500, or one that is no valid answer;
libFuzzer writes the input to ``.venv/crash-…``, and ``.venv/bin/python fuzz/fuzz_cbor.py .venv/crash-…`` repeats it.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

from sdcp_mono import certs
from sdcp_mono.cache.memory import MemoryObjects
from sdcp_mono.core import cbor, messages
from sdcp_mono.core.messages import Output, SessionState, Status, Verdict
from sdcp_mono.core.ports import ModelCard
from sdcp_mono.core.problems import Refusal, StaleBase, UnknownSession
from sdcp_mono.http_gateway import problems
from sdcp_mono.http_gateway.exchange import Gate
from sdcp_mono.http_gateway.identity import Access
from sdcp_mono.http_gateway.limits import GatewayLimits
from sdcp_mono.http_gateway.mlc import MlcResources
from sdcp_mono.http_gateway.roles import DrafterResources, RouterResources
from sdcp_mono.http_gateway.server import application
from sdcp_mono.http_gateway.verifier import VerifierResources

SESSION: Final = bytes(range(16))
ID: Final = "AAECAwQFBgcICQoLDA0ODw"
DIGEST: Final = bytes(32)
STATE: Final = SessionState(session=SESSION, epoch=1, round=0, committed=0, digest=DIGEST)
TYPES: Final[tuple[type[Any], ...]] = (
    messages.SessionOpen, messages.SessionState, messages.Assignment, messages.Proposal, messages.Verdict,
    messages.Output, messages.Status, messages.Event, messages.Policy, messages.Decline, messages.Contract,
)  # fmt: skip
ROUTES: Final = (
    ("router", "POST", "/verifier/sessions"), ("router", "PUT", f"/verifier/sessions/{ID}/drafter"),
    ("drafter", "POST", "/verifier/proposals"), ("router", "POST", f"/verifier/sessions/{ID}/policy"),
    ("drafter", "POST", f"/verifier/sessions/{ID}/decline"), ("router", "GET", f"/verifier/sessions/{ID}/output"),
    ("router", "POST", "/drafter/assignments"), ("drafter", "PUT", "/router/instances/d/status"),
    ("verifier", "POST", "/router/events"), ("drafter", "PUT", "/mlc/-/blob/a"), ("drafter", "GET", "/mlc/-/blob/a"),
    ("drafter", "POST", "/mlc/-/blob/a/lease"), ("verifier", "POST", "/mlc/-/log/a"), ("router", "PUT", "/mlc/-/log/a"),
)  # fmt: skip
HEADERS: Final = ("accept", "content-type", "prefer", "range", "if-match", "if-none-match", "content-length")


class Stub:
    """All ports at once: answers whatever is asked."""

    async def open(self, *_: Any) -> SessionState:
        return STATE

    assign = policy = decline = open

    async def propose(self, *_: Any) -> Verdict:
        raise StaleBase("base", STATE)

    async def output(self, session: bytes, from_: int, wait_ms: int | None = None) -> Output:
        if from_ > 2**40:
            raise UnknownSession("session: unknown")
        return Output(session=session, epoch=1, from_=from_, tokens=(1,), final=False)

    async def close(self, *_: Any) -> None: ...

    status = event = close

    async def append(self, appends: Any) -> list[str]:
        return ["ok" for _ in appends]

    async def read(self, *_: Any) -> list[Any]:
        return []

    async def fence(self, *_: Any) -> bool:
        return True

    create = drop = close


@cache
def gateway() -> tuple[Any, asyncio.AbstractEventLoop, dict[str, str]]:
    """The application without its listener, a loop, and each role's certificate as PEM."""
    now = dt.datetime.now(dt.UTC)
    ca, key = certs.make_ca(now)
    bases = certs.base_uris()
    pems = {}
    for role, uri in bases.items():
        cert, _ = certs.issue(ca, key, role, uris=(uri,), now=now)
        pems[role] = cert.public_bytes(certs.serialization.Encoding.PEM).decode()
    limits = GatewayLimits(session_rate=1e9, drafter_rate=1e9)
    stub: Any = Stub()
    access = Access.of(routers=[bases["router"]], verifiers=[bases["verifier"]], frontends=[bases["frontend"]])
    card = ModelCard("stub", DIGEST, DIGEST, 64, 64)

    async def build() -> Any:
        roles = {
            "/verifier/": VerifierResources(stub, card, lambda _: None, limits).resources,
            "/drafter/": DrafterResources(stub).resources,
            "/router/": RouterResources(stub).resources,
            "/mlc/": MlcResources(MemoryObjects(2**20), stub, "local").resources,
        }
        return application(Gate.of(access, limits), roles)

    loop = asyncio.new_event_loop()
    return loop.run_until_complete(build()), loop, pems


def message(data: bytes) -> None:
    """The first octet chooses the type; what decodes must encode again to something that decodes to the same."""
    type_ = TYPES[data[0] % len(TYPES)]
    try:
        read = cbor.decode(data[1:], type_)
    except Refusal:
        return
    assert cbor.decode(cbor.encode(read), type_) == read


def records(data: bytes) -> None:
    try:
        read, taken = cbor.decode_records(data)
    except Refusal:
        return
    assert taken <= len(data)
    assert cbor.decode_records(b"".join(map(cbor.encode_record, read)))[0] == read


def problem(data: bytes) -> None:
    """What a foreign server may answer."""
    refusal = problems.read(400 + data[0], "application/problem+json", data[1:], data[1:5].decode("latin-1"))
    assert isinstance(refusal, Refusal)


def request(data: bytes) -> None:
    """Octets: route, header and its length, the header's value, how the body is cut, the body."""
    if len(data) < 5:
        return
    app, loop, pems = gateway()
    role, method, path = ROUTES[data[0] % len(ROUTES)]
    headers = [(b"content-type", b"application/sdcp+cbor"), (b"if-match", b'"0"')]
    name, length, cut, mark = HEADERS[data[1] % len(HEADERS)], data[2] % 64, data[3], data[4]
    value, body = data[5 : 5 + length], data[5 + length :]
    if mark % 3:
        headers = [(n, v) for n, v in headers if n != name.encode()] + [(name.encode(), value.replace(b"\r\n", b""))]
    query = value if mark % 5 == 0 else b""
    parts = [body[:cut], body[cut:]]
    scope = {
        "type": "http", "http_version": "2", "method": method, "path": path, "raw_path": path.encode(), "root_path": "",
        "query_string": query, "headers": headers, "scheme": "https", "client": ("", 0), "server": ("", 0), "state": {},
        "extensions": {"tls": {"client_cert_chain": [pems[role]]}},
    }  # fmt: skip
    sent: list[Any] = []

    async def receive() -> Any:
        if parts:
            return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}
        if mark % 7 == 0:
            return {"type": "http.disconnect"}
        await asyncio.sleep(3600)
        raise AssertionError

    async def send(event: Any) -> None:
        sent.append(event)

    loop.run_until_complete(app(scope, receive, send))
    if not sent:
        assert mark % 7 == 0, "no answer although the client is still there"
        return
    status = sent[0]["status"]
    told = dict(sent[0]["headers"])
    content = b"".join(event.get("body", b"") for event in sent[1:])
    if status < 400:
        assert status in (200, 201, 204, 206)
        return
    assert status != 500, content
    assert told[b"content-type"] == b"application/problem+json"
    assert json.loads(content)["status"] == status


TARGETS: Final[tuple[Callable[[bytes], None], ...]] = (message, records, problem, request)


def check(data: bytes) -> None:
    """One input; the first octet chooses what reads the rest."""
    if len(data) > 1:
        TARGETS[data[0] % len(TARGETS)](data[1:])


def seeds() -> dict[str, bytes]:
    """A valid body of some messages for every target that reads it."""
    contract = messages.Contract(
        target=DIGEST, tokenizer=DIGEST, rule=1, m_max=8, max_new=9, stop=(2,), low_rounds=3, fallback=(1, 5),
        sampling=messages.Sampling(temperature_milli=1, seed=1), scope=SESSION,
    )  # fmt: skip
    status = Status(instance="d", role=1, load=0, queue=0, ttl_ms=1)
    common: dict[str, Any] = {"session": SESSION, "epoch": 1}
    bodies: tuple[Any, ...] = (
        messages.SessionOpen(**common, contract=contract, prompt=(1,), commit_log="mlc://a/-/log/b"),
        messages.Assignment(
            **common, contract=contract, verifier="https://v/", drafter="https://d/", prompt=(1,), round=0, committed=0,
            digest=DIGEST, m_init=4,
        ),
        messages.Proposal(
            **common, round=1, drafter="https://d/", base=0, base_digest=DIGEST, tokens=(1, 2), status=status
        ),
        messages.Policy(session=SESSION, from_round=1, sampling=messages.Sampling(top_k=1)),
        messages.Event(**common, kind=2, committed=0, digest=DIGEST),
        STATE, status, contract,
    )  # fmt: skip
    made = {}
    for body in bodies:
        index = TYPES.index(type(body))
        encoded = cbor.encode(body)
        made[f"message-{index}"] = bytes([0, index]) + encoded
        for route in range(len(ROUTES)):
            made[f"request-{route}-{index}"] = bytes([3, route, 0, 0, 10, 3]) + encoded
    record = messages.CommitRecord(epoch=1, round=1, emitted=(1,), committed=1, digest=DIGEST)
    made["records"] = b"\x01" + cbor.encode_record(record) + cbor.encode_record(messages.FenceRecord(epoch=2))
    document, _ = problems.render(StaleBase("base", STATE))
    made["problem"] = b"\x02\x09" + document
    return made


def main() -> None:
    import atheris

    files = [Path(argument) for argument in sys.argv[1:] if not argument.startswith("-")]
    if files and not files[0].is_file():
        files[0].mkdir(parents=True, exist_ok=True)
        for name, data in seeds().items():
            (files[0] / name).write_bytes(data)
    gateway()
    atheris.instrument_all()
    atheris.Setup(sys.argv, check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()

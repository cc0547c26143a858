"""Our clients: the ports over HTTP, against our gateway and against a peer that misbehaves (SDCP-046, 182, 199)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from sdcp_mono import certs
from sdcp_mono.core import cbor, problems
from sdcp_mono.core.messages import UNSET, Event, Policy, Proposal, Sampling, SessionState
from sdcp_mono.core.problems import Malformed, NotAssigned, Refusal, StaleBase, Unavailable
from sdcp_mono.http_gateway import tls as gateway_tls
from sdcp_mono.http_gateway.client import DrafterClient, RouterClient, VerifierClient, Verifiers
from sdcp_mono.http_gateway.peer import Peer
from sdcp_mono.http_gateway.problems import read, render


def test_the_ports_over_http(kit: Any) -> None:
    """What a role does with a port it does with a client; problems come back as the refusals they are."""

    async def test(site: Any) -> None:
        async with (
            Peer(kit.BASES["verifier"], site.files("router"), address=site.url("verifier")) as as_router,
            Peer(kit.BASES["verifier"], site.files("drafter"), address=site.url("verifier")) as as_drafter,
        ):
            router, drafter = VerifierClient(as_router), VerifierClient(as_drafter)
            assert (await router.card("toy")) == kit.CARD
            state = await router.open(kit.opening())
            assert await router.open(kit.opening()) == state
            told = cbor.decode(cbor.encode(state), SessionState)
            seen = {name: getattr(told, name) for name in ("session", "epoch", "round", "committed", "digest")}
            assert await router.assign(kit.assignment(seen)) == (await router.assign(kit.assignment(seen)))
            proposal = Proposal(**{**kit.proposal(seen, (5, 6)), "tokens": (5, 6), "status": kit.status()})
            verdict = await drafter.propose(proposal, "")
            assert (verdict.accepted, verdict.emitted) == (2, (5, 6, 7))
            assert await drafter.propose(proposal, "") == verdict  # SDCP-182: the same round again
            with pytest.raises(StaleBase) as stale:
                await drafter.propose(Proposal(**{**_members(proposal), "round": 9}), "")
            assert (stale.value.state.round, stale.value.state.committed) == (1, 3)
            assert stale.value.state.digest == verdict.digest
            with pytest.raises(NotAssigned):
                await router.propose(proposal, "")
            output = await drafter.output(kit.SESSION, 1, wait_ms=0)
            assert (output.tokens, output.final, output.finish) == ((6, 7), False, UNSET)
            assert (await router.chunk(kit.SESSION, 3, wait_ms=0)).tokens == ()
            told = await router.policy(Policy(session=kit.SESSION, from_round=3, sampling=Sampling(top_k=1)))
            assert told.round == 1
            await router.close(kit.SESSION)
            await router.close(kit.SESSION)  # what got lost may be sent again
            with pytest.raises(problems.UnknownSession):
                await router.close(bytes(16))
        async with (
            Peer(kit.BASES["drafter"], site.files("router"), address=site.url("drafter")) as to_drafter,
            Peer(kit.BASES["router"], site.files("drafter"), address=site.url("router")) as from_drafter,
            Peer(kit.BASES["router"], site.files("verifier"), address=site.url("router")) as from_verifier,
        ):
            await DrafterClient(to_drafter).assign(kit.assignment(seen))
            assert site.drafter.assignments[0].session == kit.SESSION
            await RouterClient(from_drafter).status(kit.status(instance=kit.BASES["drafter"]))
            assert site.router.statuses[-1].instance == kit.BASES["drafter"]
            event = Event(session=kit.SESSION, epoch=1, kind=2, committed=0, digest=state.digest)
            await RouterClient(from_verifier).event(event)
            assert site.router.events == [event]
            with pytest.raises(problems.Forbidden):
                await RouterClient(from_drafter).event(event)

    kit.run(test)


def _members(message: Any) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__struct_fields__}


OUTPUT = cbor.encode_value({"session": bytes(range(16)), "epoch": 1, "from": 0, "tokens": [5], "final": False})
CBOR = {"content-type": "application/sdcp+cbor"}


def against(kit: Any, answer: Callable[..., Any], test: Callable[[VerifierClient], Any], **options: Any) -> None:
    async def both() -> None:
        async with asyncio.timeout(3 * kit.WAIT_S), kit.stub(certs.files(kit.directory, "verifier"), answer) as url:
            base = options.get("base", kit.BASES["verifier"])
            async with Peer(base, certs.files(kit.directory, "drafter"), address=url) as peer:
                await test(VerifierClient(peer))

    asyncio.run(both())


@pytest.mark.parametrize(
    ("status", "refusal"),
    [(418, Malformed), (499, Malformed), (599, Unavailable), (503, Unavailable), (404, problems.UnknownSession),
     (429, problems.TooManyRequests), (403, problems.Forbidden), (302, Malformed), (307, Malformed)],
)  # fmt: skip
def test_sdcp_046_status_codes_by_class(kit: Any, status: int, refusal: type[Refusal]) -> None:
    """Also without a problem body, and no redirect is followed."""

    async def test(client: VerifierClient) -> None:
        with pytest.raises(refusal):
            await client.output(kit.SESSION, 0, wait_ms=0)

    visited: list[str] = []

    def answer(method: str, path: str, body: bytes, nth: int) -> Any:
        visited.append(path)
        return status, {"location": "/elsewhere", "content-type": "text/html"}, b"<html>"

    against(kit, answer, test)
    assert visited == [f"/verifier/sessions/{kit.path}/output?from=0"]


def test_sdcp_046_an_unlisted_success_is_a_success(kit: Any) -> None:
    async def test(client: VerifierClient) -> None:
        assert (await client.output(kit.SESSION, 0, wait_ms=0)).tokens == (5,)

    against(kit, lambda method, path, body, nth: (299, CBOR, OUTPUT), test)


@pytest.mark.parametrize("body", [b"\xff", b"", OUTPUT[:-1], OUTPUT + b"\0", b"\x81" * 1000])
def test_a_response_that_is_no_message(kit: Any, body: bytes) -> None:
    async def test(client: VerifierClient) -> None:
        with pytest.raises(Unavailable, match="can't be used"):
            await client.output(kit.SESSION, 0, wait_ms=0)

    against(kit, lambda method, path, body, nth: (200, CBOR, body), test)


def test_a_lost_connection_is_tried_again(kit: Any) -> None:
    async def test(client: VerifierClient) -> None:
        assert (await client.output(kit.SESSION, 0, wait_ms=0)).tokens == (5,)

    against(kit, lambda method, path, body, nth: None if nth < 3 else (200, CBOR, OUTPUT), test)


def test_tries_end(kit: Any) -> None:
    seen = 0

    def answer(method: str, path: str, body: bytes, nth: int) -> Any:
        nonlocal seen
        seen = nth

    async def test(client: VerifierClient) -> None:
        with pytest.raises(Unavailable, match="no answer"):
            await client.output(kit.SESSION, 0, wait_ms=0)

    against(kit, answer, test)
    assert seen >= 4


def test_responses_are_bounded(kit: Any) -> None:
    async def test(client: VerifierClient) -> None:
        with pytest.raises(problems.TooLarge):
            await client.output(kit.SESSION, 0, wait_ms=0)

    import sdcp_mono.http_gateway.peer as peer

    limit, peer_limit = 1000, peer.Peer.call.__kwdefaults__
    original = peer_limit["limit"]
    peer_limit["limit"] = limit
    try:
        against(kit, lambda method, path, body, nth: (200, CBOR, b"x" * 1001), test)
    finally:
        peer_limit["limit"] = original


def test_sdcp_199_the_server_is_who_it_should_be(kit: Any) -> None:
    """A certificate of the same CA and host, of another instance: nothing is sent to it."""
    asked: list[str] = []

    def answer(method: str, path: str, body: bytes, nth: int) -> Any:
        asked.append(path)
        return 200, CBOR, OUTPUT

    async def test(client: VerifierClient) -> None:
        with pytest.raises(Unavailable, match=r"the certificate there names https://127\.0\.0\.1:8443/verifier/"):
            await client.output(kit.SESSION, 0, wait_ms=0)

    against(kit, answer, test, base="https://127.0.0.1:8443/another/")
    assert asked == []


def test_a_server_of_another_ca_is_refused(kit: Any, strangers: Any) -> None:
    rogue = strangers("rogue", rogue=True, uris=(kit.BASES["verifier"],))

    async def both() -> None:
        async with (
            kit.stub(rogue, lambda *_: (200, CBOR, OUTPUT)) as url,
            Peer(kit.BASES["verifier"], certs.files(kit.directory, "drafter"), address=url) as peer,
        ):
            with pytest.raises(Unavailable, match="certificate is not trusted"):
                await VerifierClient(peer).output(kit.SESSION, 0, wait_ms=0)

    asyncio.run(both())


def test_the_environments_proxy_is_not_used(kit: Any, monkeypatch: Any) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)

    async def test(client: VerifierClient) -> None:
        assert (await client.output(kit.SESSION, 0, wait_ms=0)).tokens == (5,)

    against(kit, lambda method, path, body, nth: (200, CBOR, OUTPUT), test)


def test_c_46_a_client_follows_its_certificate(kit: Any, strangers: Any, tmp_path: Any, monkeypatch: Any) -> None:
    """The same files, another identity inside: the next request is made by the new one."""
    import shutil

    monkeypatch.setattr(gateway_tls, "RELOAD_SECONDS", 0.0)
    for suffix in ("", "-key"):
        shutil.copy(kit.directory / f"drafter{suffix}.pem", tmp_path / f"me{suffix}.pem")
    shutil.copy(kit.directory / "ca.pem", tmp_path / "ca.pem")

    async def test(site: Any) -> None:
        async with Peer(kit.BASES["verifier"], certs.files(tmp_path, "me"), address=site.url("verifier")) as peer:
            with pytest.raises(problems.Forbidden):
                await VerifierClient(peer).open(kit.opening())
            shutil.copy(kit.directory / "router.pem", tmp_path / "me.pem")
            with pytest.raises(problems.Forbidden):  # a pair that doesn't fit: the old one stays
                await VerifierClient(peer).open(kit.opening())
            shutil.copy(kit.directory / "router-key.pem", tmp_path / "me-key.pem")
            assert (await VerifierClient(peer).open(kit.opening())).round == 0

    kit.run(test)


def test_amb_045_a_drafter_knows_listed_verifiers_only(kit: Any) -> None:
    verifiers = Verifiers({"https://V:443/x": None}, certs.files(kit.directory, "drafter"))
    assert list(verifiers) == ["https://v/x/"]
    assert verifiers["https://v/x"] is verifiers["https://v/x/"]
    for unknown in ("https://w/x/", "not a uri", "http://v/x/"):
        with pytest.raises(KeyError):
            verifiers[unknown]
    asyncio.run(verifiers.close())


@pytest.mark.parametrize(
    "refusal",
    [problems.StaleEpoch("d"), problems.QUnavailable("d"), problems.BadContract("d"), problems.LimitExceeded("d"),
     problems.SessionClosed("d"), problems.BadProposal("d"), problems.NotAssigned("d"), problems.Conflict("d"),
     problems.TooManyRequests("d", retry_after_ms=1001), problems.Unavailable("d", retry_after_ms=1)],
)  # fmt: skip
def test_problem_documents_round_trip(refusal: Refusal) -> None:
    body, headers = render(refusal)
    document = json.loads(body)
    assert (document["type"], document["title"], document["status"]) == (refusal.type, refusal.title, refusal.status)
    back = read(refusal.status, headers["content-type"], body, headers.get("retry-after", ""))
    assert (type(back), back.detail) == (type(refusal), f"{refusal.status}: d")
    if refusal.retry_after_ms is not None:
        assert back.retry_after_ms == 1000 * -(-refusal.retry_after_ms // 1000)  # rounded up to whole seconds


@pytest.mark.parametrize(
    "state",
    [None, {}, [], "x", {"session": "AAECAwQFBgcICQoLDA0ODw", "epoch": 1, "round": -1, "committed": 0, "digest": "x"}],
)
def test_a_stale_base_without_a_state_is_a_conflict(state: Any) -> None:
    body = json.dumps({"type": "https://iana.org/assignments/sdcp#sdcp-stale-base", "session_state": state}).encode()
    assert type(read(409, "application/problem+json", body)) is problems.Conflict

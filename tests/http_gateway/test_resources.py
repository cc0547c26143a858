"""Table 1 over the wire: every row, its codes, media types and problem documents (5.1, 7)."""

from __future__ import annotations

import base64
from typing import Any

import cbor2
import pytest

from sdcp_mono.core import cbor
from sdcp_mono.core.effects import Moment
from sdcp_mono.core.names import format_session


def test_sdcp_047_to_051_a_session_over_the_wire(kit: Any) -> None:
    """Appendix A's contract, opened, assigned, one round, output: greedy over a target whose next token is last + 1."""

    async def test(site: Any) -> None:
        opened = await site.curl("router", "POST", "/verifier/sessions", kit.opening())
        assert (opened.status, opened.headers["location"]) == (201, f"sessions/{kit.path}")
        state = opened.cbor
        assert (state["session"], state["epoch"], state["round"], state["committed"]) == (kit.SESSION, 1, 0, 0)
        assert state["digest"] == kit.digest(kit.CONTRACT, (1, 3, 3, 4), ())
        again = await site.curl("router", "POST", "/verifier/sessions", kit.opening())
        assert (again.status, again.cbor) == (200, state)
        assert "location" not in again.headers
        told = await site.curl("router", "PUT", f"/verifier/sessions/{kit.path}/drafter", kit.assignment(state))
        assert told.status == 200
        verdict = await site.curl("drafter", "POST", "/verifier/proposals", kit.proposal(state, (5, 6, 9)))
        assert verdict.status == 200
        got = verdict.cbor
        assert (got["accepted"], got["emitted"], got["committed"], got["action"]) == (2, [5, 6, 7], 3, 0)
        assert got["digest"] == kit.digest(kit.CONTRACT, (1, 3, 3, 4), (5, 6, 7))
        for role in ("router", "frontend", "drafter"):
            output = await site.curl(role, "GET", f"/verifier/sessions/{kit.path}/output?from=1")
            assert output.status == 200
            assert output.cbor == {"session": kit.SESSION, "epoch": 1, "from": 1, "tokens": [6, 7], "final": False}
            assert output.headers["cache-control"] == "no-store"

    kit.run(test)


def test_sdcp_052_to_054_drafter_and_router(kit: Any) -> None:
    async def test(site: Any) -> None:
        state = await kit.assigned(site)
        told = await site.curl("router", "POST", "/drafter/assignments", kit.assignment(state))
        assert (told.status, told.body) == (204, b"")
        assert site.drafter.assignments == [kit.assignment(state)]
        put = await site.curl("drafter", "PUT", "/router/instances/drafter-1/status", kit.status())
        assert (put.status, put.body) == (204, b"")
        # AMB-047: the router learns the base from the certificate
        heard = site.router.statuses[-1]
        assert (heard.instance, heard.base) == ("drafter-1", kit.BASES["drafter"])
        event = {"session": kit.SESSION, "epoch": 1, "kind": 2, "committed": 0, "digest": state["digest"]}
        sent = await site.curl("verifier", "POST", "/router/events", event)
        assert (sent.status, site.router.events[0].kind) == (204, 2)
        site.router.known = set()
        assert (await site.curl("verifier", "POST", "/router/events", event)).kind == (404, "")  # AMB-182

    kit.run(test)


def test_amb_046_instance_that_is_a_uri(kit: Any) -> None:
    async def test(site: Any) -> None:
        base = kit.BASES["drafter"]
        path = "/router/instances/" + base.replace(":", "%3A").replace("/", "%2F") + "/status"
        assert (await site.curl("drafter", "PUT", path, kit.status(instance=base))).status == 204
        assert site.router.statuses[-1].base == base
        assert (await site.curl("drafter", "PUT", path, kit.status(instance="other"))).kind == (400, "")

    kit.run(test)


def test_discovery_names_the_model(kit: Any) -> None:
    async def test(site: Any) -> None:
        found = await site.curl("operator", "GET", "/verifier/")
        card = kit.CARD
        assert found.cbor == {
            "target": card.target, "tokenizer": card.tokenizer, "vocab_size": card.vocab_size, "context": card.context,
        }  # fmt: skip

    kit.run(test)


def test_amb_070_delete_and_amb_066_policy(kit: Any) -> None:
    async def test(site: Any) -> None:
        state = await kit.assigned(site)
        policy = {"session": kit.SESSION, "from_round": 1, "sampling": {"temperature_milli": 0, "min_p": 1}}
        path = f"/verifier/sessions/{kit.path}"
        told = await site.curl("router", "POST", f"{path}/policy", policy)
        assert (told.status, told.cbor["round"]) == (200, 0)
        late = await site.curl("router", "POST", f"{path}/policy", policy | {"from_round": 0})
        assert late.kind == (409, "sdcp-stale-base")  # AMB-173
        assert (await site.curl("router", "DELETE", path)).status == 204
        assert (await site.curl("router", "DELETE", path)).status == 204  # again
        refused = await site.curl("drafter", "POST", "/verifier/proposals", kit.proposal(state, (5,)))
        assert refused.kind == (410, "sdcp-session-closed")
        output = await site.curl("router", "GET", f"{path}/output?from=0")
        assert (output.cbor["final"], output.cbor["finish"]) == (True, 5)
        site.engine.tick(Moment(ms=site.verifier.moment().ms + site.engine.limits.retention_ms, load=0))
        assert (await site.curl("router", "GET", f"{path}/output?from=0")).kind == (404, "")
        assert (await site.curl("router", "DELETE", path)).kind == (404, "")

    kit.run(test)


def test_amb_003_stale_base_carries_the_session_state(kit: Any) -> None:
    async def test(site: Any) -> None:
        state = await kit.assigned(site)
        stale = await site.curl("drafter", "POST", "/verifier/proposals", kit.proposal(state, (5,), base=7))
        assert stale.kind == (409, "sdcp-stale-base")
        told = stale.problem["session_state"]
        assert (told["session"], told["epoch"], told["round"], told["committed"]) == (kit.path, 1, 0, 0)
        digest = base64.urlsafe_b64decode(told["digest"] + "=")
        assert digest == state["digest"]
        assert "=" not in told["digest"]

    kit.run(test)


def test_sdcp_183_every_problem_type_over_the_wire(kit: Any) -> None:
    """The eight of Table 2 but sdcp-q-unavailable and sdcp-bad-proposal, which test_independent_drafter.py has."""

    async def test(site: Any) -> None:
        state = await kit.assigned(site)

        async def propose(tokens: Any, **changes: Any) -> Any:
            return await site.curl("drafter", "POST", "/verifier/proposals", kit.proposal(state, tokens, **changes))

        assert (await propose((5,), epoch=2)).kind == (409, "sdcp-stale-epoch")
        assert (await propose((5,) * 9)).kind == (422, "sdcp-limit")
        assert (await propose((64,))).kind == (422, "sdcp-bad-proposal")
        assert (await propose((5,), drafter=kit.BASES["router"])).kind == (403, "sdcp-not-assigned")  # AMB-041
        opening = kit.opening(kit.contract(target=b"x" * 32), b"o" * 16)
        assert (await site.curl("router", "POST", "/verifier/sessions", opening)).kind == (422, "sdcp-bad-contract")
        finished = kit.opening(kit.contract(max_new=0), b"f" * 16)
        opened = await site.curl("router", "POST", "/verifier/sessions", finished)
        path = f"/verifier/sessions/{format_session(b'f' * 16)}/drafter"
        closed = await site.curl("router", "PUT", path, kit.assignment(opened.cbor, finished.contract))
        assert closed.kind == (410, "sdcp-session-closed")

    kit.run(test)


@pytest.mark.parametrize("role", ["router", "frontend"])
def test_amb_050_unknown_sessions(kit: Any, role: str) -> None:
    async def test(site: Any) -> None:
        path = f"/verifier/sessions/{kit.path}"
        assert (await site.curl(role, "GET", f"{path}/output")).kind == (404, "")
        assert (await site.curl("drafter", "GET", f"{path}/output")).kind == (403, "")
        state = {"session": kit.SESSION, "epoch": 1, "round": 0, "committed": 0, "digest": b"d" * 32}
        assert (await site.curl("drafter", "POST", "/verifier/proposals", kit.proposal(state, (5,)))).kind == (
            403, "sdcp-not-assigned",
        )  # fmt: skip
        assert (await site.curl("router", "PUT", f"{path}/drafter", kit.assignment(state))).kind == (404, "")

    kit.run(test)


@pytest.mark.parametrize(
    "id_", ["AAECAwQFBgcICQoLDA0ODw==", "AAECAwQFBgcICQoLDA0OD", "AAECAwQFBgcICQoLDA0ODwA", "AAECAwQFBgcICQoLDA0ODx",
            "AAECAwQFBgcICQoLDA0OD%2B", "%2E%2E"],
)  # fmt: skip
def test_sdcp_055_ids_that_are_none(kit: Any, id_: str) -> None:
    async def test(site: Any) -> None:
        await kit.assigned(site)
        refused = await site.curl("router", "GET", f"/verifier/sessions/{id_}/output")
        assert refused.kind[0] in (400, 404)

    kit.run(test)


def test_path_and_body_name_the_same_session(kit: Any) -> None:
    async def test(site: Any) -> None:
        state = await kit.assigned(site)
        other = format_session(b"o" * 16)
        assignment = await site.curl("router", "PUT", f"/verifier/sessions/{other}/drafter", kit.assignment(state))
        assert assignment.kind == (400, "")

    kit.run(test)


def test_sdcp_044_media_types(kit: Any) -> None:
    async def test(site: Any) -> None:
        async def open_(**headers: str) -> Any:
            return await site.curl("router", "POST", "/verifier/sessions", kit.opening(), **headers)

        for wrong in ("application/json", "application/cbor", "application/sdcp", ""):
            assert (await open_(content_type=wrong)).kind == (415, "")
        assert (await open_(content_encoding="gzip")).kind == (415, "")
        for wrong in ("application/json", "application/sdcp+cbor;q=0", "text/*, application/sdcp+cbor; q=0.0"):
            assert (await open_(accept=wrong)).kind == (406, "")
        assert (await open_(accept="application/sdcp+cbor;q=x")).kind == (400, "")
        assert not site.engine.sessions
        assert (await open_(content_type="Application/SDCP+CBOR; v=1", accept="text/html, */*;q=0.1")).status == 201
        assert (await open_(accept="application/*")).status == 200
        refused = await site.curl("frontend", "GET", f"/verifier/sessions/{kit.path}/output", accept="text/html")
        assert refused.kind == (406, "")

    kit.run(test)


def test_sdcp_049_methods_and_unknown_paths(kit: Any) -> None:
    async def test(site: Any) -> None:
        refused = await site.curl("drafter", "GET", "/verifier/proposals")
        assert (refused.kind, refused.headers["allow"]) == ((405, ""), "POST")
        assert (await site.curl("router", "OPTIONS", "/verifier/")).headers["allow"] == "GET, HEAD"
        for path in ("/", "/verifier", "/verifier/session", "/verifier/proposals/", "/.well-known/sdcp", "/router/"):
            assert (await site.curl("router", "GET", path)).kind == (404, "")

    kit.run(test)


def test_sdcp_041_base_paths_are_the_operators(kit: Any) -> None:
    async def test(site: Any) -> None:
        opened = await site.curl("router", "POST", "/a/b/verifier/sessions", kit.opening())
        assert opened.status == 201
        assert (await site.curl("router", "GET", "/verifier/")).kind == (404, "")

    kit.run(test, prefix="/a/b")


OPENING_KEYS = ("session", "epoch", "prompt", "commit_log")


def test_amb_007_bodies_that_are_no_message(kit: Any) -> None:
    """Bombs, bad CBOR and missing members: 400, or 422 inside the contract; the session table stays empty."""

    async def test(site: Any) -> None:
        good = cbor2.loads(cbor.encode(kit.opening()))
        whole = cbor2.dumps(good, canonical=True)

        async def kind(body: bytes) -> Any:
            return (await site.curl("router", "POST", "/verifier/sessions", body)).kind

        for body in (
            b"", b"\xff", whole[:-1], whole[: len(whole) // 2], whole + b"\x00",
            b"\x81" * 60_000, b"\x9b" + b"\xff" * 8,
            b"\xa1" * 500, b"\xbf" * 500, b"\x5f" * 500,
            b"\xc2\x49" + b"\x01" * 9, b"\xd8\x23\x61(", b"\x7b" + b"\xff" * 8,
            b"\xf6", b"\x80", cbor2.dumps([good]), b"\xa2\x61a\x01\x61a\x02", b"\xfb\x7f\xf0" + b"\0" * 6,
            b"\xa1\x80\x00",
        ):  # fmt: skip
            assert await kind(body) == (400, ""), body[:20]
        for key in OPENING_KEYS:
            assert await kind(cbor2.dumps({k: v for k, v in good.items() if k != key})) == (400, "")
        for changes in (
            {"epoch": -1},
            {"epoch": True},
            {"epoch": 1.0},
            {"session": "x" * 16},
            {"commit_log": "no uri"},
        ):
            assert await kind(cbor2.dumps(good | changes)) == (400, ""), changes
        for changes in ({"m_max": 8.0}, {"x": 1}, {"rule": 3}, {"low_rounds": 0}, {"sampling": {"min_p": 1}}):
            assert await kind(cbor2.dumps(good | {"contract": good["contract"] | changes})) == (
                422,
                "sdcp-bad-contract",
            )
        for missing in (good | {"contract": {}}, {}):
            assert await kind(cbor2.dumps(missing)) == (422, "sdcp-bad-contract")
        assert not site.engine.sessions
        unknown = await site.curl("router", "POST", "/verifier/sessions", cbor2.dumps(good | {"later": [1, {"a": 2}]}))
        assert unknown.status == 201

    kit.run(test)


def test_amb_010_body_limits(kit: Any) -> None:
    async def test(site: Any) -> None:
        state = await kit.assigned(site)
        long = kit.proposal(state, (5,), padding=b"x" * 2**16)
        assert (await site.curl("drafter", "POST", "/verifier/proposals", long)).kind == (413, "")
        async with kit.Wire.connect(site.gateway.port, site.files("drafter")) as wire:
            for length in ("65537", "9" * 30):  # refused by what it announces, before it is sent
                headers = {"content_type": "application/sdcp+cbor", "content_length": length}
                stream = await wire.start("POST", "/verifier/proposals", end=False, **headers)
                assert (await wire.answer(stream)).kind == (413, "")

    kit.run(test)


def test_amb_163_from_and_amb_166_prefer(kit: Any) -> None:
    async def test(site: Any) -> None:
        state = await kit.assigned(site)
        await site.curl("drafter", "POST", "/verifier/proposals", kit.proposal(state, (5, 6)))
        path = f"/verifier/sessions/{kit.path}/output"
        for wrong in ("-1", "x", "1.0", "", "0x1", "99999999999999999999"):
            assert (await site.curl("router", "GET", f"{path}?from={wrong}")).kind == (400, "")
        assert (await site.curl("router", "GET", path)).cbor["tokens"] == [5, 6, 7]
        for prefer in ("wait=0", "respond-async, wait=0", 'wait="0"'):
            at_once = await site.curl("router", "GET", f"{path}?from=3", prefer=prefer)
            assert at_once.cbor == {"session": kit.SESSION, "epoch": 1, "from": 3, "tokens": [], "final": False}
        assert (await site.curl("router", "GET", f"{path}?from=9", prefer="wait=0")).cbor["tokens"] == []  # AMB-164

    kit.run(test)


def test_decline_decodes_one_token(kit: Any) -> None:
    async def test(site: Any) -> None:
        await kit.assigned(site)
        decline = {"session": kit.SESSION, "epoch": 1, "round": 1, "drafter": kit.BASES["drafter"]}
        path = f"/verifier/sessions/{kit.path}/decline"
        done = await site.curl("drafter", "POST", path, decline)
        assert (done.cbor["round"], done.cbor["committed"]) == (1, 1)
        assert done.cbor["digest"] == kit.digest(kit.CONTRACT, (1, 3, 3, 4), (5,))

    kit.run(test)

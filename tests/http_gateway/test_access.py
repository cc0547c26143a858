"""Who may do what: each resource, each role (section 9, AMB-039 to 052)."""

from __future__ import annotations

from typing import Any

import pytest

from sdcp_mono.http_gateway.identity import Access, identity_of, normalise

ROLES = ("router", "verifier", "drafter", "frontend", "mlc", "operator")

# What only these roles may do; None stands for the problem a caller gets from the resource itself.
ALLOWED = {
    ("GET", "/verifier/"): set(ROLES),
    ("POST", "/verifier/sessions"): {"router"},
    ("DELETE", "/verifier/sessions/{id}"): {"router"},
    ("PUT", "/verifier/sessions/{id}/drafter"): {"router"},
    ("POST", "/verifier/sessions/{id}/policy"): {"router"},
    ("GET", "/verifier/sessions/{id}/output"): {"router", "frontend", "drafter"},
    ("POST", "/verifier/sessions/{id}/decline"): {"drafter", "mlc", "operator"},
    ("POST", "/verifier/proposals"): {"drafter", "mlc", "operator"},
    ("POST", "/drafter/assignments"): {"router"},
    ("PUT", "/router/instances/me/status"): {"verifier", "drafter", "mlc", "operator"},
    ("POST", "/router/events"): {"verifier"},
    ("GET", "/mlc/-/log/x"): {"router", "verifier"},
    ("POST", "/mlc/-/log/x"): {"router", "verifier"},
}


@pytest.mark.parametrize("role", ROLES)
def test_sdcp_196_to_198_resource_by_role(kit: Any, role: str) -> None:
    """A role that may not is told 403 before its body is read: the body here is no CBOR at all."""

    async def test(site: Any) -> None:
        await kit.assigned(site)
        for (method, path), allowed in ALLOWED.items():
            body = None if method in ("GET", "DELETE") else b"\xff"
            if role in allowed and method == "DELETE":
                continue  # test_resources.py deletes
            got = await site.curl(role, method, path.replace("{id}", kit.path), body, prefer="wait=0", if_match='"0"')
            if role in allowed:
                assert got.status in (200, 400, 404), (role, method, path, got.status)
                continue
            suffix = "sdcp-not-assigned" if path.endswith(("proposals", "decline")) else ""  # AMB-043
            assert got.kind == (403, suffix), (role, method, path)

    kit.run(test)


def test_sdcp_198_status_of_another_instance(kit: Any, strangers: Any) -> None:
    async def test(site: Any) -> None:
        other = strangers("other", uris=("https://other/drafter/",))

        async def put(files: Any, path: str, **changes: Any) -> Any:
            async with kit.Wire.connect(site.gateway.port, files) as wire:
                return await wire.request("PUT", f"/router/instances/{path}/status", kit.status(**changes))

        drafter = site.files("drafter")
        assert (await put(drafter, "b", instance="b")).status == 204
        assert (await put(other, "b", instance="b")).kind == (403, "")  # the name is taken
        assert (await put(other, "configured", instance="configured")).kind == (403, "")
        assert (await put(drafter, "configured", instance="configured")).status == 204
        uri = "https%3A%2F%2Fother%2Fdrafter%2F"
        assert (await put(drafter, uri, instance="https://other/drafter/")).kind == (403, "")
        assert (await put(other, uri, instance="https://other/drafter/")).status == 204
        assert (await put(drafter, "c", instance="c", role=2)).kind == (403, "")  # AMB-048
        assert (await put(drafter, "c", instance="c", base="https://other/drafter/")).kind == (403, "")

    kit.run(test, access={"instances": {"configured": kit.BASES["drafter"]}})


def test_amb_039_another_drafters_certificate(kit: Any, strangers: Any) -> None:
    async def test(site: Any) -> None:
        state = await kit.assigned(site)
        other = strangers("other", uris=("https://127.0.0.1:8443/drafter/b/",))
        async with kit.Wire.connect(site.gateway.port, other) as wire:
            refused = await wire.request("POST", "/verifier/proposals", kit.proposal(state, (5,)))
            assert refused.kind == (403, "sdcp-not-assigned")
            output = await wire.request("GET", f"/verifier/sessions/{kit.path}/output")
            assert output.kind == (403, "")  # AMB-049

    kit.run(test)


def test_amb_052_rule_2_needs_trust(kit: Any) -> None:
    async def test(site: Any) -> None:
        contract = kit.contract(rule=2)
        opened = await site.curl("router", "POST", "/verifier/sessions", kit.opening(contract))
        path = f"/verifier/sessions/{kit.path}/drafter"
        refused = await site.curl("router", "PUT", path, kit.assignment(opened.cbor, contract))
        assert refused.kind == (422, "sdcp-bad-contract")
        proposal = kit.proposal(opened.cbor, (5,), q_rows="mlc://local/-/q_rows/x")
        assert (await site.curl("drafter", "POST", "/verifier/proposals", proposal)).kind == (403, "sdcp-not-assigned")

    kit.run(test, trusted=())


@pytest.mark.parametrize("uris", [(), ("https://127.0.0.1:8443/router/", "https://x/")])
def test_an_identity_is_exactly_one_uri(kit: Any, strangers: Any, uris: tuple[str, ...]) -> None:
    async def test(site: Any) -> None:
        async with kit.Wire.connect(site.gateway.port, strangers("many", uris=uris)) as wire:
            assert (await wire.request("GET", "/verifier/")).kind == (403, "")

    kit.run(test)


def test_amb_040_uris_are_compared_in_one_spelling(kit: Any, strangers: Any) -> None:
    assert normalise("https://D:443/x") == normalise("https://d/x/")
    assert normalise("urn:sdcp:router") == "urn:sdcp:router"

    async def test(site: Any) -> None:
        for uri in ("HTTPS://127.0.0.1:8443/router", "urn:x:router", "spiffe://td/router"):
            files = strangers(uri[-3:].replace("/", "-"), uris=(uri,))
            async with kit.Wire.connect(site.gateway.port, files) as wire:
                opened = await wire.request("POST", "/verifier/sessions", kit.opening())
                assert opened.status in (200, 201), uri
        files = strangers("prefix", uris=("https://127.0.0.1:8443/router/sub/",))
        async with kit.Wire.connect(site.gateway.port, files) as wire:
            assert (await wire.request("POST", "/verifier/sessions", kit.opening())).kind == (403, "")

    aliases = {"spiffe://td/router": kit.BASES["router"]}
    kit.run(test, access={"routers": (kit.BASES["router"], "urn:x:router"), "aliases": aliases})


def test_the_certificate_is_read_in_both_shapes(kit: Any) -> None:
    import ssl

    pem = (kit.directory / "router.pem").read_text()
    for tls in ({"client_cert_chain": [pem]}, {"client_cert": ssl.PEM_cert_to_DER_cert(pem)}):
        assert identity_of({"extensions": {"tls": tls}}, Access.of()).uri == kit.BASES["router"]


def test_amb_040_messages_name_drafters_in_any_spelling(kit: Any) -> None:
    async def test(site: Any) -> None:
        opened = await site.curl("router", "POST", "/verifier/sessions", kit.opening())
        loud = "HTTPS://127.0.0.1:8443/drafter"
        assignment = kit.assignment(opened.cbor, drafter=loud, verifier="https://V:443/x")
        told = await site.curl("router", "PUT", f"/verifier/sessions/{kit.path}/drafter", assignment)
        verdict = await site.curl("drafter", "POST", "/verifier/proposals", kit.proposal(told.cbor, (5,), drafter=loud))
        assert verdict.status == 200
        assert (await site.curl("drafter", "GET", f"/verifier/sessions/{kit.path}/output")).status == 200
        await site.curl("router", "POST", "/drafter/assignments", assignment)
        heard = site.drafter.assignments[0]
        assert (heard.drafter, heard.verifier) == (kit.BASES["drafter"], "https://v/x/")

    kit.run(test)

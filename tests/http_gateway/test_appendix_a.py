"""Appendix A over the wire, octet by octet (SDCP-210, SDCP-211)."""

from __future__ import annotations

from typing import Any

CONTRACT = bytes.fromhex(
    "a86472756c65016473746f708102656d5f6d61780866746172676574582025"
    "4e528c669a2084c9727298cacb83e8854e0a6ff80e2bf18096b9dce0f7ebda676d61785f6e65771901006866616c6c6261636b8401020305"
    "69746f6b656e697a657258209f42a7a29dca3063ad26d7be7fe6a930fa38afb1a703e4f7ff538db4e133b19c6a6c6f775f726f756e647303"
)
PROMPT = bytes.fromhex("8401020304")
D0 = bytes.fromhex("186b373698d5baf27716830811ffa6414887dd0a4f9d13db6c00e19bdb57b76e")
D2 = bytes.fromhex("469bbe77ceb5b1540a4d61d826a3117e357e097c5ac20271306633559fccdf1f")
NEXT = {4: 17, 17: 42, 42: 7, 7: 9, 9: 13, 11: 5}  # the target's argmax after each token


def test_sdcp_210_211_appendix_a(kit: Any) -> None:
    assert len(CONTRACT) == 143

    def target(last: int) -> Any:
        return tuple(float(i == NEXT.get(last, 0)) for i in range(kit.VOCAB))

    async def test(site: Any) -> None:
        log = f"mlc://local/{kit.SESSION.hex()}/log/a".encode()
        opening = (
            b"\xa5\x67session\x50" + kit.SESSION + b"\x65epoch\x01\x68contract" + CONTRACT + b"\x66prompt" + PROMPT
            + b"\x6acommit_log\x78" + bytes([len(log)]) + log
        )  # fmt: skip
        opened = await site.curl("router", "POST", "/verifier/sessions", opening)
        assert (opened.status, opened.cbor["digest"]) == (201, D0)
        assignment = kit.assignment(opened.cbor, prompt=(1, 2, 3, 4))
        state = (await site.curl("router", "PUT", f"/verifier/sessions/{kit.path}/drafter", assignment)).cbor
        # The committed output becomes 17, 42 by a proposal whose second token is the round's additional one.
        first = await site.curl("drafter", "POST", "/verifier/proposals", kit.proposal(state, (17,)))
        assert (first.cbor["emitted"], first.cbor["digest"]) == ([17, 42], D2)
        got = (await site.curl("drafter", "POST", "/verifier/proposals", kit.proposal(first.cbor, (7, 9, 11)))).cbor
        assert (got["accepted"], got["emitted"], got["committed"]) == (2, [7, 9, 13], 5)
        assert (got["low"], got["action"], got["round"]) == (0, 0, 2)

    kit.run(test, next_=target)

"""The contract digest (4.1) and the committed-prefix digest chain (4.2)."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from hashlib import sha256

from sdcp_mono.core import cbor
from sdcp_mono.core.messages import Contract, Hash32


def contract_digest(contract: Contract) -> Hash32:
    """Over the contract as created: absent members stay absent (AMB-014)."""
    return sha256(b"SDCP-CONTRACT-1\0" + cbor.encode(contract)).digest()


def prefix_digest(contract_digest: Hash32, prompt: Sequence[int]) -> Hash32:
    """d[0]. Raises ``OverflowError`` for a token id that does not fit uint32."""
    tokens = array("I", prompt)
    assert tokens.itemsize == 4
    if sys.byteorder == "little":
        tokens.byteswap()
    head = b"SDCP-PREFIX-1\0" + contract_digest + len(prompt).to_bytes(4, "big")
    state = sha256(head)
    state.update(tokens)
    return state.digest()


def extend(digest: Hash32, tokens: Iterable[int]) -> Hash32:
    """d[n + len(tokens)] from d[n], one link per token. Raises ``OverflowError`` as ``prefix_digest`` does."""
    for token in tokens:
        digest = sha256(digest + token.to_bytes(4, "big")).digest()
    return digest

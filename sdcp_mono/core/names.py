"""Names as text: session ids in paths (5.1), base URIs (AMB-040), MLC objects (design, section 5)."""

from __future__ import annotations

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

from msgspec import Struct

from sdcp_mono.core.messages import SessionId
from sdcp_mono.core.problems import Malformed

# 16 octets are 22 characters, of which the last holds two bits: exactly one text per session.
_SESSION: Final = re.compile(r"[A-Za-z0-9_-]{21}[AQgw]")
_BASE: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[!-~]{1,2000}")  # printable ASCII, as long as HTTP stacks allow
# Kinds of objects that are of use from a proposal to its verdict (section 8), and how long they live unless leased.
SHORT_LIVED: Final = frozenset({"q_rows", "draft_kv"})
# A proposal whose answer is lost is sent again after a minute, with the same rows; whoever is done deletes them.
SHORT_TTL_MS: Final = 180_000
_LABEL: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")  # of a host name (RFC 1123)
_NAMED: Final = re.compile(r"[^/:]*\.[a-z][^/:.]*[:/].*")  # hosts that are names of several labels; addresses are not
_DEFAULT_PORTS: Final = {"https": 443, "http": 80}

# One spelling per object: no upper case where it means nothing, no escapes, no empty or dotted segment.
_MLC: Final = re.compile(
    r"mlc://(?P<authority>[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?(?::[0-9]{1,5})?)"
    r"/(?P<scope>-|[0-9a-f]{32})"
    r"/(?P<kind>[a-z][a-z0-9_-]{0,31})"
    r"/(?P<name>[A-Za-z0-9_-][A-Za-z0-9._-]{0,199})"
)


def format_session(session: SessionId) -> str:
    """The {id} of session paths: base64url without padding, 22 characters."""
    return urlsafe_b64encode(session)[:22].decode("ascii")


def parse_session(text: str) -> SessionId:
    """Read {id}; raises ``Malformed`` for padding, another alphabet, another length or stray bits."""
    if not _SESSION.fullmatch(text):
        raise Malformed("session id in the path: not 22 characters of base64url that encode 16 octets")
    return urlsafe_b64decode(text + "==")


def normalise_base(uri: str) -> str:
    """A base URI for comparison: scheme and host in lower case, no default port, exactly one trailing slash.

    Raises ``Malformed`` for what is not an absolute URI with a host, or carries user information, query or fragment.
    """
    try:
        if not _BASE.fullmatch(uri):
            raise ValueError
        parts = urlsplit(uri)
        host, port = parts.hostname, parts.port
        if not host or "@" in parts.netloc or "*" in host or "?" in uri or "#" in uri:
            raise ValueError
    except ValueError:
        raise Malformed("base URI: expected scheme://host[:port]/path") from None
    if ":" in host:
        host = f"[{host}]"  # IPv6
    if port is not None and port != _DEFAULT_PORTS.get(parts.scheme):
        host = f"{host}:{port}"
    return f"{parts.scheme}://{host}{parts.path.rstrip('/')}/"


def normalise_pattern(text: str) -> str:
    """An entry of a list of peers: a base URI, or ``https://*.host/``; raises ``Malformed`` for any other ``*``."""
    scheme, anywhere, rest = text.partition("://*.")
    if not anywhere:
        if "*" in text:
            raise Malformed("base URI: * stands for the whole first label of the host, as in https://*.drafter:9443/")
        return normalise_base(text)
    if "*" in rest:
        raise Malformed("base URI: one * at most")
    pool = normalise_base(f"{scheme}://{rest}")
    if not is_member(pool.replace("://", "://x."), pool):
        raise Malformed("base URI: *. comes before a host name of two labels or more")
    return pool.replace("://", "://*.")


def is_member(base: str, pool: str) -> bool:
    """Whether a base URI is an instance of the pool of that name: its host one label below, everything else equal.

    Both in their one spelling. A pool's host is a name of several labels, never an address or a top-level domain.
    """
    scheme, _, rest = base.partition("://")
    label, _, below = rest.partition(".")
    return bool(_LABEL.fullmatch(label)) and f"{scheme}://{below}" == pool and bool(_NAMED.fullmatch(below))


class Bases(Struct, frozen=True):
    """The base URIs that a list of peers admits: those that it names, and all instances of its pools."""

    named: frozenset[str] = frozenset()
    pools: frozenset[str] = frozenset()  # their identities, from entries such as https://*.drafter.example:9443/

    @classmethod
    def of(cls, entries: Iterable[str]) -> Bases:
        """Entries as ``normalise_pattern`` makes them; other URIs, such as URNs, name themselves."""
        found = set(entries)
        patterns = {entry for entry in found if "://*." in entry}
        return cls(frozenset(found - patterns), frozenset(entry.replace("://*.", "://") for entry in patterns))

    def __contains__(self, base: object) -> bool:
        return base in self.named or (isinstance(base, str) and any(is_member(base, pool) for pool in self.pools))


class MlcUri(Struct, frozen=True):
    """``mlc://authority/scope/kind/name``; scope is 16 octets in hex, or ``-`` for objects of no scope.

    ``str()`` is the URI. Made by ``parse`` or field by field, it is checked either way (``Malformed``).
    """

    authority: str
    scope: bytes | None
    kind: str
    name: str

    def __post_init__(self) -> None:
        if not _MLC.fullmatch(str(self)):
            raise Malformed("MLC URI: expected mlc://authority/scope/kind/name in its one allowed spelling")

    def __str__(self) -> str:
        return f"mlc://{self.authority}/{'-' if self.scope is None else self.scope.hex()}/{self.kind}/{self.name}"

    @classmethod
    def parse(cls, text: str) -> MlcUri:
        match = _MLC.fullmatch(text)
        if match is None:
            raise Malformed("MLC URI: expected mlc://authority/scope/kind/name in its one allowed spelling")
        scope = None if match["scope"] == "-" else bytes.fromhex(match["scope"])
        return cls(match["authority"], scope, match["kind"], match["name"])

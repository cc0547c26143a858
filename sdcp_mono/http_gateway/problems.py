"""Problem documents (RFC 9457): refusals to ``application/problem+json`` and back (section 7, AMB-002, AMB-003)."""

from __future__ import annotations

import json
import math
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping
from typing import Any, Final

from msgspec import UNSET

from sdcp_mono.core import problems
from sdcp_mono.core.messages import SessionState
from sdcp_mono.core.names import format_session, parse_session
from sdcp_mono.core.problems import TYPE_PREFIX, Malformed, Refusal, StaleBase, Unavailable

MEDIA_TYPE: Final = "application/problem+json"
MAX_DETAIL: Final = 500  # characters of a foreign detail that reach our logs


class NotFound(Refusal):
    status, title = 404, "Not Found"


class MethodNotAllowed(Refusal):
    status, title = 405, "Method Not Allowed"


class NotAcceptable(Refusal):
    status, title = 406, "Not Acceptable"


class RequestTimeout(Refusal):
    status, title = 408, "Request Timeout"


class PreconditionFailed(Refusal):
    status, title = 412, "Precondition Failed"


class UnsupportedMediaType(Refusal):
    status, title = 415, "Unsupported Media Type"


class RangeNotSatisfiable(Refusal):
    status, title = 416, "Range Not Satisfiable"


class PreconditionRequired(Refusal):
    status, title = 428, "Precondition Required"


class InternalError(Refusal):
    status, title = 500, "Internal Server Error"


class VersionNotSupported(Refusal):
    status, title = 505, "HTTP Version Not Supported"


BY_SUFFIX: Final[Mapping[str, type[Refusal]]] = {
    kind.suffix: kind
    for kind in (
        problems.StaleEpoch, problems.QUnavailable, problems.BadContract, problems.LimitExceeded,
        problems.SessionClosed, problems.BadProposal, problems.NotAssigned,
    )
    if kind.suffix
}  # fmt: skip
BY_STATUS: Final[Mapping[int, type[Refusal]]] = {
    kind.status: kind
    for kind in (
        problems.Forbidden, problems.UnknownSession, problems.Conflict, problems.TooLarge, problems.Unprocessable,
        problems.TooManyRequests, PreconditionFailed, RangeNotSatisfiable, MethodNotAllowed,
    )
}  # fmt: skip


def render(refusal: Refusal) -> tuple[bytes, dict[str, str]]:
    """Body and headers of the document."""
    document: dict[str, Any] = {
        "type": refusal.type,
        "title": refusal.title,
        "status": refusal.status,
        "detail": refusal.detail,
    }
    if isinstance(refusal, StaleBase):
        document["session_state"] = state_to_json(refusal.state)
    headers = {"content-type": MEDIA_TYPE, "cache-control": "no-store"}
    if refusal.retry_after_ms is not None:
        headers["retry-after"] = str(math.ceil(refusal.retry_after_ms / 1000))  # whole seconds (RFC 9110, 10.2.3)
    return json.dumps(document).encode(), headers


def read(status: int, content_type: str, body: bytes, retry_after: str = "") -> Refusal:
    """The refusal behind an error response: by its type, else by its status, else by the status' class (5.1).

    The document may be missing (a proxy, the server's own layer) or of a type this release doesn't know.
    """
    document = _document(content_type, body)
    detail = document.get("detail") or document.get("title")
    detail = f"{status}: {detail[:MAX_DETAIL]}" if isinstance(detail, str) else f"status {status}"
    retry_after_ms = 1000 * int(retry_after) if retry_after.isascii() and retry_after.isdigit() else None
    type_ = document.get("type")
    suffix = type_.removeprefix(TYPE_PREFIX) if isinstance(type_, str) and type_.startswith(TYPE_PREFIX) else ""
    if suffix == StaleBase.suffix:
        try:
            return StaleBase(detail, state_from_json(document.get("session_state")))
        except Malformed:
            return problems.Conflict(detail)
    kind = BY_SUFFIX.get(suffix) if status < 500 else None
    if kind is None:
        kind = BY_STATUS.get(status, Unavailable if status >= 500 else Malformed)
    return kind(detail, retry_after_ms=retry_after_ms)


def state_to_json(state: SessionState) -> dict[str, Any]:
    """All of session-state; byte strings as base64url without padding (AMB-003)."""
    document: dict[str, Any] = {
        "session": format_session(state.session),
        "epoch": state.epoch,
        "round": state.round,
        "committed": state.committed,
        "digest": urlsafe_b64encode(state.digest).rstrip(b"=").decode(),
    }
    return document if state.state is UNSET else document | {"state": state.state}


def state_from_json(document: Any) -> SessionState:
    """Raises ``Malformed``; further members are ignored."""
    try:
        numbers = [document[name] for name in ("epoch", "round", "committed")]
        digest = urlsafe_b64decode(document["digest"] + "=")
        if len(digest) != 32 or not all(type(n) is int and n >= 0 for n in numbers):
            raise ValueError
        session = parse_session(document["session"])
    except (KeyError, TypeError, ValueError):
        raise Malformed("session_state: not a session-state") from None
    state = document.get("state")
    return SessionState(
        session=session, epoch=numbers[0], round=numbers[1], committed=numbers[2], digest=digest,
        state=state if type(state) is int and state >= 0 else UNSET,
    )  # fmt: skip


def _document(content_type: str, body: bytes) -> dict[str, Any]:
    if content_type.partition(";")[0].strip().lower() not in (MEDIA_TYPE, "application/json"):
        return {}
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}

"""Refusals: one small tree, each with its wire code (section 7, Table 2).

A refusal is an answer, not a fault: it is raised before anything changed. ``type`` is ``about:blank`` where the draft
registers no type (AMB-007 and the decisions that cite it).
"""

from __future__ import annotations

from typing import Final

from sdcp_mono.core.messages import SessionState

TYPE_PREFIX: Final = "https://iana.org/assignments/sdcp#"


class Refusal(Exception):
    """A request that is answered with a problem document instead of a result.

    ``detail`` is one sentence for a person and names the field at fault; it never holds prompt or output tokens.
    ``retry_after_ms`` is set where the same request can succeed later.
    """

    status = 400
    suffix: str | None = None
    title = "Bad Request"

    def __init__(self, detail: str, *, retry_after_ms: int | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.retry_after_ms = retry_after_ms

    @property
    def type(self) -> str:
        """The problem type URI (10.2.1)."""
        return "about:blank" if self.suffix is None else TYPE_PREFIX + self.suffix


class StaleEpoch(Refusal):
    status, suffix, title = 409, "sdcp-stale-epoch", "Epoch is not current"


class StaleBase(Refusal):
    """Carries the session's present state, so that the sender can resynchronise (6.3 step 4)."""

    status, suffix, title = 409, "sdcp-stale-base", "Proposal does not extend the committed prefix"

    def __init__(self, detail: str, state: SessionState) -> None:
        super().__init__(detail)
        self.state = state


class QUnavailable(Refusal):
    status, suffix = 409, "sdcp-q-unavailable"
    title = "Draft probabilities required by the rule are unavailable"


class BadContract(Refusal):
    status, suffix, title = 422, "sdcp-bad-contract", "Contract invalid or not supported"


class LimitExceeded(Refusal):
    status, suffix, title = 422, "sdcp-limit", "Proposal violates m_cap or m_max"


class SessionClosed(Refusal):
    status, suffix, title = 410, "sdcp-session-closed", "Session has finished or failed"


class BadProposal(Refusal):
    status, suffix, title = 422, "sdcp-bad-proposal", "Proposal inconsistent with its draft distributions"


class NotAssigned(Refusal):
    status, suffix, title = 403, "sdcp-not-assigned", "Drafter is not assigned to the session"


class Malformed(Refusal):
    """Not well-formed CBOR, or not the message that was expected (AMB-007)."""


class Forbidden(Refusal):
    status, title = 403, "Forbidden"


class UnknownSession(Refusal):
    status, title = 404, "Not Found"


class Conflict(Refusal):
    status, title = 409, "Conflict"


class TooLarge(Refusal):
    status, title = 413, "Content Too Large"


class Unprocessable(Refusal):
    status, title = 422, "Unprocessable Content"


class TooManyRequests(Refusal):
    status, title = 429, "Too Many Requests"


class Unavailable(Refusal):
    """Nothing was committed; the same request may succeed later (AMB-145)."""

    status, title = 503, "Service Unavailable"


class OverQuota(Unavailable):
    """One scope has used up its share; the others are not affected. ``detail`` begins with the field at fault."""

    @property
    def field(self) -> str:
        """``scope_bytes`` or ``scope_objects``."""
        return self.detail.partition(":")[0]

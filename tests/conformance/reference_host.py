"""What every reference role shares: answers, problem documents, media types, and being wrong in one named way."""

from __future__ import annotations

import json
from typing import Any

from reference_octets import Defect, Reader, encode

from sdcp_mono.conformance.http2 import Request, Response

CBOR, PROBLEM = "application/sdcp+cbor", "application/problem+json"
TYPES = {
    "sdcp-stale-epoch": (409, "Epoch is not current"),
    "sdcp-stale-base": (409, "Proposal does not extend the committed prefix"),
    "sdcp-q-unavailable": (409, "Draft probabilities required by the rule are unavailable"),
    "sdcp-bad-contract": (422, "Contract invalid or not supported"),
    "sdcp-limit": (422, "Proposal violates m_cap or m_max"),
    "sdcp-session-closed": (410, "Session has finished or failed"),
    "sdcp-bad-proposal": (422, "Proposal inconsistent with its draft distributions"),
    "sdcp-not-assigned": (403, "Drafter is not assigned to the session"),
}


class Refuse(Exception):
    """A refusal: a suffix of Table 2, or a status without a registered type."""

    def __init__(self, what: str | int, **members: Any) -> None:
        super().__init__(what)
        self.what, self.members = what, members


class Host:
    """``bug`` is the one thing this instance does wrong; empty: nothing."""

    def __init__(self, bug: str = "") -> None:
        self.bug = bug
        self.titles = 0

    def bad(self, bug: str) -> bool:
        return self.bug == bug

    async def __call__(self, request: Request) -> Response | None:
        try:
            answer = await self.answer(request)
        except Refuse as refusal:
            return self.problem(refusal)
        except Defect as defect:
            status: str | int = "sdcp-bad-contract" if defect.contract else 422 if self.bad("malformed is 422") else 400
            return self.problem(Refuse(status, detail=str(defect)))
        except (LookupError, TypeError, ValueError) as error:  # what a bug leads to, as in any server
            return self.problem(Refuse(500, detail=repr(error)))
        if answer is not None and not self.bad("cacheable"):
            return Response(answer.status, {**answer.headers, "cache-control": "no-store"}, answer.body)
        return answer

    async def answer(self, request: Request) -> Response | None:
        raise NotImplementedError

    def problem(self, refusal: Refuse) -> Response:
        suffix = refusal.what if isinstance(refusal.what, str) else None
        status, title = TYPES[suffix] if suffix else (int(refusal.what), "Refused")
        for wrong in ("stale-epoch is 412", "not-assigned is 401", "limit is 409", "session-closed is 409",
                      "bad-proposal is 409", "q-unavailable is 503", "bad-contract is 400"):  # fmt: skip
            if self.bad(wrong) and suffix == "sdcp-" + wrong.split()[0]:
                status = int(wrong[-3:])
        if self.bad("titles vary"):
            self.titles += 1
            title += f" ({self.titles})"
        prefix = (
            "https://www.iana.org/assignments/sdcp#"
            if self.bad("www in types")
            else "https://iana.org/assignments/sdcp#"
        )
        document = {"type": prefix + suffix if suffix else "about:blank", "title": title, "status": status}
        if self.bad("errors are text"):
            return Response(status, {"content-type": "text/plain"}, title.encode())
        return Response(status, {"content-type": PROBLEM, "cache-control": "no-store"},
                        json.dumps({**document, **refusal.members}).encode())  # fmt: skip

    def reply(self, value: Any, status: int = 200, **headers: str) -> Response:
        parameter = "; v=1" if self.bad("parameters sent") else ""
        return Response(status, {"content-type": CBOR + parameter, **headers}, encode(value))

    def read(self, request: Request, limit: int = 16 * 2**20) -> Any:
        """The body as one CBOR item; bodies of another type or length are refused."""
        given = request.headers.get("content-type", CBOR if self.bad("missing type accepted") else "")
        name = given if self.bad("parameters refused") else given.split(";")[0].strip()
        if name != CBOR and not (self.bad("JSON accepted") and name == "application/json"):
            raise Refuse(415)
        if "json" in request.headers.get("accept", "") and not self.bad("Accept ignored"):
            raise Refuse(406)
        if len(request.body) > limit and not self.bad("no body limit"):
            raise Refuse(413)
        reader = Reader(
            request.body,
            duplicates=self.bad("duplicate keys accepted"),
            tags=self.bad("bignums accepted"),
            definite=self.bad("indefinite lengths refused"),
        )
        value = reader.whole(trailing=self.bad("trailing bytes ignored"))
        if not isinstance(value, dict):
            raise Defect("not a map")
        if self.bad("unknown keys refused") and any(not isinstance(key, str) or key == "zz" for key in value):
            raise Defect("an unknown key")
        return value

"""What a client is told when a request isn't served: OpenAI's error shape.

``{"error": {"message", "type", "param", "code"}}``; ``param`` names the request parameter at fault.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
from starlette.responses import Response

from sdcp_mono.core.problems import Refusal, TooManyRequests, Unavailable

_DEFAULT_RETRY_S = 1  # a round takes a fraction of a second, so a place in the queue is soon free


class ApiError(Exception):
    """A request that is answered with an error; 400 unless said otherwise."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status
        self.retry_after_s = retry_after_s

    @property
    def type(self) -> str:
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        headers = {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}
        return Response(msgspec.json.encode(self.body()), self.status, headers, "application/json")


def from_refusal(refusal: Refusal) -> ApiError:
    """429 and 503 stay and say when to come back; what the client can't repeat as it is becomes 400."""
    retry = None if refusal.retry_after_ms is None else max(1, math.ceil(refusal.retry_after_ms / 1000))
    if isinstance(refusal, TooManyRequests):
        return ApiError(
            refusal.detail,
            code="rate_limit_exceeded",
            status=429,
            retry_after_s=retry or _DEFAULT_RETRY_S,
        )
    if isinstance(refusal, Unavailable):
        return ApiError(refusal.detail, code="unavailable", status=503, retry_after_s=retry or _DEFAULT_RETRY_S)
    return ApiError(refusal.detail, status=413 if refusal.status == 413 else 400)


class ClientGone(Exception):
    """The client closed its connection or stopped reading: nobody is there to be answered."""

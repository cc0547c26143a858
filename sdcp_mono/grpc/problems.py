"""Refusals over gRPC: a status code for whoever looks, and the refusal itself in the trailing metadata.

What isn't an answer of the peer's role (no connection, a deadline, a fault) is ``Unavailable``: nothing is known, and
the same request may be sent again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NoReturn

import grpc
from google.protobuf.message import DecodeError
from grpc import StatusCode

from sdcp_mono.core import problems
from sdcp_mono.core.messages import SessionState
from sdcp_mono.core.problems import Malformed, Refusal, StaleBase, TooLarge, Unavailable
from sdcp_mono.grpc.convert import from_pb, to_pb
from sdcp_mono.grpc.pb import sdcp_pb2 as pb

KEY: Final = "sdcp-problem-bin"
MAX_DETAIL: Final = 500  # characters: with its base64 and the state well below 8 KiB, the default limit of metadata
MAX_DETAILS: Final = 200  # of the status message, whose octets may become three each

CODES: Final[Mapping[type[Refusal], StatusCode]] = {
    Refusal: StatusCode.INVALID_ARGUMENT,
    problems.StaleEpoch: StatusCode.ABORTED,  # read the state, then try again higher up
    problems.StaleBase: StatusCode.ABORTED,
    problems.QUnavailable: StatusCode.FAILED_PRECONDITION,
    problems.BadContract: StatusCode.INVALID_ARGUMENT,
    problems.LimitExceeded: StatusCode.INVALID_ARGUMENT,
    problems.SessionClosed: StatusCode.FAILED_PRECONDITION,
    problems.BadProposal: StatusCode.INVALID_ARGUMENT,
    problems.NotAssigned: StatusCode.PERMISSION_DENIED,
    problems.Malformed: StatusCode.INVALID_ARGUMENT,
    problems.Forbidden: StatusCode.PERMISSION_DENIED,
    problems.UnknownSession: StatusCode.NOT_FOUND,
    problems.Conflict: StatusCode.ALREADY_EXISTS,
    problems.TooLarge: StatusCode.OUT_OF_RANGE,  # RESOURCE_EXHAUSTED is what libraries retry
    problems.Unprocessable: StatusCode.INVALID_ARGUMENT,
    problems.TooManyRequests: StatusCode.RESOURCE_EXHAUSTED,
    problems.Unavailable: StatusCode.UNAVAILABLE,
    problems.OverQuota: StatusCode.UNAVAILABLE,
}
_KINDS: Final = {kind.__name__: kind for kind in CODES}


async def abort(context: grpc.aio.ServicerContext[Any, Any], refusal: Refusal) -> NoReturn:
    """End a call with a refusal; one that only another package knows crosses as what it derives from."""
    kind = next(kind for kind in type(refusal).__mro__ if kind in CODES)
    problem = pb.Problem(kind=kind.__name__, detail=refusal.detail[:MAX_DETAIL], retry_after_ms=refusal.retry_after_ms)
    if isinstance(refusal, StaleBase):
        problem.state.CopyFrom(to_pb(refusal.state))
    trailing = ((KEY, problem.SerializeToString()),)
    await context.abort(CODES[kind], refusal.detail[:MAX_DETAILS], trailing)


def read(error: grpc.aio.AioRpcError, peer: str) -> Refusal:
    """The refusal behind a call to ``peer`` that failed."""
    body = dict(error.trailing_metadata() or ()).get(KEY)
    code, details = error.code(), (error.details() or "")[:MAX_DETAILS]
    if isinstance(body, bytes):
        try:
            return _refusal(pb.Problem.FromString(body))
        except (DecodeError, Malformed):
            return Unavailable(f"{peer}: {code.name}: its refusal can't be read: {details}")
    if code is StatusCode.RESOURCE_EXHAUSTED:
        if "larger than max" in details:  # said by the library on either side; nothing else tells it apart
            return TooLarge(f"{peer}: {details}")
        return Unavailable(f"{peer}: too many calls at once: {details}", retry_after_ms=1000)
    return Unavailable(f"{peer}: {code.name}: {details}")


def _refusal(problem: pb.Problem) -> Refusal:
    kind = _KINDS.get(problem.kind)
    if kind is None:
        return Unavailable(f"{problem.kind}: {problem.detail}")  # of a newer release
    if kind is StaleBase:
        return StaleBase(problem.detail, from_pb(SessionState, problem.state))
    retry_after_ms = problem.retry_after_ms if problem.HasField("retry_after_ms") else None
    return kind(problem.detail, retry_after_ms=retry_after_ms)

"""A round in flight at the verifier: what is verified, who waits for it, and where its tokens came from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from sdcp_mono.core.effects import Append, Ticket, Waiter
from sdcp_mono.core.messages import Assignment, Decline, Proposal
from sdcp_mono.core.ports import Origin, Scored, TokenInfo
from sdcp_mono.core.problems import Unavailable

MAX_WAITERS: Final = 64  # calls behind one round; a drafter has one outstanding proposal, so more is a retry storm
RETRY_AFTER_MS: Final = 250  # a few forward passes


class Waiting(Struct, frozen=True):
    """A call that waits for the round in flight."""

    waiter: Waiter
    call: Proposal | Decline | Assignment
    caller: str


class Flight(Struct):
    """The round that is being verified. ``proposal`` is None for a self-decoded round."""

    ticket: Ticket
    round: int
    proposal: Proposal | None
    identical: list[Waiter]
    behind: list[Waiting]
    pending: Append | None = None

    def join(self, waiter: Waiter, proposal: Proposal, caller: str) -> None:
        """A proposal for this round: an identical one gets the same answer (step 3), another waits (AMB-097)."""
        if self.proposal is not None and identical(self.proposal, proposal):
            _bounded(len(self.identical))
            self.identical.append(waiter)
        else:
            self.wait(Waiting(waiter, proposal, caller))

    def wait(self, waiting: Waiting) -> None:
        _bounded(len(self.behind))
        self.behind.append(waiting)

    def leave(self) -> list[Waiter]:
        """Everyone who waits, no longer waiting."""
        waiters = [*self.identical, *(waiting.waiter for waiting in self.behind)]
        self.identical.clear()
        self.behind.clear()
        return waiters


def identical(a: Proposal, b: Proposal) -> bool:
    """Same request (AMB-098): a retry carries a fresh status, everything that matters is equal."""
    return (a.epoch, a.round, a.drafter, a.base, a.base_digest, a.tokens, a.q_rows) == (
        b.epoch,
        b.round,
        b.drafter,
        b.base,
        b.base_digest,
        b.tokens,
        b.q_rows,
    )


def origins(
    tokens: tuple[int, ...],
    accepted: int,
    emitted: tuple[int, ...],
    rows: Sequence[Scored],
) -> tuple[TokenInfo, ...]:
    """Where each emitted token came from, with what the verifier knew about it."""
    extra: Origin = "self" if not tokens else "bonus" if accepted == len(tokens) else "correction"
    infos = []
    for i, _ in enumerate(emitted):
        row, taken = rows[i], i < accepted
        logprobs = row.logprobs
        infos.append(
            TokenInfo(
                origin="accepted" if taken else extra,
                p=row.p,
                q=row.q,
                logprob=None if logprobs is None else logprobs.proposed if taken else logprobs.extra,
                top=() if logprobs is None else logprobs.top,
            )
        )
    return tuple(infos)


def _bounded(waiting: int) -> None:
    if waiting >= MAX_WAITERS:
        raise Unavailable("too many calls wait for this round", retry_after_ms=RETRY_AFTER_MS)

"""The drafter role: one worker a session turns assignments into proposals (6.2).

The rules are in ``core/drafting.py``; this drafts, publishes rows, talks to the verifier and measures what a round
costs, so that M can be chosen by it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from msgspec import UNSET, Struct, UnsetType

from sdcp_mono.core import contract as contracts
from sdcp_mono.core.drafting import DraftSession, Next, check_assignment, supersedes
from sdcp_mono.core.messages import Assignment, Proposal, Role, Rule, SessionId, Status
from sdcp_mono.core.ports import Draft, DraftModel, DraftRequest, RouterPort, RowSource, VerifierPort
from sdcp_mono.core.problems import Refusal, Unavailable
from sdcp_mono.core.speculation import Acceptance, RoundCost, pace
from sdcp_mono.roles.batching import Batcher
from sdcp_mono.roles.verifier import STATUS_TTL_MS, TokenFetcher

log = logging.getLogger(__name__)

MAX_SESSIONS: Final = 1024  # assignments one drafter takes; the router then chooses another (AMB-087)
RETRY_SECONDS: Final = (0.02, 0.1, 0.5, 2.0)  # before a proposal is sent again; the last one repeats
NOMINAL: Final = RoundCost(base=1.0, per_token=0.03)  # of a verification pass, for sessions that must be reproducible
NOMINAL_DRAFT: Final = 0.3  # a drafting step in the same unit
PROBE_ROUNDS: Final = 16  # after so many rounds without drafting, look whether it pays by now


class Source(Struct):
    """One draft model as this drafter uses it; ``batcher`` None: quick enough for the event loop."""

    model: DraftModel
    batcher: Batcher[DraftRequest, Draft] | None
    seconds_per_token: float = 0.0


class Work(Struct):
    """One session at work: its rules, its worker, and what was learned about each source."""

    rules: DraftSession
    task: asyncio.Task[None] | None
    acceptance: dict[str, Acceptance]
    declined: int = 0
    rows_uri: str = ""  # of the proposal under way


class Drafter:
    """Implements ``DrafterPort``. ``sources`` are asked in order; the first that has something to propose is used."""

    def __init__(
        self,
        base: str,
        sources: list[Source],
        verifiers: Mapping[str, VerifierPort],
        rows: RowSource,
        router: RouterPort,
        tokens: TokenFetcher,
        *,
        m_fixed: int | None = None,
    ) -> None:
        assert sources
        self.base = base
        self._sources = sources
        self._verifiers = verifiers
        self._rows = rows
        self._router = router
        self._tokens = tokens
        self._m_fixed = m_fixed
        self._work: dict[SessionId, Work] = {}
        self._cost = RoundCost()
        self._ratio = Acceptance()
        self._status = self._make_status()
        self._reporter: asyncio.Task[None] | None = None

    # ---- life ------------------------------------------------------------------------------------

    def start(self) -> None:
        for source in self._sources:
            if source.batcher is not None:
                source.batcher.start()
        self._reporter = asyncio.get_running_loop().create_task(self._report())

    async def stop(self) -> None:
        tasks = [work.task for work in self._work.values() if work.task is not None]
        if self._reporter is not None:
            tasks.append(self._reporter)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for source in self._sources:
            if source.batcher is not None:
                await source.batcher.stop()

    @property
    def sessions(self) -> int:
        return len(self._work)

    def _make_status(self) -> Status:
        return Status(
            instance=self.base,
            role=int(Role.DRAFTER),
            load=min(100, 100 * len(self._work) // MAX_SESSIONS),
            queue=0,
            accept_milli=self._ratio.accept_milli,
            ttl_ms=STATUS_TTL_MS,
            base=self.base,
            models=tuple(source.model.identity for source in self._sources),
        )

    async def _report(self) -> None:
        while True:
            self._status = self._make_status()
            await self._router.status(self._status)
            await asyncio.sleep(STATUS_TTL_MS / 3000)

    # ---- DrafterPort -----------------------------------------------------------------------------

    async def assign(self, assignment: Assignment) -> None:
        # One role may draft with several models; the contract has to permit every one of them.
        for source in self._sources:
            check_assignment(assignment, self.base, source.model.identity, frozenset(self._verifiers))
        known = self._work.get(assignment.session)
        if known is not None:
            if not supersedes(assignment, known.rules.assignment):
                return  # AMB-086: a duplicate starts no second worker
            await self._drop(assignment.session)
        if len(self._work) >= MAX_SESSIONS:
            raise Unavailable("the drafter has as many sessions as it takes", retry_after_ms=1000)
        scope = None if assignment.contract.scope is UNSET else assignment.contract.scope
        prompt = (
            assignment.prompt if isinstance(assignment.prompt, tuple) else await self._tokens(assignment.prompt, scope)
        )
        work = Work(DraftSession(assignment, prompt), None, {})
        self._work[assignment.session] = work
        work.task = asyncio.get_running_loop().create_task(self._run(work))

    async def _drop(self, session: SessionId) -> None:
        work = self._work.pop(session, None)
        if work is not None and work.task is not None:
            work.task.cancel()
            await asyncio.gather(work.task, return_exceptions=True)

    # ---- one session -----------------------------------------------------------------------------

    async def _run(self, work: Work) -> None:
        rules, session = work.rules, work.rules.assignment.session
        try:
            step = Next.RESYNC if rules.behind else Next.DRAFT
            while step is not Next.STOP:
                try:
                    step = await self._advance(work, step)
                except Refusal as refusal:
                    step = rules.refusal(refusal)
                    if step is not Next.STOP and rules.refused > 1:
                        await self._pause(rules.refused)
                await self._settle(work)
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("a drafting session failed; the router will assign another drafter")
        finally:
            if self._work.get(session) is work:
                del self._work[session]
            rules.outstanding = None
            await self._settle(work)
            self._release(session)

    async def _advance(self, work: Work, step: Next) -> Next:
        rules = work.rules
        verifier = self._verifiers[rules.assignment.verifier]
        if step is Next.RESYNC:
            return rules.resynced(await verifier.output(rules.assignment.session, rules.resync_from, wait_ms=0))
        if step is Next.RETRY and rules.outstanding is not None:
            await self._pause(rules.refused)
            return rules.verdict(await verifier.propose(rules.outstanding, self.base))
        source, draft = await self._draft(work)
        if not draft.tokens:
            started = time.perf_counter()
            state = await verifier.decline(rules.decline(), self.base)
            self._cost = self._cost.after(0, time.perf_counter() - started)
            return rules.declined(state)
        return await self._propose(work, verifier, source, draft)

    async def _propose(self, work: Work, verifier: VerifierPort, source: Source, draft: Draft) -> Next:
        rules = work.rules
        scope = None if rules.assignment.contract.scope is UNSET else rules.assignment.contract.scope
        uri: str | UnsetType = UNSET
        if rules.rule is not Rule.GREEDY:
            uri = work.rows_uri = await self._rows.publish(draft.rows, scope)
        proposal = rules.propose(draft.tokens, uri, self._status)
        started = time.perf_counter()
        verdict = await verifier.propose(proposal, self.base)
        self._learn(work, source, proposal, verdict.accepted, time.perf_counter() - started)
        return rules.verdict(verdict)

    async def _settle(self, work: Work) -> None:
        """Rows stay leased until their round has its verdict, also across retries (6.2)."""
        if work.rows_uri and work.rules.outstanding is None:
            uri, work.rows_uri = work.rows_uri, ""
            await self._rows.release(uri)

    def _learn(self, work: Work, source: Source, proposal: Proposal, accepted: int, seconds: float) -> None:
        m = len(proposal.tokens)
        self._cost = self._cost.after(m, seconds)
        name = source.model.name
        work.acceptance[name] = work.acceptance.get(name, Acceptance()).after(accepted, m)
        self._ratio = self._ratio.after(accepted, m)

    async def _draft(self, work: Work) -> tuple[Source, Draft]:
        """The first source with something to propose; each gets the M that pays for it."""
        draft = Draft(())
        for source in self._sources:
            m = self._choose(work, source)
            if m == 0:
                continue
            request = self._request(work.rules, m)
            if source.batcher is None:
                (answer,) = source.model.draft([request])
                assert answer is not None
                draft = answer
            else:
                draft, _ = await source.batcher.submit(request)
                seconds = draft.seconds_per_token
                known = source.seconds_per_token
                source.seconds_per_token = seconds if not known else 0.9 * known + 0.1 * seconds
            if draft.tokens:
                work.declined = 0
                return source, draft
        work.declined += 1
        return self._sources[-1], draft

    def _request(self, rules: DraftSession, m: int) -> DraftRequest:
        return DraftRequest(
            session=rules.assignment.session,
            prefix=rules.prefix,
            length=len(rules.prefix),
            m=m,
            rule=rules.rule,
            sampling=rules.sampling,
            round=rules.round + 1,
        )

    def _choose(self, work: Work, source: Source) -> int:
        """M for this source (6.2), 0 where drafting costs more than it gains.

        A seeded session's output depends on where its rounds are cut, so there M follows from its own history alone,
        never from measured time.
        """
        rules = work.rules
        if self._m_fixed is not None:
            return min(self._m_fixed, rules.limit)
        alpha = work.acceptance.get(source.model.name, Acceptance()).alpha
        if contracts.sampling_of(rules.assignment.contract).seed is not UNSET:
            return max(1, pace(alpha, 0.0 if source.batcher is None else NOMINAL_DRAFT, NOMINAL, rules.limit))
        m = pace(alpha, source.seconds_per_token, self._cost, rules.limit)
        if m == 0 and work.declined >= PROBE_ROUNDS:
            work.declined = 0
            return 1
        return m

    async def _pause(self, tries: int) -> None:
        await asyncio.sleep(RETRY_SECONDS[min(tries, len(RETRY_SECONDS)) - 1] * random.uniform(0.5, 1.0))

    def _release(self, session: SessionId) -> None:
        for source in self._sources:
            if source.batcher is None:
                source.model.release(session)
            else:
                task: asyncio.Task[Any] = asyncio.get_running_loop().create_task(
                    source.batcher.call(partial(source.model.release, session))
                )
                task.add_done_callback(lambda done: done.cancelled() or done.exception())

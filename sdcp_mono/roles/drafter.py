"""The drafter role: one worker a session turns assignments into proposals (6.2).

The rules are in ``core/drafting.py``; this drafts, publishes rows, talks to the verifier and measures what a round
costs, so that M can be chosen by it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from itertools import chain
from itertools import repeat as repeated
from typing import Final

from msgspec import UNSET, Struct, UnsetType, field, structs

from sdcp_mono.core.drafting import DraftSession, Next, check_assignment, check_newer
from sdcp_mono.core.messages import Assignment, Proposal, Role, Rule, SessionId, SessionState, Status, Verdict
from sdcp_mono.core.ports import Draft, DraftModel, DraftRequest, RouterPort, RowSource, VerifierPort
from sdcp_mono.core.problems import BadProposal, QUnavailable, Refusal, Unavailable, UnknownSession
from sdcp_mono.core.routing import LEAVING_TTL_MS
from sdcp_mono.core.speculation import Acceptance, CostTable, Pace, pace
from sdcp_mono.core.traces import DraftPhases, ModelPass, Tracer, Untraced
from sdcp_mono.roles.batching import Batcher
from sdcp_mono.roles.restoring import Restorer
from sdcp_mono.roles.tasks import Tasks, repeat
from sdcp_mono.roles.verifier import STATUS_TTL_MS, TokenFetcher

log = logging.getLogger(__name__)

MAX_SESSIONS: Final = 1024  # assignments one drafter takes; the router then chooses another (AMB-087)
RETRY_SECONDS: Final = (0.02, 0.1, 0.5, 2.0)  # before a proposal is sent again; the last one repeats
ANSWER_SECONDS: Final = 60.0  # a round takes seconds at worst; then the answer is lost, and the proposal is sent again
MAX_FAULTS: Final = 3  # of one source in one session without a verdict between; then it is not asked again
SEEDED_M: Final = 4  # tokens a round of a session that must be reproducible; as many as before its first verdict
PROBE_ROUNDS: Final = 64  # after so many rounds without drafting, look whether this text can be drafted by now


Hold = Callable[[SessionId, int, Sequence[int], int], AbstractAsyncContextManager[None]]
"""``Residency.hold``, for a draft model that reads the target's KV."""


class Source(Struct):
    """One draft model as this drafter uses it; ``batcher`` None: quick enough for the event loop.

    ``hold`` keeps what the model reads of the target where it is; ``restore`` brings the model's own KV back.
    """

    model: DraftModel
    batcher: Batcher[DraftRequest, Draft] | None
    cost: CostTable = CostTable()  # of one drafting step by the sessions that share it
    hold: Hold | None = None
    restore: Restorer | None = None


class Work(Struct):
    """One session at work: its rules, its worker, and what was learned about each source."""

    rules: DraftSession
    task: asyncio.Task[None] | None
    acceptance: dict[str, Acceptance]
    faults: dict[str, int]  # by source, since its last verdict
    declined: int = 0
    may_decline: bool = True
    rows_uri: str = ""  # of the proposal under way
    source: str = ""  # that drafted it
    shadows: dict[str, tuple[int, ...]] = field(default_factory=dict)  # what instant sources would have proposed
    model: ModelPass | None = None  # that drafted it, if one was needed
    times: tuple[float, float] = (0.0, 0.0)  # when drafting it began and ended
    restored: set[str] = field(default_factory=set)  # sources that have looked for the prefix's KV below the device


class Drafter:
    """Implements ``DrafterPort``. ``sources``: the one that promises most drafts a round; in doubt the first."""

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
        verify_seconds: Callable[[int], float] | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        assert sources
        self.base = base
        self._sources = sources
        self._verifiers = verifiers
        self._rows = rows
        self._router = router
        self._tokens = tokens
        self._m_fixed = m_fixed
        self._tracer = tracer or Untraced()
        self._work: dict[SessionId, Work] = {}
        self._verify_seconds = verify_seconds  # of a pass by its rows, where the verifier is near enough to ask
        self._rounds = CostTable()  # otherwise measured: from proposal to verdict by M + 1
        self._ratio = Acceptance()
        self._draining = False
        self._status = self._make_status()
        self._tasks = Tasks()

    # ---- life ------------------------------------------------------------------------------------

    def start(self) -> None:
        for source in self._sources:
            if source.batcher is not None:
                source.batcher.start()
        self._tasks.start(repeat(STATUS_TTL_MS / 3000, self._report))

    async def stop(self) -> None:
        await self._tasks.stop()
        for source in self._sources:
            if source.batcher is not None:
                await source.batcher.stop()

    async def drain(self, seconds: float) -> None:
        """Take no new sessions and leave the present ones to others, within ``seconds``: reports expire at once."""
        self._draining = True
        deadline = time.monotonic() + seconds
        await self._report()  # even without sessions: nobody may be sent here any more
        while self._work and time.monotonic() < deadline:
            await asyncio.sleep(STATUS_TTL_MS / 30_000)
            await self._report()

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
            ttl_ms=LEAVING_TTL_MS if self._draining else STATUS_TTL_MS,
            base=self.base,
            models=tuple(source.model.identity for source in self._sources),
        )

    async def _report(self) -> None:
        self._status = self._make_status()
        await self._router.status(self._status)

    # ---- DrafterPort -----------------------------------------------------------------------------

    async def assign(self, assignment: Assignment) -> None:
        if self._draining:
            raise Unavailable("the drafter is about to stop", retry_after_ms=1000)
        # One role may draft with several models; the contract has to permit every one of them.
        for source in self._sources:
            check_assignment(assignment, self.base, source.model.identity, self._verifiers)
        prompt = assignment.prompt
        if not isinstance(prompt, tuple):
            prompt = await self._tokens(prompt, _scope(assignment))
        # From here on nothing is awaited: of two assignments for one session the later one wins, as a whole.
        known = self._work.get(assignment.session)
        if known is not None:
            check_newer(assignment, known.rules.assignment)
        elif len(self._work) >= MAX_SESSIONS:
            raise Unavailable("the drafter has as many sessions as it takes", retry_after_ms=1000)
        before = None if known is None else known.task
        if before is not None:
            before.cancel()
        work = self._work[assignment.session] = Work(DraftSession(assignment, prompt), None, {}, {})
        self._tracer.opened(assignment.session)
        work.task = self._tasks.start(self._run(work, before))

    # ---- one session -----------------------------------------------------------------------------

    async def _run(self, work: Work, before: asyncio.Task[None] | None) -> None:
        """Propose until the session is over here. ``before``: the worker this one replaces (AMB-086)."""
        rules, session = work.rules, work.rules.assignment.session
        self._tracer.follow(session)
        try:
            if before is not None:
                await asyncio.wait((before,))
            step = Next.RESYNC if rules.behind else Next.DRAFT
            while step is not Next.STOP:
                try:
                    step = await self._advance(work, step)
                except (Refusal, TimeoutError) as error:
                    lost = Unavailable(f"no answer within {ANSWER_SECONDS:.0f} s")
                    step = await self._refused(work, error if isinstance(error, Refusal) else lost)
                await self._settle(work)
        finally:
            if self._work.get(session) is work:
                del self._work[session]
                self._tracer.closed(session)
            self._release(session)
            rules.outstanding = None
            await self._settle(work)

    async def _refused(self, work: Work, refusal: Refusal) -> Next:
        lost = isinstance(refusal, QUnavailable) and work.rules.seeded  # the cache's doing: proposed again as it was
        if isinstance(refusal, BadProposal | QUnavailable) and not lost:
            self._fault(work, work.source)
        refused = work.rules.outstanding
        step = work.rules.refusal(refusal)
        if refused is not None and work.rules.outstanding is None:  # otherwise it is sent again
            self._trace(work, refused, problem=refusal.suffix or str(refusal.status))
        if step is Next.DECLINE and lost:
            step = Next.DRAFT
        if step is Next.RETRY or (step is not Next.STOP and work.rules.refused > 1):
            tries = min(work.rules.refused, len(RETRY_SECONDS))
            await asyncio.sleep(RETRY_SECONDS[tries - 1] * random.uniform(0.5, 1.0))
        return step

    async def _advance(self, work: Work, step: Next) -> Next:
        rules = work.rules
        verifier = self._verifiers[rules.assignment.verifier]
        proposal = rules.outstanding
        if step is Next.DRAFT:
            proposal = await self._prepare(work)
        started = time.perf_counter()
        async with asyncio.timeout(ANSWER_SECONDS):
            if step is Next.RESYNC:
                return rules.resynced(await verifier.output(rules.assignment.session, rules.resync_from, wait_ms=0))
            if proposal is None:
                state = await self._decline(work, verifier)
                self._rounds = self._rounds.after(1, time.perf_counter() - started)
                return rules.declined(state)
            verdict = await verifier.propose(proposal, self.base)
        if step is Next.DRAFT:  # how long a repeated one took says nothing
            self._rounds = self._rounds.after(len(proposal.tokens) + 1, time.perf_counter() - started)
        self._learn(work, len(proposal.tokens), verdict)
        self._trace(work, proposal, accepted=verdict.accepted)
        return rules.verdict(verdict)

    def _trace(self, work: Work, proposal: Proposal, *, accepted: int = 0, problem: str = "") -> None:
        (began, drafted), m = work.times, len(proposal.tokens)
        phases = DraftPhases(
            proposal.epoch, proposal.round, work.source, m, began, drafted, time.perf_counter(), work.model, accepted,
            problem,
        )  # fmt: skip
        self._tracer.draft(proposal.session, phases)

    async def _prepare(self, work: Work) -> Proposal | None:
        """Draft and publish the next proposal; None where there is nothing to propose, or no place for its rows."""
        rules, began = work.rules, time.perf_counter()
        work.model = None
        draft = await self._draft(work)
        if not draft.tokens:
            return None
        uri: str | UnsetType = UNSET
        if rules.rule is not Rule.GREEDY and (uri := await self._publish(work, draft)) is UNSET:
            return None
        work.times = (began, time.perf_counter())
        # For whoever looks at rounds: which source drafted this one (AMB-143: not an identity).
        return rules.propose(draft.tokens, uri, structs.replace(self._status, instance=work.source or self.base))

    async def _publish(self, work: Work, draft: Draft) -> str | UnsetType:
        """Put rows where the verifier finds them; without a place for them the round goes without a proposal.

        In a seeded session that would change the output, so it waits: without the cache nothing is committed anyway.
        """
        for delay in chain(RETRY_SECONDS, repeated(RETRY_SECONDS[-1])):
            try:
                uri = work.rows_uri = await self._rows.publish(draft.rows, _scope(work.rules.assignment))
                return uri
            except Unavailable as refusal:
                log.warning("draft rows could not be published: %s", refusal.detail)
                if not work.rules.seeded:
                    break
            await asyncio.sleep(delay)
        return UNSET

    async def _settle(self, work: Work) -> None:
        """Rows stay leased until their round has its verdict, also across retries (6.2)."""
        if work.rows_uri and work.rules.outstanding is None:
            uri, work.rows_uri = work.rows_uri, ""
            await self._rows.release(uri)

    def _learn(self, work: Work, m: int, verdict: Verdict) -> None:
        accepted = min(verdict.accepted, m)
        work.acceptance[work.source] = work.acceptance.get(work.source, Acceptance()).after(accepted, m)
        work.faults.pop(work.source, None)
        self._ratio = self._ratio.after(accepted, m)
        for name, tokens in work.shadows.items():
            judged = tuple(zip(tokens, verdict.emitted, strict=False))
            right = next((i for i, (a, b) in enumerate(judged) if a != b), len(judged))
            if judged:
                work.acceptance[name] = work.acceptance.get(name, Acceptance()).after(right, len(judged))

    def _fault(self, work: Work, source: str) -> None:
        work.faults[source] = work.faults.get(source, 0) + 1

    async def _draft(self, work: Work) -> Draft:
        """The draft that promises the most committed tokens per second.

        An instant source is asked whatever it promises: its draft costs nothing, and comparing it with what is
        committed keeps its estimate true while others are used. A source that fails has nothing to propose: no drafter
        may stop a session (SDCP-002).
        """
        offers: list[tuple[float, Source, int, Draft | None]] = []
        work.shadows.clear()
        if work.rules.seeded:
            return await self._reproducible(work)
        for source in self._sources:
            plan = self._pace(work, source)
            draft = await self._try(work, source, plan.m) if source.batcher is None else None
            if draft is not None and draft.tokens:
                work.shadows[source.model.name] = draft.tokens
            if plan.m and (draft is None or draft.tokens):
                offers.append((plan.rate, source, plan.m, draft))
        for _, source, m, ready in sorted(offers, key=lambda offer: -offer[0]):
            draft = ready or await self._try(work, source, m)
            if draft.tokens:
                work.source, work.declined = source.model.name, 0
                work.shadows.pop(work.source, None)
                return draft
        return self._nothing(work)

    async def _reproducible(self, work: Work) -> Draft:
        """The draft of a seeded session: the first source that has any, always of the same length.

        Its output depends on where its rounds are cut and on what was proposed. So both follow from the committed
        prefix alone, never from measured times or from what this process remembers of earlier rounds: after a failover
        another drafter proposes the same.
        """
        m = min(self._m_fixed or SEEDED_M, work.rules.limit)
        for source in self._sources:
            draft = await self._try(work, source, m)
            if draft.tokens:
                work.source = source.model.name
                return draft
        return self._nothing(work)

    def _nothing(self, work: Work) -> Draft:
        work.declined += 1
        work.source = ""
        # A verifier that doesn't know ``decline`` gets the shortest proposal there is instead.
        return Draft(()) if work.may_decline or work.rules.rule is not Rule.GREEDY else Draft((work.rules.prefix[-1],))

    async def _decline(self, work: Work, verifier: VerifierPort) -> SessionState:
        try:
            return await verifier.decline(work.rules.decline(), self.base)
        except UnknownSession as unknown:  # 404: the resource or the session, which the next proposal will tell
            work.may_decline = False
            raise Unavailable("the verifier doesn't know decline") from unknown

    async def _try(self, work: Work, source: Source, m: int) -> Draft:
        name = source.model.name
        if not m or work.faults.get(name, 0) >= MAX_FAULTS:
            return Draft(())
        request = self._request(work.rules, m)
        if source.restore is not None and name not in work.restored:
            work.restored.add(name)
            await source.restore(request.session, tuple(request.prefix), request.scope)
        try:
            draft, made = await self._ask(source, request)
        except Exception:
            log.exception("drafter %s failed", name)
            self._fault(work, name)
            return Draft(())
        work.model = made or work.model
        return draft

    async def _ask(self, source: Source, request: DraftRequest) -> tuple[Draft, ModelPass | None]:
        asked, made = time.perf_counter(), None
        if source.batcher is None:
            (answer,) = source.model.draft([request])
            draft = Draft(()) if answer is None else answer
        else:
            end = request.length + request.m
            hold = source.hold(request.session, end, request.prefix, request.length) if source.hold else nullcontext()
            async with hold:
                draft, cost = await source.batcher.submit(request)
            made = ModelPass(asked, time.perf_counter(), cost.seconds, cost.rows, cost.requests)
            if draft.seconds_per_token:
                source.cost = source.cost.after(cost.requests, draft.seconds_per_token)
        if len(draft.tokens) > request.m:
            raise ValueError(f"{len(draft.tokens)} tokens, at most {request.m} were asked for")
        return draft, made

    def _request(self, rules: DraftSession, m: int) -> DraftRequest:
        return DraftRequest(
            session=rules.assignment.session,
            prefix=rules.prefix,
            length=len(rules.prefix),
            m=m,
            rule=rules.rule,
            sampling=rules.sampling,
            round=rules.round + 1,
            scope=_scope(rules.assignment),
        )

    def _pace(self, work: Work, source: Source) -> Pace:
        """M for this source (6.2) and what it promises; M = 0 where drafting costs more than it gains."""
        rules = work.rules
        alpha = work.acceptance.get(source.model.name, Acceptance()).alpha
        draft_seconds = 0.0 if source.batcher is None else source.cost.seconds(len(self._work))
        plan = pace(alpha, draft_seconds, self._round_seconds, rules.limit)
        if self._m_fixed is not None:
            return Pace(min(self._m_fixed, rules.limit), plan.rate)
        if plan.m == 0 and (not work.may_decline or source.batcher is None or work.declined >= PROBE_ROUNDS):
            work.declined = 0
            return Pace(1, plan.rate)
        return plan

    def _round_seconds(self, m: int) -> float:
        """What a round of M takes if all sessions here do the same: then they share drafting steps and passes."""
        if self._verify_seconds is not None:
            return self._verify_seconds(len(self._work) * (m + 1))
        return self._rounds.seconds(m + 1)

    def _release(self, session: SessionId) -> None:
        for source in self._sources:
            if source.batcher is None:
                source.model.release(session)
            else:
                done = source.batcher.call(partial(source.model.release, session))
                done.add_done_callback(lambda done: done.cancelled() or done.exception())


def _scope(assignment: Assignment) -> bytes | None:
    return None if assignment.contract.scope is UNSET else assignment.contract.scope

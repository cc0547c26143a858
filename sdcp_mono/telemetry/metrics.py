"""Prometheus metrics of the roles, under the names of design section 7 and section 8 of the draft.

All series exist from the start, labels come from closed sets, and nothing here knows a request: so the number of
series can't grow with traffic.
"""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from sdcp_mono.core.messages import Action, SessionId
from sdcp_mono.core.ports import PassCost, RoundInfo

SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
LENGTHS: Final = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
POSITIONS: Final = 64  # m_max of the draft: the most positions a proposal can have
PROBLEMS: Final = (
    "sdcp-stale-epoch", "sdcp-stale-base", "sdcp-q-unavailable", "sdcp-bad-contract", "sdcp-limit",
    "sdcp-session-closed", "sdcp-bad-proposal", "sdcp-not-assigned", "other",
)  # fmt: skip


class RoleMetrics:
    """Implements ``Observer``. ``models`` are the names that ``passed`` will report; ``m_max`` bounds the positions."""

    def __init__(self, registry: CollectorRegistry, models: tuple[str, ...], m_max: int) -> None:
        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"sdcp_{name}", text, labels, registry=registry)

        self._drafts = counter("spec_decode_num_drafts", "Rounds with a proposal.")
        self._drafted = counter("spec_decode_num_draft_tokens", "Proposed tokens.")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Proposed tokens that were committed.")
        self._per_position = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Committed proposed tokens by position.", ("position",)
        )
        self._positions = [self._per_position.labels(str(i)) for i in range(min(m_max, POSITIONS))]
        self._committed = counter("committed_tokens", "Committed tokens.")
        self._self_decoded = counter("self_decoded_tokens", "Tokens the verifier decoded without a proposal.")
        actions = counter("actions", "Verdicts by action (6.5.2).", ("action",))
        self._actions = {action: actions.labels(action.name.lower()) for action in Action}
        rejections = counter("rejections", "Refused calls by problem type (section 7).", ("problem",))
        self._rejections = {problem: rejections.labels(problem) for problem in PROBLEMS}
        self._length = Histogram(
            "sdcp_round_draft_length", "M, the tokens of a proposal.", buckets=LENGTHS, registry=registry
        )
        self._accepted_length = Histogram(
            "sdcp_round_accepted_length", "Committed proposed tokens of a round.", buckets=LENGTHS, registry=registry
        )
        phases = Histogram(
            "sdcp_round_phase_seconds", "Time of a round's phases.", ("phase",), buckets=SECONDS, registry=registry
        )
        self._wait, self._verify, self._commit = (phases.labels(phase) for phase in ("wait", "verify", "commit"))
        seconds = Histogram(
            "sdcp_model_pass_seconds", "Time of one model pass.", ("model",), buckets=SECONDS, registry=registry
        )
        rows = counter("model_rows", "Rows that a model has computed.", ("model",))
        self._passes = {model: (seconds.labels(model), rows.labels(model)) for model in models}
        self._active = Gauge("sdcp_sessions_active", "Sessions that have not ended.", registry=registry)
        self._queue = Gauge("sdcp_verifier_queue", "Rounds that wait for a model pass.", registry=registry)

    def round(self, session: SessionId, info: RoundInfo) -> None:
        committed = len(info.emitted)
        self._committed.inc(committed)
        self._wait.observe(info.wait_seconds)
        self._verify.observe(info.verify_seconds)
        self._commit.observe(info.commit_seconds)
        if not info.proposed:
            self._self_decoded.inc(committed)
            return
        kept = min(info.accepted, committed)  # AMB-105: what truncation removed doesn't count
        self._drafts.inc()
        self._drafted.inc(len(info.proposed))
        self._accepted.inc(kept)
        for position in self._positions[:kept]:
            position.inc()
        self._length.observe(len(info.proposed))
        self._accepted_length.observe(kept)
        self._actions[Action(info.action)].inc()

    def rejected(self, problem: str) -> None:
        self._rejections.get(problem, self._rejections["other"]).inc()

    def passed(self, model: str, cost: PassCost) -> None:
        seconds, rows = self._passes[model]
        seconds.observe(cost.seconds)
        rows.inc(cost.rows)

    def sessions(self, active: int, waiting: int) -> None:
        self._active.set(active)
        self._queue.set(waiting)

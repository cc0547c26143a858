"""``metrics.speculative_decoding``: what drafting did for one response (design, section 7)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from sdcp_mono.core.ports import RoundInfo


class SpeculationTally:
    """Counts the rounds that had a proposal; self-decoded rounds are not speculative steps."""

    def __init__(self) -> None:
        self._steps_by_accepted: Counter[int] = Counter()
        self._proposed = 0
        self._last_round = -1

    def add(self, rounds: Iterable[RoundInfo]) -> None:
        """Count each round once, also if a chunk that begins inside a round repeats it."""
        for info in rounds:
            if info.round > self._last_round:
                self._last_round = info.round
                if info.proposed:
                    self._steps_by_accepted[info.accepted] += 1
                    self._proposed += len(info.proposed)

    def merge(self, other: SpeculationTally) -> None:
        self._steps_by_accepted.update(other._steps_by_accepted)
        self._proposed += other._proposed

    def summary(self) -> dict[str, Any]:
        """Index j of the histogram: steps that accepted j draft tokens. Ratios of nothing are 0.

        ``mean_acceptance_length`` counts the additional token of each step too, as vLLM does: 1 + accepted / steps.
        """
        steps = self._steps_by_accepted.total()
        accepted = sum(j * count for j, count in self._steps_by_accepted.items())
        return {
            "mean_acceptance_length": 1 + accepted / steps if steps else 0.0,
            "draft_acceptance_rate": accepted / self._proposed if self._proposed else 0.0,
            "acceptance_histogram": [
                self._steps_by_accepted[j] for j in range(max(self._steps_by_accepted, default=-1) + 1)
            ],
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": self._proposed,
        }

"""What a pass costs on this machine, measured once after loading: the start of the tables that M is chosen by."""

from __future__ import annotations

import time
from typing import Final

from sdcp_mono.core.messages import Rule, Sampling
from sdcp_mono.core.ports import DraftModel, DraftRequest, ScoreRequest, TargetModel
from sdcp_mono.core.speculation import CostTable

ROWS: Final = (1, 2, 4, 8, 16, 32, 64)  # 64 + 1 rows are the longest proposal; all together a few one-row passes' time
SESSIONS: Final = (1, 2, 4, 8, 16)
PREFIX: Final = 32  # tokens: long enough to attend to something
TRIES: Final = 5  # the quickest counts: others page memory in, or meet a neighbour


def pass_costs(target: TargetModel) -> CostTable:
    """Seconds of a verification pass by its rows; empty where the model has no room for the measurement."""
    session, prefix = b"calibration".ljust(16), list(range(1, PREFIX + 1))
    table = CostTable()
    if not _fits(target.card.vocab_size, target.card.context) or not target.admit(session, PREFIX + ROWS[-1]):
        return table
    for rows in ROWS:
        tokens = tuple(i % target.card.vocab_size for i in range(rows - 1))
        request = ScoreRequest(session, prefix, PREFIX, tokens, Rule.GREEDY, Sampling())
        best = float("inf")
        for _ in range(TRIES):
            started = time.perf_counter()
            target.step([request])
            best = min(best, time.perf_counter() - started)
        table = table.after(rows, best)
    target.release(session)
    return table


def drafting_costs(model: DraftModel, target: TargetModel) -> CostTable:
    """Seconds of one drafting step by the sessions that share it. The target holds the sessions: KV may be shared."""
    table = CostTable()
    if not _fits(model.vocab_size, target.card.context):
        return table
    sessions = [b"calibration".ljust(15) + bytes([i]) for i in range(SESSIONS[-1])]
    prefixes = [list(range(1 + i, PREFIX + 1 + i)) for i in range(SESSIONS[-1])]
    for session, prefix in zip(sessions, prefixes, strict=True):
        if target.admit(session, PREFIX + ROWS[-1]):
            target.step([ScoreRequest(session, prefix, PREFIX, (), Rule.GREEDY, Sampling())])
    for count in SESSIONS:
        best = float("inf")
        for round_ in range(TRIES):
            asked = [
                DraftRequest(session, prefix, PREFIX, 3, Rule.GREEDY, Sampling(), round_ + 1)
                for session, prefix in zip(sessions[:count], prefixes, strict=False)
            ]
            drafts = model.draft(asked)
            costs = [draft.seconds_per_token for draft in drafts if draft is not None and draft.tokens]
            if len(costs) == count:
                best = min([best, *costs])
        if best < float("inf"):
            table = table.after(count, best)
    for session in sessions:
        model.release(session)
        target.release(session)
    return table


def _fits(vocab_size: int, context: int) -> bool:
    return vocab_size > PREFIX + SESSIONS[-1] and context >= PREFIX + ROWS[-1]

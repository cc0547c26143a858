"""Traces of roles that are processes of their own: each writes a file, together they are one tree."""

from __future__ import annotations

import importlib.util
import signal
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sdcp_mono.telemetry.trace_files import Session, read

WAIT_SECONDS = 60  # far above what an export takes
CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"  # the example of W3C Trace Context


def _processes() -> Any:
    """Tests can't import each other by name."""
    spec = importlib.util.spec_from_file_location("traced_processes", Path(__file__).with_name("test_processes.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


processes = _processes()


cluster = processes.cluster


def sessions_when(folder: Path, cluster: Any, complete: Callable[[list[Session]], Any]) -> list[Session]:
    """What the files tell, once they tell it all; the newest session first."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        found = [session for session in read([folder]).newest_first() if session.root is not None]
        if complete(found):
            return found
        assert time.monotonic() < deadline, [len(session.spans) for session in found]
        cluster.instances()  # takes its time


def last_token(session: Session) -> int:
    """How far the rounds go that are there."""
    facts = session.rounds[-1].span.attributes if session.rounds else {"sdcp.base": 0, "sdcp.emitted": 0}
    return int(facts["sdcp.base"] + facts["sdcp.emitted"])


def drafted(session: Session) -> list[Any]:
    return [one for one in session.rounds if one.span.attributes.get("sdcp.m")]


def test_a_round_is_one_tree_over_four_processes_and_a_failover_is_part_of_it(cluster: Any, tmp_path: Path) -> None:
    opener = urllib.request.build_opener()
    opener.addheaders = [("traceparent", CLIENT)]
    urllib.request.install_opener(opener)
    try:
        assert [t for part in cluster.stream([10, 11, 12], 60) for t in part] == processes.expected(60)
    finally:
        urllib.request.install_opener(urllib.request.build_opener())

    def whole(found: list[Session]) -> bool:
        """Each process writes when it comes to it: rounds come by and by, drafts perhaps later."""
        if not found or sum(one.span.attributes["sdcp.emitted"] for one in found[0].rounds) < 60:
            return False
        committed = all(one.child("sdcp.verify") and one.child("sdcp.commit") for one in found[0].rounds)
        return committed and all(one.child("sdcp.draft") for one in drafted(found[0]))

    (session,) = sessions_when(tmp_path, cluster, whole)
    assert session.root is not None
    assert (session.trace_id.hex(), session.root.parent_id.hex()) == (CLIENT[3:35], CLIENT[36:52])
    assert session.root.service == "sdcp-router"
    assert sum(one.span.attributes["sdcp.emitted"] for one in session.rounds) == 60
    assert drafted(session)
    for one in session.rounds:
        made = {child.name: child.service for child in one.children}
        drafting = {"sdcp.draft": "sdcp-drafter"} if one.span.attributes["sdcp.m"] else {}
        assert made == {"sdcp.verify": "sdcp-verifier", "sdcp.commit": "sdcp-verifier", **drafting}
        assert one.span.parent_id == session.root.span_id
        assert one.span.service == "sdcp-verifier"
    of_rounds = sum(len(one.children) + 1 for one in session.rounds)
    assert len(session.spans) == 1 + of_rounds  # nothing hangs elsewhere

    # The verifier dies: the router fences it and opens the session at the other one, in the same tree.
    seen: list[int] = []
    victim = ""
    for part in cluster.stream([10, 11, 12], 400):
        seen += part
        if not victim and len(seen) >= 20:
            victim = next(name for name in ("verifier", "verifier-b") if cluster.sessions_at(name))
            cluster.processes[victim].send_signal(signal.SIGKILL)
    assert seen == processes.expected(400)
    moved = sessions_when(tmp_path, cluster, lambda found: len(found) == 2 and last_token(found[0]) == 400)[0]
    assert moved.root is not None
    told = [(event.name, event.attributes) for event in moved.root.events]
    (lost,) = [facts for name, facts in told if name == "sdcp.failover" and facts["sdcp.role"] == "verifier"]
    assert (lost["sdcp.lost"], lost["sdcp.epoch"]) == (cluster.bases[victim], 2)
    opened = [(facts["sdcp.epoch"], facts["sdcp.verifier"]) for name, facts in told if name == "sdcp.opened"]
    survivor = "verifier-b" if victim == "verifier" else "verifier"
    assert opened == [(1, cluster.bases[victim]), (2, cluster.bases[survivor])]
    second = [one for one in moved.rounds if one.epoch == 2]
    assert second
    assert {one.span.parent_id for one in second} == {moved.root.span_id}
    assert {span.trace_id for span in moved.spans} == {moved.trace_id}

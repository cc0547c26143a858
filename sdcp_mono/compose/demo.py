"""``sdcp-mono split-demo``: a small cluster of processes to look at, to talk to, and to kill roles of."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from sdcp_mono.compose.cluster import POLL_SECONDS, Cluster
from sdcp_mono.compose.models import Progress
from sdcp_mono.models.source import resolve
from sdcp_mono.settings import Settings

CURL: Final = (
    "curl {url}/chat/completions -H 'content-type: application/json' \\\n"
    """    -d '{{"model": "default", "messages": [{{"role": "user", "content": "What is a hash table?"}}], """
    """"temperature": 0}}'"""
)
QUICK: Final = {"SDCP_DRAIN_SECONDS": "2", "SDCP_KV_MEMORY_MB": "256", "SDCP_KV_HOST_MB": "128"}
"""Six processes share one machine, and nobody waits long for a demo to end."""

Show = Callable[[str], None]


def run(settings: Settings, progress: Progress, show: Show) -> None:
    """Start the cluster, keep it up until told to stop, and leave no process behind.

    A role that dies is started again, as a supervisor would. One that doesn't come up ends the demo with ``RoleDied``.
    """
    model = resolve(settings.model, settings.data_dir, progress, dtype=settings.dtype)
    own = {**QUICK, "SDCP_MODEL": str(model.path), "SDCP_DTYPE": settings.dtype}
    cluster = Cluster((settings.data_dir / "split-demo").absolute(), own, port=settings.port)
    with told_to_stop():
        try:
            cluster.start()
            cluster.wait()
            show(description(cluster))
            while True:
                for member in cluster.ended():
                    show(f"{member.name} died; it is started again")
                    cluster.start(member.name)
                    cluster.wait(member.name)
                    show(f"{member.name} is back, process {member.pid}")
                time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:
            show("stopping")
        finally:
            cluster.stop()


def description(cluster: Cluster) -> str:
    """Who runs where, and what to try."""
    lines = [f"{'role':11} {'process':>8}  {'base URI':45} health"]
    lines += [f"{m.name:11} {m.pid:8}  {m.base:45} {m.url}/health" for m in cluster.members.values()]
    lines += [
        "",
        f"Logs: {cluster.folder / 'logs'}",
        "Kill any role (kill -9 PROCESS) while it answers. Ctrl-C ends all.",
    ]
    lines += [CURL.format(url=cluster.url), "", f"sdcp-mono split-demo answers at {cluster.url}"]
    return "\n".join(lines)


@contextmanager
def told_to_stop() -> Iterator[None]:
    """SIGTERM is Ctrl-C in here, so that children end with us."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

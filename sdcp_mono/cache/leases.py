"""Leases: who keeps which object, and until when (design, section 5, point 3; AMB-092, AMB-093).

Law of this module: a lease ends when it is given up, or when its time has passed on the store's monotonic clock; the
second is *forced* and counted under its holder. Whatever its end, ``ended`` of the lease is called once.
"""

from __future__ import annotations

import itertools
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from sdcp_mono.core.ports import Lease
from sdcp_mono.core.problems import TooManyRequests, Unprocessable

MAX_LEASES: Final = 64  # per object: its readers, and the retries of their lost answers
MAX_TTL_MS: Final = 24 * 3600 * 1000  # a day; what must last longer belongs in a durable tier
MAX_HOLDERS: Final = 64  # counted by name: more than a deployment has roles; the rest are one entry
RETRY_MS: Final = 1000  # leases and TTLs take seconds to pass
OTHERS: Final = "others"


@dataclass(slots=True)
class _Live:
    expires: float  # seconds on the store's clock
    holder: str
    ended: Callable[[], None] | None


class Leases:
    """The live leases of one store, by the URI of their object. ``clock`` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._objects: OrderedDict[str, dict[str, _Live]] = OrderedDict()  # in the order of the next inspection
        self.forced: Counter[str] = Counter()  # by holder

    def __len__(self) -> int:
        return sum(map(len, self._objects.values()))

    def deadline(self, ttl_ms: int) -> float:
        """On the store's clock; raises ``Unprocessable`` for a TTL that can't be."""
        if not 0 < ttl_ms <= MAX_TTL_MS:
            raise Unprocessable(f"ttl_ms must be from 1 to {MAX_TTL_MS}, not {ttl_ms}")
        return self._clock() + ttl_ms / 1000

    def grant(self, uri: str, ttl_ms: int, holder: str = "", ended: Callable[[], None] | None = None) -> Lease:
        """Raises ``TooManyRequests`` at 64 live leases; ``ended`` isn't called then."""
        expires = self.deadline(ttl_ms)
        if self.live(uri) and len(self._objects[uri]) >= MAX_LEASES:
            raise TooManyRequests(f"the object has {MAX_LEASES} leases already", retry_after_ms=RETRY_MS)
        lease_id = secrets.token_hex(16)
        self._objects.setdefault(uri, {})[lease_id] = _Live(expires, holder.partition(" ")[0] or "local", ended)
        return Lease(lease_id, int(expires * 1000))

    def renew(self, uri: str, lease_id: str, ttl_ms: int) -> Lease | None:
        """Let a live lease end ``ttl_ms`` from now; None if it has run out or was given up."""
        expires = self.deadline(ttl_ms)
        if not self.live(uri) or (lease := self._objects[uri].get(lease_id)) is None:
            return None
        lease.expires = expires
        return Lease(lease_id, int(expires * 1000))

    def give_up(self, uri: str, lease_id: str) -> bool:
        """False if there is no such lease any more."""
        if not self.live(uri) or lease_id not in self._objects[uri]:
            return False
        self._end(uri, lease_id)
        return True

    def live(self, uri: str) -> bool:
        """Whether anybody holds the object now; what has run out ends here."""
        now = self._clock()
        for lease_id, lease in list(self._objects.get(uri, {}).items()):
            if lease.expires <= now:
                known = lease.holder in self.forced or len(self.forced) < MAX_HOLDERS
                self.forced[lease.holder if known else OTHERS] += 1
                self._end(uri, lease_id)
        return uri in self._objects

    def sweep(self, count: int) -> None:
        """Look at the ``count`` objects that were not looked at for longest."""
        for uri in list(itertools.islice(self._objects, count)):
            if self.live(uri):
                self._objects.move_to_end(uri)

    def _end(self, uri: str, lease_id: str) -> None:
        lease = self._objects[uri].pop(lease_id)
        if not self._objects[uri]:
            del self._objects[uri]
        if lease.ended is not None:
            lease.ended()

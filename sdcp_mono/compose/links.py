"""Whom a role of a split meets: its certificate, who may call it, and connections that come and go with instances."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Final, TypeVar
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry

from sdcp_mono import certs
from sdcp_mono.compose.tracing import CALLS
from sdcp_mono.core.names import Bases
from sdcp_mono.core.ports import DrafterPort, RouterPort, VerifierPort
from sdcp_mono.grpc.cache_client import CommitLogClient, ObjectStoreClient
from sdcp_mono.grpc.channel import CLOSE_SECONDS, Channel, label_of
from sdcp_mono.grpc.client import DrafterClient, RouterClient, VerifierClient
from sdcp_mono.grpc.server import GrpcServer, Service, serve_grpc
from sdcp_mono.grpc.tls import Pems
from sdcp_mono.http_gateway.identity import Access
from sdcp_mono.http_gateway.server import Resources, serve_gateway
from sdcp_mono.roles.routers import EveryRouter
from sdcp_mono.roles.tasks import Tasks, repeat
from sdcp_mono.settings import CacheSettings, LinkSettings
from sdcp_mono.telemetry.certificates import CertificateMetrics

log = logging.getLogger(__name__)
P = TypeVar("P")

CONNECTIONS: Final = 512  # half of the 1,024 open files that a process usually may have; each connection is one
IDLE_SECONDS: Final = 600.0  # without a call: longer than any call takes, and than an instance takes to restart
LOOK_SECONDS: Final = 5.0  # between two looks at DNS: as long as cluster DNS keeps an answer
ROUTERS: Final = 64  # of a pool: each gets a report a second from every instance

Resolve = Callable[[str], Awaitable[Iterable[str]]]
"""The IP addresses of a host name; raises ``OSError`` where there are none."""


async def addresses(host: str) -> list[str]:
    """Every A and AAAA record, as the system resolves it."""
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class Members(Collection[str]):
    """The base URIs that are known now: those listed by name, and the members of pools that DNS tells of.

    The pool of ``https://*.router.ns.svc:9443/`` is the headless service ``router.ns.svc``; the instance at 10.1.2.3 is
    ``https://10-1-2-3.router.ns.svc:9443/``.
    """

    def __init__(self, bases: Bases, listed: Sequence[str], resolve: Resolve = addresses) -> None:
        self._named = tuple(base for base in listed if base in bases.named)
        self._found: dict[str, tuple[str, ...]] = dict.fromkeys(sorted(bases.pools), ())
        self._lost: set[str] = set()
        self._resolve = resolve

    async def look(self) -> None:
        """Ask for every pool; while DNS doesn't answer, what it said last is true."""
        for pool in self._found:
            host = str(urlsplit(pool).hostname)
            try:
                labels = sorted({label_of(address) for address in await self._resolve(host)})
            except OSError as error:
                if pool not in self._lost:  # once, not every few seconds
                    log.warning("no routers are found at %s: %s", host, error)
                self._lost.add(pool)
                continue
            if len(labels) > ROUTERS:
                log.warning("%s has %d addresses; the first %d are used", host, len(labels), ROUTERS)
            self._lost.discard(pool)
            self._found[pool] = tuple(pool.replace("://", f"://{label}.") for label in labels[:ROUTERS])

    def __iter__(self) -> Iterator[str]:
        yield from self._named
        for found in self._found.values():
            yield from found

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, base: object) -> bool:
        return any(base == known for known in self)


class Clients(Mapping[str, P]):
    """A port for every instance that is admitted, made when it is asked for; iteration goes over those ``known``."""

    def __init__(self, admitted: Bases, make: Callable[[str], P], known: Collection[str] = ()) -> None:
        self._admitted = admitted
        self._make = make
        self._known = known

    def __contains__(self, base: object) -> bool:
        return base in self._admitted

    def __getitem__(self, base: str) -> P:
        if base not in self._admitted:
            raise KeyError(base)
        return self._make(base)

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


class Channels:
    """One connection to each peer, opened at its first call and closed when there are no more calls or too many peers.

    That an instance is gone is not known for sure, and it may come back: a connection that is not used is closed.
    """

    def __init__(
        self, pems: Pems, instance: str, *, most: int = CONNECTIONS, idle_seconds: float = IDLE_SECONDS
    ) -> None:
        self._pems = pems
        self._instance = instance
        self._most = most
        self._idle_seconds = idle_seconds
        self._open: OrderedDict[str, tuple[Channel, float]] = (
            OrderedDict()
        )  # and when it was last asked for, oldest first
        self._closing = Tasks()

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, base: str) -> bool:
        return base in self._open

    def to(self, base: str) -> Channel:
        now = time.monotonic()
        channel, _ = self._open.pop(base, (None, now))
        channel = channel or self.make(base)
        self._open[base] = channel, now
        while len(self._open) > 1:
            oldest, (old, used) = next(iter(self._open.items()))
            if len(self._open) <= self._most and now - used <= self._idle_seconds:
                break
            del self._open[oldest]
            self._closing.start(old.close(CLOSE_SECONDS))
        return channel

    def make(self, base: str) -> Channel:
        """One that is not counted here; whoever asked for it closes it."""
        return Channel(urlsplit(base).netloc, self._pems, instance=self._instance, tracing=CALLS)

    async def close(self) -> None:
        await self._closing.stop()
        for channel, _ in self._open.values():
            await channel.close()
        self._open.clear()


class Links:
    """Who a role is and whom it meets: certificates, allow lists, and one connection to each peer."""

    def __init__(
        self, settings: LinkSettings, role: str, stack: AsyncExitStack, registry: CollectorRegistry,
        resolve: Resolve = addresses,
    ) -> None:  # fmt: skip
        directory = settings.tls_dir or settings.data_dir / "certs"
        self._files = files = certs.files(directory, settings.tls_name or role)
        if not files.key.exists():
            raise ValueError(f"tls_dir: {files.key} is missing; make it with: sdcp-mono certs init {directory}")
        self.settings = settings
        self.stack = stack
        self._resolve = resolve
        self._pems = Pems(files)
        CertificateMetrics(registry, lambda: (self._pems.current().days_left, self._pems.failures))
        own = (settings.base,)
        self.access = Access.of(
            routers=settings.routers + (own if role == "router" else ()),
            verifiers=settings.verifiers + (own if role == "verifier" else ()),
            drafters=settings.drafters + (own if role == "drafter" else ()),
        )
        self.channels = Channels(self._pems, settings.base)
        stack.push_async_callback(self.channels.close)

    def verifiers(self) -> Mapping[str, VerifierPort]:
        return Clients(Bases.of(self.settings.verifiers), lambda base: VerifierClient(self.channels.to(base)))

    def drafters(self) -> Mapping[str, DrafterPort]:
        return Clients(Bases.of(self.settings.drafters), lambda base: DrafterClient(self.channels.to(base)))

    def routers(self) -> RouterPort:
        """All routers as one, those that DNS tells of included."""
        listed = self.settings.routers
        if not listed:
            raise ValueError("routers: at least one base URI or https://*.HOST:PORT/, to report to")
        bases = Bases.of(listed)
        members = Members(bases, listed, self._resolve)
        every = EveryRouter(None, Clients(bases, lambda base: RouterClient(self.channels.to(base)), members))
        self.stack.push_async_callback(every.stop)
        if bases.pools:
            looking = Tasks()
            looking.start(repeat(LOOK_SECONDS, members.look))
            self.stack.push_async_callback(looking.stop)
        return every

    def objects(self) -> ObjectStoreClient:
        return ObjectStoreClient(self._cache())

    def log(self) -> CommitLogClient:
        return CommitLogClient(self._cache())

    def _cache(self) -> Channel:
        if not self.settings.cache:
            raise ValueError("cache: the base URI of the cache, where commit logs and draft rows live")
        made = self.channels.make(self.settings.cache)  # always needed, so never closed for want of calls
        self.stack.push_async_callback(made.close)
        return made

    async def serve_http(self, resources: Resources, settings: CacheSettings) -> None:
        """The same under the path of our base URI, over HTTP/2 with mutual TLS."""
        name = settings.http_tls_name
        await self.stack.enter_async_context(
            serve_gateway(
                host=settings.http_host, port=settings.http_port, access=self.access, roles={settings.base: resources},
                files=certs.files(self._files.key.parent, name) if name else self._files,
            )
        )  # fmt: skip

    async def serve(self, services: Sequence[Service]) -> GrpcServer:
        """Answer the other roles until the stack is left."""
        listen = self.settings.listen or urlsplit(self.settings.base).netloc
        host, _, port = listen.rpartition(":")
        return await self.stack.enter_async_context(
            serve_grpc(
                host=host.strip("[]"), port=int(port), files=self._pems, access=self.access, services=services,
                tracing=CALLS,
            )
        )  # fmt: skip

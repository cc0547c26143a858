"""The resources of drafter and router (Table 1)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from msgspec import UNSET, structs
from starlette.responses import Response

from sdcp_mono.core.messages import Assignment, Event, Role, SessionId, Status
from sdcp_mono.core.ports import DrafterPort, RouterPort
from sdcp_mono.core.problems import Forbidden, Malformed
from sdcp_mono.http_gateway.exchange import Call, empty
from sdcp_mono.http_gateway.identity import normalise, normalised
from sdcp_mono.http_gateway.server import Resources

NAMES: Final = 4096  # instance names remembered with their owners; the router knows no more instances anyway


class DrafterResources:
    def __init__(self, port: DrafterPort) -> None:
        self._port = port

    @property
    def resources(self) -> Resources:
        return {"/assignments": {"POST": self.assign}}

    async def assign(self, call: Call) -> Response:
        call.gate.access.router(call.caller)
        await self._port.assign(normalised(await call.message(Assignment, call.gate.limits.prompt_body)))
        return empty()


class RouterResources:
    """An instance reports its own status only: its certificate is its base URI, whatever name it goes by (AMB-047).

    ``verifier_of`` names the verifier that a session is open at; nobody else tells what happens there.
    """

    def __init__(self, port: RouterPort, verifier_of: Callable[[SessionId], str | None] = lambda session: None) -> None:
        self._port = port
        self._verifier_of = verifier_of
        self._owners: OrderedDict[str, str] = OrderedDict()  # name -> identity that reported it first

    @property
    def resources(self) -> Resources:
        return {"/instances/{id:path}/status": {"PUT": self.status}, "/events": {"POST": self.event}}

    async def status(self, call: Call) -> Response:
        access, caller = call.gate.access, call.caller
        is_verifier, is_drafter = caller.uri in access.verifiers, access.drafts(caller)
        if not (is_verifier or is_drafter):
            raise Forbidden("only a drafter or a verifier reports its status")
        name = call.path["id"]
        if self._owner(call, name) != caller.uri:
            raise Forbidden("an instance reports its own status only")
        status = await call.message(Status)
        if status.instance != name:
            raise Malformed("instance: the path names another instance")
        if not (is_drafter if status.role == Role.DRAFTER else is_verifier):
            raise Forbidden("role: not this certificate's role")  # AMB-048
        if status.base is not UNSET and normalise(status.base) != caller.uri:
            raise Forbidden("base: not this certificate's identity")
        self._owners[name] = caller.uri
        self._owners.move_to_end(name)
        if len(self._owners) > NAMES:
            self._owners.popitem(last=False)
        await self._port.status(structs.replace(status, base=caller.uri))
        return empty()

    def _owner(self, call: Call, name: str) -> str:
        """Whose name this is: by its own form as a URI, by configuration, by who had it first, else the caller's."""
        if "://" in name:
            return normalise(name)
        return call.gate.access.instances.get(name) or self._owners.get(name, call.caller.uri)

    async def event(self, call: Call) -> Response:
        call.gate.access.verifier(call.caller)
        event = await call.message(Event)
        if self._verifier_of(event.session) not in (None, call.caller.uri):
            raise Forbidden("session: open at another verifier")
        await self._port.event(event)
        return empty()

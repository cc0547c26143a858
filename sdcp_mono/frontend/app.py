"""The OpenAI-compatible API as an ASGI application.

One HTTP request becomes one ``Plan``; each of its choices is one generation of the ``Serving`` port. The status of a
stream is decided by its first delta, so whatever is wrong before that is an HTTP error and not an event in a 200.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import structs
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from sdcp_mono.core.ports import GenerateRequest, ModelCard, Serving
from sdcp_mono.core.problems import Refusal
from sdcp_mono.frontend.boundary import OTHER, Boundary, RequestMetrics, set_model
from sdcp_mono.frontend.choices import Choice, Delta
from sdcp_mono.frontend.errors import ApiError, ClientGone, from_refusal
from sdcp_mono.frontend.generation import all_or_none, play, while_connected
from sdcp_mono.frontend.plan import Plan, Planner
from sdcp_mono.frontend.requests import CommonRequest, parse_chat, parse_completion
from sdcp_mono.frontend.responses import ChatReply, CompletionReply, Reply, event
from sdcp_mono.frontend.resuming import Place, event_id, parse_event_id, resumed
from sdcp_mono.frontend.settings import FrontendSettings
from sdcp_mono.frontend.streaming import EventStream
from sdcp_mono.frontend.tokenizer import Tokenizer, TokenizerThreads

logger = logging.getLogger("sdcp_mono.frontend")

R = TypeVar("R", bound=CommonRequest)
CacheReport = Callable[[bool], Awaitable[dict[str, Any]]]
"""Plain data about the cache; True: check the logs too."""


def create_app(
    serving: Serving,
    tokenizer: Tokenizer,
    settings: FrontendSettings,
    metrics: RequestMetrics,
) -> FrontEnd:
    """The application for a model that is loaded."""
    app = FrontEnd(settings, metrics)
    app.attach(serving, tokenizer)
    return app


class FrontEnd(Starlette):
    """The application. Before ``attach`` it answers: not ready, 503 to whoever asks for tokens."""

    def __init__(self, settings: FrontendSettings, metrics: RequestMetrics) -> None:
        self.settings = settings
        self._metrics = metrics
        self._created = int(time.time())
        self._threads = TokenizerThreads(settings.tokenizer_threads, settings.tokenizer_queue)
        self._serving: Serving | None = None
        self._planner: Planner | None = None
        self._cache: CacheReport | None = None
        completion = Generating(self, parse_completion, Planner.completion, CompletionReply)
        chat = Generating(self, parse_chat, Planner.chat, ChatReply)
        super().__init__(
            routes=[
                Route("/v1/completions", completion, methods=["POST"]),
                Route("/v1/chat/completions", chat, methods=["POST"]),
                Route("/v1/models", self._list_models),
                Route("/v1/models/{model:path}", self._show_model),
                Route("/health", self._health),
                Route("/health/live", self._live),
                Route("/cache", self._show_cache),
                Route("/metrics", self._show_metrics),
            ],
            exception_handlers={ApiError: _api_error, HTTPException: _http_error, Exception: _internal_error},
            lifespan=_lifespan,
        )
        self._boundary = Boundary(super().__call__, metrics, settings.write_timeout_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._boundary(scope, receive, send)

    def attach(self, serving: Serving, tokenizer: Tokenizer, cache: CacheReport | None = None) -> None:
        """The model is loaded: be ready. ``cache`` tells what the tiers and the log hold, for ``cache stat``."""
        self._serving = serving
        self._cache = cache
        self._planner = Planner(serving.card, tokenizer, self._threads, self.settings)

    def close(self) -> None:
        self._threads.close()

    def backend(self, model: str | None, scope: Scope) -> tuple[Serving, Planner]:
        """What answers for ``model``, None if the request names none; 503 while loading, 404 for any other name."""
        if self._serving is None or self._planner is None:
            raise ApiError("the model is being loaded", code="unavailable", status=503, retry_after_s=1)
        names = self._model_names(self._serving.card)
        known = model is None or model in names
        set_model(scope, names[0] if known else OTHER)
        if model is not None and not known:
            shown = model if len(model) <= 64 else model[:64] + "…"
            raise ApiError(
                f"the model {shown!r} does not exist",
                param="model",
                code="model_not_found",
                status=404,
            )
        return self._serving, self._planner

    def _model_names(self, card: ModelCard) -> tuple[str, ...]:
        return (card.name, *self.settings.model_aliases)

    def _model(self, name: str, card: ModelCard) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "sdcp-mono",
            "max_model_len": card.context,
        }

    async def _list_models(self, _: Request) -> Response:
        card = None if self._serving is None else self._serving.card
        data = [] if card is None else [self._model(name, card) for name in self._model_names(card)]
        return _json({"object": "list", "data": data})

    async def _show_model(self, request: Request) -> Response:
        name = request.path_params["model"]
        serving, _ = self.backend(name, request.scope)
        return _json(self._model(name, serving.card))

    async def _health(self, _: Request) -> Response:
        """Readiness, and what the roles are doing: 503 until the model is loaded."""
        if self._serving is None:
            return _json({"status": "loading", "ready": False}, 503)
        return _json({**self._serving.stats(), "status": "ok", "ready": True, "model": self._serving.card.name})

    async def _live(self, _: Request) -> Response:
        """Liveness: the event loop answers."""
        return _json({"status": "ok"})

    async def _show_cache(self, request: Request) -> Response:
        """Tiers, objects and logs as they are now; ``?check=1`` also reads every log to its end."""
        if self._cache is None:
            return _json({"status": "loading" if self._serving is None else "there is no cache here"}, 503)
        return _json(await self._cache(request.query_params.get("check") == "1"))

    async def _show_metrics(self, _: Request) -> Response:
        text, content_type = self._metrics.exposition()
        return Response(text, headers={"content-type": content_type})


class Generating(Generic[R]):
    """The endpoint that generates: parse, plan, admit, then a whole response or a stream."""

    def __init__(
        self,
        front: FrontEnd,
        parse: Callable[[bytes], R],
        plan: Callable[[Planner, R], Coroutine[Any, Any, Plan]],
        reply: type[Reply],
    ) -> None:
        self._front = front
        self._parse = parse
        self._plan = plan
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = EventStream(send)
        try:
            body = self._parse(await _read_body(Request(scope, receive), self._front.settings))
            last_id = Request(scope).headers.get("last-event-id", "")
            answer = await while_connected(receive, self._answer(body, last_id, scope, stream))
            if answer is not None:
                await answer(scope, receive, send)
        except (ClientGone, ClientDisconnect):
            return
        except ApiError as error:
            await stream.fail(error, scope, receive)
        except Refusal as refusal:
            await stream.fail(from_refusal(refusal), scope, receive)
        except Exception:
            # Answered here, not by Starlette, which would raise it on to the server and so close the connection.
            logger.exception("a request ended with an internal error")
            await stream.fail(_INTERNAL_ERROR, scope, receive)

    async def _answer(self, body: R, last_id: str, scope: Scope, stream: EventStream) -> Response | None:
        """The whole response, or None if it was streamed; what comes after ``last_id`` where the client has one."""
        serving, planner = self._front.backend(body.model, scope)
        plan = await self._plan(planner, body)
        plan = replace(plan, requests=tuple(self._traced(request, scope) for request in plan.requests))
        places: list[Place | None] = [None] * len(plan.requests)
        if last_id and plan.stream:
            places = parse_event_id(last_id, len(places))
            plan = replace(plan, requests=tuple(map(resumed, plan.requests, places)))
        reply = self._reply(plan, serving.card.name, planner.tokenizer)
        choices = [
            Choice(planner.tokenizer.incremental(), request.stop, plan.stops, place)
            for request, place in zip(plan.requests, places, strict=True)
        ]
        shown = _Streamed(reply, plan, choices, stream) if plan.stream else _Collected(choices)
        await all_or_none(
            play(serving, request, index, choice, shown.show)
            for index, (request, choice) in enumerate(zip(plan.requests, choices, strict=True))
        )
        if isinstance(shown, _Collected):
            return _json(reply.whole(choices, shown.results()))
        await shown.end()
        return None

    def _traced(self, request: GenerateRequest, scope: Scope) -> GenerateRequest:
        """With the client's trace, and under the name that traces have for this endpoint."""
        operation = "chat" if self._reply is ChatReply else "text_completion"
        trace = Request(scope).headers.get("traceparent", "")
        return structs.replace(request, operation=operation, trace=trace)


class _Collected:
    """Keeps the deltas of each choice for one whole response."""

    def __init__(self, choices: list[Choice]) -> None:
        self._deltas: list[list[Delta]] = [[] for _ in choices]

    async def show(self, index: int, delta: Delta) -> None:
        self._deltas[index].append(delta)

    def results(self) -> list[Delta]:
        return [
            Delta(
                "".join(delta.text for delta in deltas),
                tuple(token for delta in deltas for token in delta.tokens),
                deltas[-1].finish,
            )
            for deltas in self._deltas
        ]


class _Streamed:
    """Writes each delta as one event; the last chunk of all carries the metrics."""

    def __init__(self, reply: Reply, plan: Plan, choices: list[Choice], stream: EventStream) -> None:
        self._reply = reply
        self._plan = plan
        self._choices = choices
        self._stream = stream
        stream.open_with(b"".join(map(event, reply.opening())))

    async def show(self, index: int, delta: Delta) -> None:
        if delta.finish == "error" and not self._stream.started:
            return  # it becomes an HTTP error
        chunk = self._reply.chunk(index, delta)
        if not self._plan.include_usage and all(choice.finished for choice in self._choices):
            chunk |= self._reply.metrics(self._choices)
        await self._stream.write(event(chunk, event_id([choice.place for choice in self._choices])))

    async def end(self) -> None:
        last = b""
        if self._plan.include_usage:
            last = event(self._reply.usage_chunk(self._choices) | self._reply.metrics(self._choices))
        await self._stream.end(last)


async def _read_body(request: Request, settings: FrontendSettings) -> bytes:
    """At most ``max_body_bytes``; a body that is declared larger isn't read at all."""
    media_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise ApiError("the body must be sent as Content-Type: application/json", status=415)
    limit = settings.max_body_bytes
    too_large = ApiError(f"the body is larger than {limit} bytes", code="body_too_large", status=413)
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    raise too_large
    except TimeoutError:
        raise ApiError(f"the body did not arrive within {settings.body_timeout_s:g} s", status=408) from None
    return bytes(body)


_INTERNAL_ERROR = ApiError("internal error", code="internal_error", status=500)


def _json(data: dict[str, Any], status: int = 200) -> Response:
    return Response(msgspec.json.encode(data), status, media_type="application/json")


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _http_error(_: Request, error: Exception) -> Response:
    """Starlette's own: no such path, wrong method."""
    assert isinstance(error, HTTPException)
    response = ApiError(error.detail, status=error.status_code).response()
    response.headers.update(error.headers or {})
    return response


async def _internal_error(_: Request, __: Exception) -> Response:
    return _INTERNAL_ERROR.response()


@asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    assert isinstance(app, FrontEnd)
    try:
        yield
    finally:
        app.close()

"""A client as the README describes one: it reads a stream, and comes back with ``Last-Event-ID`` when it breaks off."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

GIVE_UP_SECONDS = 90.0  # far above what any failover takes
RETRY_SECONDS = 0.1
AGAIN = (429, 500, 502, 503, 504)  # what a client comes back after


class Stream(threading.Thread):
    """One streamed completion. ``tokens`` by choice; ``epochs`` and ``logs`` by choice, from the event ids."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._url = urlsplit(f"{url}/completions")
        self._body = json.dumps({**body, "stream": True, "return_token_ids": True}).encode()
        self._news = threading.Condition()
        self.tokens: dict[int, list[int]] = {i: [] for i in range(body.get("n", 1))}
        self.arrivals: list[tuple[float, int]] = []  # when tokens came, and the highest epoch then
        self.logs: list[tuple[str, str, int]] = []  # session, log and epoch of each choice, by the last event
        self.last_id = ""
        self.reconnected = 0
        self.broken = ""  # why it was, the last time
        self.error = ""
        self.done = False

    def run(self) -> None:
        deadline = time.monotonic() + GIVE_UP_SECONDS
        while not self.done and not self.error:
            try:
                self._read(deadline)
            except (OSError, http.client.HTTPException) as broken:
                self.broken = f"{type(broken).__name__}: {broken}"
                if time.monotonic() > deadline:
                    self.error = f"no answer: {self.broken}"
            if not self.done and not self.error:
                self.reconnected += 1
                time.sleep(RETRY_SECONDS)
        with self._news:
            self._news.notify_all()

    def wait_for(self, condition: Callable[[], Any], seconds: float) -> bool:
        """Until the condition holds or the stream is over."""
        with self._news:
            return self._news.wait_for(lambda: condition() or self.done or self.error, seconds)

    def _read(self, deadline: float) -> None:
        left = max(1.0, deadline - time.monotonic())
        connection = http.client.HTTPConnection(self._url.hostname or "", self._url.port, timeout=left)
        headers = {"content-type": "application/json"}
        if self.last_id:
            headers["last-event-id"] = self.last_id
        try:
            connection.request("POST", self._url.path, self._body, headers)
            answer = connection.getresponse()
            if answer.status != 200:
                told = answer.read().decode(errors="replace")
                self.broken = f"HTTP {answer.status}: {told[:300]}"
                if answer.status not in AGAIN or time.monotonic() > deadline:
                    self.error = self.broken
                return
            event: dict[str, str] = {}
            for line in answer:
                name, _, value = line.decode().rstrip("\n").partition(": ")
                if name:
                    event[name] = value
                    continue
                self._event(event)  # an event is there when its blank line is
                event = {}
        finally:
            connection.close()

    def _event(self, event: dict[str, str]) -> None:
        data = event.get("data", "")
        if data == "[DONE]":
            self.done = True
            return
        if not data:
            return
        chunk = json.loads(data)
        with self._news:
            if "error" in chunk:
                self.error = json.dumps(chunk["error"])
            for choice in chunk.get("choices", ()):
                self.tokens[choice["index"]] += choice["token_ids"]
            if event.get("id"):
                self.last_id = event["id"]
                places = [part.split(".") for part in self.last_id.split(",") if part != "-"]
                self.logs = [(place[0], place[1], int(place[2])) for place in places]
            if any(choice["token_ids"] for choice in chunk.get("choices", ())):
                self.arrivals.append((time.monotonic(), max((epoch for *_, epoch in self.logs), default=1)))
            self._news.notify_all()

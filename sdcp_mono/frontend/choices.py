"""One choice of a response: committed chunks in, text and the tokens that belong to it out. Pure.

Text, token ids, log-probabilities and usage end at the same token: the one that completes a stop string, the stop
token, or the last one. A stop token is counted and listed but has no text. A token is released together with its text,
so nothing of a stop string shows early by another door.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from sdcp_mono.core.messages import Action
from sdcp_mono.core.ports import Chunk, TokenInfo
from sdcp_mono.frontend.resuming import Place
from sdcp_mono.frontend.speculation import SpeculationTally
from sdcp_mono.frontend.stops import StopFinder
from sdcp_mono.frontend.tokenizer import TextDecoder

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True, slots=True)
class OutToken:
    """A token of the response; its text is ``[start, end)`` of the choice's text, empty inside a character."""

    id: int
    start: int
    end: int
    info: TokenInfo | None


@dataclass(frozen=True, slots=True)
class Delta:
    """What one chunk adds to a choice. ``finish`` is set exactly once, in the last one; ``error`` goes with it."""

    text: str
    tokens: tuple[OutToken, ...]
    finish: FinishReason | None = None
    error: str = ""


class Choice:
    """Assembles one choice; ``stop_ids`` end it without text, ``stops`` are stop strings.

    ``place`` says how much of it the reader has. Assembled from its start, it shows what comes after that place.
    """

    def __init__(
        self, decoder: TextDecoder, stop_ids: Collection[int], stops: tuple[str, ...], place: Place | None = None
    ) -> None:
        self._decoder = decoder
        self._stop_ids = frozenset(stop_ids)
        self._stops = StopFinder(stops)
        self._decoded = 0  # characters
        self._waiting: list[OutToken] = []
        self.place = place
        self._known_tokens = 0 if place is None else place.tokens
        self._known_characters = 0 if place is None else place.characters
        self._characters = 0  # of the text that was shown, or is known
        self.speculation = SpeculationTally()
        self.completion_tokens = 0
        self.finished = False

    def feed(self, chunk: Chunk) -> Delta | None:
        """Take the next chunk; None if it shows nothing yet."""
        assert not self.finished
        self.speculation.add(chunk.rounds)
        text, finish = self._take_tokens(chunk)
        if finish is None and chunk.final:
            finish = "error" if chunk.finish == Action.FAIL else "length"
        if finish is not None:
            text += self._take_text(self._decoder.flush()) + self._stops.finish()
            if self._stops.match_end is not None and finish != "error":
                finish = "stop"
        if finish is None and not text:
            return None
        self.finished = finish is not None
        tokens = self._release_tokens()
        before, self._characters = self._characters, self._characters + len(text)
        text = text[max(self._known_characters - before, 0) :]
        tokens = tokens[max(self._known_tokens - (self.completion_tokens - len(tokens)), 0) :]
        if finish is None and not text and not tokens:
            return None  # the reader has it
        self._moved(chunk.epoch)
        return Delta(text, tokens, finish, chunk.error if finish == "error" else "")

    def begins(self, session: bytes, log: str) -> None:
        """It is read from this session from now on."""
        self.place = Place(session, log, 0, self._known_tokens, self._known_characters)

    def _moved(self, epoch: int) -> None:
        if self.place is not None:
            self.place = replace(
                self.place,
                epoch=epoch,
                tokens=max(self.completion_tokens, self._known_tokens),
                characters=max(self._characters, self._known_characters),
            )

    def _take_tokens(self, chunk: Chunk) -> tuple[str, FinishReason | None]:
        infos: list[TokenInfo | None] = [info for one in chunk.rounds for info in one.tokens]
        missing = len(chunk.tokens) - len(infos)
        infos = [*[None] * missing, *infos] if missing > 0 else infos[-missing:]  # they end together
        text = ""
        for token, info in zip(chunk.tokens, infos, strict=True):
            start = self._decoded
            ends = token in self._stop_ids
            if not ends:
                text += self._take_text(self._decoder.push((token,)))
            self._waiting.append(OutToken(token, start, self._decoded, info))
            if ends or self._stops.match_end is not None:
                return text, "stop"
        return text, None

    def _take_text(self, text: str) -> str:
        self._decoded += len(text)
        return self._stops.push(text)

    def _release_tokens(self) -> tuple[OutToken, ...]:
        """The tokens whose text is out; at the end all, up to the one that completes the stop string."""
        count = len(self._waiting)
        match_end = self._stops.match_end
        if match_end is not None:
            count = next((i + 1 for i, token in enumerate(self._waiting) if token.end >= match_end), count)
        elif not self.finished:
            count = next((i for i, token in enumerate(self._waiting) if token.end > self._stops.released), count)
        released, self._waiting = tuple(self._waiting[:count]), self._waiting[count:]
        self.completion_tokens += len(released)
        return released

"""Stop strings in a growing text. Pure.

The match with the smallest start position wins; of two that start together the shorter, since the text is the same.
The answer depends on the text alone, never on how it was cut into pieces, so speculative rounds, plain decoding and
streaming all end at the same place. Text is held back only while it could still become (part of) a match.
"""

from __future__ import annotations


class StopFinder:
    """Feed text with ``push``, release what comes back; ``match_end`` is set once a stop string is found."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.released = 0
        """Characters released so far: the position in the text where the held text begins."""
        self.match_end: int | None = None
        """Position in the text just behind the stop string, once one is found; nothing is released after that."""

    def push(self, text: str) -> str:
        """Take more text; answers the text that is now certain to precede every stop string."""
        if self.match_end is not None:
            return ""
        if not self._stops:
            self.released += len(text)
            return text
        self._held += text
        found = self._earliest()
        pending = self._earliest_pending(len(self._held) if found is None else found[0])
        if found is not None and pending is None:
            return self._cut(*found)
        return self._release(len(self._held) if pending is None else pending)

    def finish(self) -> str:
        """The text is complete: what could have become a stop string didn't. Answers the rest."""
        if self.match_end is not None:
            return ""
        found = self._earliest()
        return self._release(len(self._held)) if found is None else self._cut(*found)

    def _earliest(self) -> tuple[int, int] | None:
        """Start and length of the first complete match in the held text."""
        starts = ((self._held.find(stop), len(stop)) for stop in self._stops)
        return min((match for match in starts if match[0] >= 0), default=None)

    def _earliest_pending(self, limit: int) -> int | None:
        """The first position before ``limit`` from which the held text is the beginning of a stop string."""
        size = len(self._held)
        candidates = (
            start
            for stop in self._stops
            if (
                start := next(
                    (i for i in range(max(0, size - len(stop) + 1), limit) if stop.startswith(self._held[i:])),
                    None,
                )
            )
            is not None
        )
        return min(candidates, default=None)

    def _cut(self, start: int, length: int) -> str:
        text = self._release(start)
        self.match_end = self.released + length
        self._held = ""
        return text

    def _release(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        self.released += count
        return text

"""What the front end needs from a tokenizer, and turning text into ids beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

from sdcp_mono.frontend.errors import ApiError

T = TypeVar("T")

ChatMessage = Mapping[str, str]  # exactly "role" and "content"

# A text is probed in a prefix of this many characters per token of context before it is encoded whole, so that
# refusing megabytes costs milliseconds; English has 4 to 5 characters a token, so real prompts are counted exactly.
_PROBE_CHARS_PER_TOKEN = 32
# A prefix can end inside a word and so have a few tokens more than the whole text has up to there.
_PROBE_SLACK = 16


class TextDecoder(Protocol):
    """Ids in, text out, never part of a character."""

    def push(self, ids: Sequence[int], /) -> str: ...
    def flush(self) -> str: ...


class Tokenizer(Protocol):
    """Thread-safe: ``encode`` and ``apply_chat`` run on several threads, the rest on the event loop."""

    @property
    def eos_ids(self) -> Collection[int]: ...

    def encode(self, text: str, /) -> Sequence[int]: ...
    def decode(self, ids: Sequence[int], /) -> str: ...
    def apply_chat(self, messages: Sequence[ChatMessage], /) -> Sequence[int]:
        """The chat template's ids, up to where the assistant speaks; ValueError if it refuses the messages."""

    def incremental(self) -> TextDecoder: ...


class PromptTooLong(Exception):
    """More than ``at_least`` - 1 tokens; the text wasn't read further."""

    def __init__(self, at_least: int) -> None:
        super().__init__(f"at least {at_least} tokens")
        self.at_least = at_least


def refuse_hopeless(tokenizer: Tokenizer, text: str, context: int) -> None:
    """Raise ``PromptTooLong`` for a text that can't fit ``context`` tokens, having read no more of it than needed.

    Prefixes grow by 4, so a text that does fit is read at most 1 1/3 times more.
    """
    size = _PROBE_CHARS_PER_TOKEN * context
    while size < len(text):
        count = len(tokenizer.encode(text[:size])) - _PROBE_SLACK
        if count > context:
            raise PromptTooLong(count)
        size *= 4


def encode_text(tokenizer: Tokenizer, text: str, context: int) -> tuple[int, ...]:
    refuse_hopeless(tokenizer, text, context)
    return tuple(tokenizer.encode(text))


def encode_chat(tokenizer: Tokenizer, messages: Sequence[ChatMessage], context: int) -> tuple[int, ...]:
    refuse_hopeless(tokenizer, "\n".join(message["content"] for message in messages), context)
    return tuple(tokenizer.apply_chat(messages))


class TokenizerThreads:
    """A few threads with a bounded queue; more work than that is 429, never an unbounded backlog."""

    def __init__(self, threads: int, queue: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenizer")
        self._limit = threads + queue
        self._pending = 0

    async def run(self, work: Callable[[], T]) -> T:
        if self._pending >= self._limit:
            raise ApiError(
                "too many prompts are waiting to be tokenized",
                code="rate_limit_exceeded",
                status=429,
                retry_after_s=1,
            )
        self._pending += 1
        loop = asyncio.get_running_loop()
        future = self._pool.submit(work)
        # Counted down when the work ends, not when the waiter goes: an abandoned job still holds its thread.
        future.add_done_callback(lambda done: self._ended(loop, done))
        return await asyncio.wrap_future(future)

    def _ended(self, loop: asyncio.AbstractEventLoop, _: Future[T]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._count_down)

    def _count_down(self) -> None:
        self._pending -= 1

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

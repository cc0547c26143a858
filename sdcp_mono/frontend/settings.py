"""Limits and defaults of the front end, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendSettings:
    """Sizes in bytes, times in seconds, counts otherwise."""

    max_body_bytes: int = 4 * 2**20
    """Largest request body: 4 MiB hold far more text than any supported context; more is 413 while it is read."""

    body_timeout_s: float = 30.0
    """A body that isn't complete by then is 408: a slow sender may not hold a connection for ever."""

    write_timeout_s: float = 30.0
    """One write that can't proceed for so long means that the client stopped reading: it is cut off."""

    max_choices: int = 128
    """Prompts times ``n`` in one request, as OpenAI's limit on ``n``: each one is a session of its own."""

    default_chat_tokens: int = 1024
    """``max_tokens`` of a chat request that names none, if the context has that much room: runaway output ends."""

    tokenizer_threads: int = 2
    """Threads that turn text into ids, beside the event loop: a long prompt doesn't hold up a short one."""

    tokenizer_queue: int = 64
    """Requests waiting for those threads; one more is 429. Each holds at most one body."""

    model_aliases: tuple[str, ...] = ("default",)
    """Names that the model answers to besides its own."""

"""Response bodies and stream events in OpenAI's shapes, with two additions.

``metrics.speculative_decoding`` (see ``speculation.py``) is in every whole response and in the last chunk of a stream;
``token_ids`` is in every choice if ``return_token_ids`` asked for it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from sdcp_mono.core.ports import TokenLogprob
from sdcp_mono.frontend.choices import Choice, Delta, OutToken
from sdcp_mono.frontend.plan import Plan
from sdcp_mono.frontend.speculation import SpeculationTally
from sdcp_mono.frontend.tokenizer import Tokenizer

DONE: Final = b"data: [DONE]\n\n"

_LOGPROB_FLOOR = -9999.0  # JSON has no -Infinity; OpenAI's value for "never"


def event(data: dict[str, Any], event_id: str = "") -> bytes:
    """One server-sent event; JSON has no raw line breaks, so one line is enough."""
    head = f"id: {event_id}\n".encode() if event_id else b""
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


class Reply:
    """The frame that both endpoints share; a subclass says what a choice looks like."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, plan: Plan, model: str, tokenizer: Tokenizer) -> None:
        self._plan = plan
        self._tokenizer = tokenizer
        self._wants_logprobs = plan.requests[0].top_logprobs >= 0
        self._head = {"id": self.id_prefix + uuid.uuid4().hex, "created": int(time.time()), "model": model}

    def opening(self) -> list[dict[str, Any]]:
        """Chunks that precede all others."""
        return []

    def chunk(self, index: int, delta: Delta) -> dict[str, Any]:
        return self._chunk([self._entry(index, self._stream_text(delta), delta)])

    def usage_chunk(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return self._chunk([]) | {"usage": self._usage(choices)}

    def whole(self, choices: Sequence[Choice], results: Sequence[Delta]) -> dict[str, Any]:
        entries = [self._entry(index, self._whole_text(result), result) for index, result in enumerate(results)]
        body: dict[str, Any] = {**self._head, "object": self.whole_object, "choices": entries}
        return body | {"usage": self._usage(choices)} | self.metrics(choices)

    def metrics(self, choices: Sequence[Choice]) -> dict[str, Any]:
        tally = SpeculationTally()
        for choice in choices:
            tally.merge(choice.speculation)
        return {"metrics": {"speculative_decoding": tally.summary()}}

    def _chunk(self, entries: list[dict[str, Any]]) -> dict[str, Any]:
        usage = {"usage": None} if self._plan.include_usage else {}
        return {**self._head, "object": self.chunk_object, "choices": entries, **usage}

    def _entry(self, index: int, text: dict[str, Any], delta: Delta) -> dict[str, Any]:
        logprobs = self._logprobs(delta.tokens) if self._wants_logprobs and delta.tokens else None
        entry = {"index": index, **text, "logprobs": logprobs, "finish_reason": delta.finish}
        if self._plan.return_token_ids:
            entry["token_ids"] = [token.id for token in delta.tokens]
        return entry

    def _usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        completion = sum(choice.completion_tokens for choice in choices)
        prompt = self._plan.prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _token_text(self, token: int) -> str:
        return self._tokenizer.decode([token])

    def _stream_text(self, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def _whole_text(self, result: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs(self, tokens: Sequence[OutToken]) -> dict[str, Any]:
        raise NotImplementedError


class CompletionReply(Reply):
    id_prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    def _stream_text(self, delta: Delta) -> dict[str, Any]:
        return {"text": delta.text}

    def _whole_text(self, result: Delta) -> dict[str, Any]:
        return {"text": result.text}

    def _logprobs(self, tokens: Sequence[OutToken]) -> dict[str, Any]:
        """Parallel lists; the chosen token is always among the top ones, so there may be one more than asked for."""
        chosen = [_logprob(token) for token in tokens]
        return {
            "tokens": [self._token_text(token.id) for token in tokens],
            "token_logprobs": chosen,
            "top_logprobs": [
                {self._token_text(top.token): top.logprob for top in (*_top(token), TokenLogprob(token.id, logprob))}
                for token, logprob in zip(tokens, chosen, strict=True)
            ],
            "text_offset": [token.start for token in tokens],
        }


class ChatReply(Reply):
    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self) -> list[dict[str, Any]]:
        """The role, once per choice."""
        role = {"delta": {"role": "assistant", "content": ""}}
        return [self._chunk([self._entry(i, role, Delta("", ()))]) for i in range(len(self._plan.requests))]

    def _stream_text(self, delta: Delta) -> dict[str, Any]:
        return {"delta": {"content": delta.text} if delta.text else {}}

    def _whole_text(self, result: Delta) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": result.text, "refusal": None}}

    def _logprobs(self, tokens: Sequence[OutToken]) -> dict[str, Any]:
        return {
            "content": [
                self._scored(token.id, _logprob(token))
                | {"top_logprobs": [self._scored(top.token, top.logprob) for top in _top(token)]}
                for token in tokens
            ],
            "refusal": None,
        }

    def _scored(self, token: int, logprob: float) -> dict[str, Any]:
        """``bytes`` is null for a token that is only part of a character: its text doesn't tell its bytes."""
        text = self._token_text(token)
        utf8 = None if "�" in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": utf8}


def _logprob(token: OutToken) -> float:
    logprob = None if token.info is None else token.info.logprob
    return _LOGPROB_FLOOR if logprob is None else max(logprob, _LOGPROB_FLOOR)


def _top(token: OutToken) -> list[TokenLogprob]:
    top = () if token.info is None else token.info.top
    return [TokenLogprob(one.token, max(one.logprob, _LOGPROB_FLOOR)) for one in top]

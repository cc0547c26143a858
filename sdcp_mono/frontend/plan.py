"""From a parsed body to what is asked of the roles: token ids, limits, sampling, seeds, session ids.

Temperature, top_k and top_p are applied in that order. Temperature and top_p are thousandths in the protocol (4.1) and
are rounded to them: a temperature below 0.0005 is greedy decoding (rule 1; top_k, top_p and seed then have nothing to
act on), a top_p below 0.0005 keeps the single best token, one of at least 0.9995 keeps all. top_k -1, 0 and anything
from the vocabulary's size on keep all. The default temperature is OpenAI's, 1.

``max_tokens`` defaults to 16 for completions (OpenAI's) and to ``default_chat_tokens`` for chats, less where the
context has less room.

Seeds are 64 bits; a negative seed s stands for 2**64 + s. Choice 0 uses the seed itself, choice i the first 8 bytes
(big-endian) of SHA-256 over "sdcp-mono choice", seed (8 bytes) and i (4 bytes). The draws also depend on the session
id (6.4), so a seeded request derives it from everything that determines its output: the same request always gets the
same ids from the same server, whatever else runs; changing ``max_tokens``, say, may change them. Stop strings only cut.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec

from sdcp_mono.core.messages import UNSET, Rule, Sampling
from sdcp_mono.core.ports import GenerateRequest, ModelCard
from sdcp_mono.frontend.errors import ApiError
from sdcp_mono.frontend.requests import ChatRequest, CommonRequest, CompletionRequest
from sdcp_mono.frontend.settings import FrontendSettings
from sdcp_mono.frontend.tokenizer import (
    ChatMessage,
    PromptTooLong,
    Tokenizer,
    TokenizerThreads,
    encode_chat,
    encode_text,
)

DEFAULT_COMPLETION_TOKENS: Final = 16

_SEEDS: Final = 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One HTTP request, ready to be served. ``requests`` holds ``n`` choices of the first prompt, then of the next."""

    requests: tuple[GenerateRequest, ...]
    prompt_tokens: int
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    return_token_ids: bool


@dataclass(frozen=True, slots=True)
class Planner:
    """Checks a body against the model and turns it into a ``Plan``; every refusal is an ``ApiError``."""

    card: ModelCard
    tokenizer: Tokenizer
    threads: TokenizerThreads
    settings: FrontendSettings

    async def completion(self, body: CompletionRequest) -> Plan:
        given = _prompts(body)
        self._check_common(body, len(given))
        prompts = [
            await self._encode(partial(encode_text, self.tokenizer, prompt, self.card.context), "prompt")
            if isinstance(prompt, str)
            else prompt
            for prompt in given
        ]
        return self._plan(
            body,
            prompts,
            "prompt",
            "max_tokens",
            body.max_tokens,
            DEFAULT_COMPLETION_TOKENS,
            top_logprobs=-1 if body.logprobs is None else body.logprobs,
        )

    async def chat(self, body: ChatRequest) -> Plan:
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError("top_logprobs: needs logprobs to be true", param="top_logprobs")
        name, asked = "max_tokens", body.max_tokens
        if body.max_completion_tokens is not None:
            if asked is not None and asked != body.max_completion_tokens:
                raise ApiError("max_tokens: contradicts max_completion_tokens", param="max_tokens")
            name, asked = "max_completion_tokens", body.max_completion_tokens
        self._check_common(body, 1)
        messages = _chat_messages(body)
        try:
            prompt = await self._encode(lambda: encode_chat(self.tokenizer, messages, self.card.context), "messages")
        except ValueError as error:
            raise ApiError(f"messages: refused by the chat template: {error}", param="messages") from None
        top = (body.top_logprobs or 0) if body.logprobs else -1
        default = self.settings.default_chat_tokens
        return self._plan(body, [prompt], "messages", name, asked, default, top_logprobs=top)

    def _check_common(self, body: CommonRequest, prompts: int) -> None:
        if prompts * body.n > self.settings.max_choices:
            raise ApiError(
                f"n: {prompts} prompts times n = {body.n} is more than {self.settings.max_choices} choices",
                param="n",
            )
        if body.stream_options is not None:
            if not body.stream:
                raise ApiError("stream_options: needs stream to be true", param="stream_options")
            if body.stream_options.include_obfuscation:
                raise ApiError("stream_options.include_obfuscation: not supported", param="stream_options")
        for index, token in enumerate(body.stop_token_ids):
            if token >= self.card.vocab_size:
                raise self._outside(f"stop_token_ids[{index}]", token, "stop_token_ids")
        if body.seed is not None and not -_SEEDS // 2 <= body.seed < _SEEDS:
            raise ApiError("seed: must fit 64 bits", param="seed")

    async def _encode(self, work: Callable[[], tuple[int, ...]], param: str) -> tuple[int, ...]:
        try:
            return await self.threads.run(work)
        except PromptTooLong as long:
            raise self._too_long(param, f"at least {long.at_least} tokens in {param}") from None

    def _plan(
        self,
        body: CommonRequest,
        prompts: list[tuple[int, ...]],
        param: str,
        max_param: str,
        asked: int | None,
        default: int,
        *,
        top_logprobs: int,
    ) -> Plan:
        rule, sampling = self._sampling(body)
        stop = tuple(sorted({*self.tokenizer.eos_ids, *body.stop_token_ids}))
        requests: list[GenerateRequest] = []
        for number, prompt in enumerate(prompts):
            path = param if len(prompts) == 1 else f"{param}[{number}]"
            request = GenerateRequest(
                prompt=prompt,
                max_new=self._max_new(prompt, path, param, max_param, asked, default),
                stop=stop,
                rule=rule,
                sampling=sampling,
                speculative=not body.disable_speculative_decoding,
                top_logprobs=top_logprobs,
            )
            requests += (with_seed(request, body.seed, choice) for choice in range(body.n))
        return Plan(
            requests=tuple(requests),
            prompt_tokens=sum(map(len, prompts)),
            stops=(body.stop,) if isinstance(body.stop, str) else body.stop,
            stream=body.stream,
            include_usage=body.stream_options is not None and body.stream_options.include_usage,
            return_token_ids=body.return_token_ids,
        )

    def _sampling(self, body: CommonRequest) -> tuple[Rule, Sampling]:
        temperature_milli = _milli(body.temperature)
        if temperature_milli == 0:
            return Rule.GREEDY, Sampling()
        top_p_milli = _milli(body.top_p)
        return Rule.SPECULATIVE_SAMPLING, Sampling(
            temperature_milli=temperature_milli,
            top_k=body.top_k if 0 < body.top_k < self.card.vocab_size else UNSET,
            top_p_milli=top_p_milli if top_p_milli < 1000 else UNSET,
        )

    def _max_new(
        self,
        prompt: tuple[int, ...],
        path: str,
        param: str,
        max_param: str,
        asked: int | None,
        default: int,
    ) -> int:
        if not prompt:
            raise ApiError(f"{path}: empty, there is no token to continue from", param=param)
        room = self.card.context - len(prompt)
        if room < 1:
            raise self._too_long(param, f"{len(prompt)} tokens in {path}")
        if asked is not None and asked > room:
            raise self._too_long(
                max_param,
                f"{len(prompt) + asked} tokens ({len(prompt)} in {path}, {asked} in {max_param})",
            )
        for index, token in enumerate(prompt):
            if token >= self.card.vocab_size:
                raise self._outside(f"{path}[{index}]", token, param)
        return min(default, room) if asked is None else asked

    def _too_long(self, param: str, requested: str) -> ApiError:
        message = f"The model's context length is {self.card.context} tokens; you requested {requested}."
        return ApiError(message, param=param, code="context_length_exceeded")

    def _outside(self, path: str, token: int, param: str) -> ApiError:
        return ApiError(f"{path}: {token} is outside the vocabulary, 0 to {self.card.vocab_size - 1}", param=param)


def with_seed(request: GenerateRequest, seed: int | None, choice: int) -> GenerateRequest:
    """The request of one choice: its seed and, from everything that determines the output, its session id."""
    if seed is None or request.rule == Rule.GREEDY:
        return request  # greedy decoding draws nothing
    seed %= _SEEDS
    if choice > 0:
        material = b"sdcp-mono choice" + seed.to_bytes(8, "big") + choice.to_bytes(4, "big")
        seed = int.from_bytes(hashlib.sha256(material).digest()[:8], "big")
    seeded = msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, seed=seed))
    session = hashlib.sha256(b"sdcp-mono session" + msgspec.json.encode(seeded)).digest()[:16]
    return msgspec.structs.replace(seeded, session=session)


def _milli(value: float) -> int:
    """Thousandths, halves up."""
    return math.floor(value * 1000 + 0.5)


def _prompts(body: CompletionRequest) -> list[str | tuple[int, ...]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if all(isinstance(part, int) for part in prompt):
        return [tuple(part for part in prompt if isinstance(part, int))]
    strings = [part for part in prompt if isinstance(part, str)]
    if len(strings) == len(prompt):
        return [*strings]
    lists = [tuple(part) for part in prompt if isinstance(part, list)]
    if len(lists) == len(prompt):
        return [*lists]
    raise ApiError("prompt: a list must hold only strings, only token ids or only lists of token ids", param="prompt")


def _chat_messages(body: ChatRequest) -> list[ChatMessage]:
    """Text parts are joined without a separator; ``developer`` is the present name of ``system``."""
    return [
        {
            "role": "system" if message.role == "developer" else message.role,
            "content": message.content
            if isinstance(message.content, str)
            else "".join(part.text for part in message.content),
        }
        for message in body.messages
    ]

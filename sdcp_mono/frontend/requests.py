"""The bodies of ``/v1/completions`` and ``/v1/chat/completions``: shapes, ranges and what isn't supported.

Every parameter is either used, accepted with the one value that changes nothing, or refused with a 400 that names it.
JSON types are taken literally: ``true`` and ``"1"`` are not numbers, NaN and Infinity are not JSON. ``null`` means
the same as leaving the parameter out. ``plan.py`` says what the values mean.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Generic, Literal, Optional, TypeVar, get_type_hints

import msgspec
from msgspec import Meta, Struct

from sdcp_mono.core.messages import Token
from sdcp_mono.frontend.errors import ApiError

MAX_STOP_STRINGS: Final = 4  # OpenAI's limit
MAX_STOP_CHARS: Final = 1024  # text held back at most, and work per token, per stop string
MAX_STOP_TOKENS: Final = 512  # with the model's own they must fit the contract's 1024
MAX_LOGPROBS: Final = 20  # OpenAI's limit on top_logprobs

_INT64_MAX = 2**63 - 1  # the widest bound that msgspec takes
_MAX_TEMPERATURE = 1e15  # in thousandths it still fits 64 bits

Nothing = Annotated[list[Any], Meta(max_length=0)] | None
PositiveInt = Annotated[int, Meta(ge=1, le=_INT64_MAX)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool = False


class CommonRequest(Struct, frozen=True, kw_only=True):
    """What both endpoints take."""

    model: str | None = None
    n: PositiveInt = 1
    seed: int | None = None
    temperature: Annotated[float, Meta(ge=0, le=_MAX_TEMPERATURE)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=_INT64_MAX)] = 0
    max_tokens: PositiveInt | None = None
    stop: StopString | Annotated[tuple[StopString, ...], Meta(max_length=MAX_STOP_STRINGS)] = ()
    stop_token_ids: Annotated[tuple[Token, ...], Meta(max_length=MAX_STOP_TOKENS)] = ()
    stream: bool = False
    stream_options: StreamOptions | None = None
    disable_speculative_decoding: bool = False
    return_token_ids: bool = False
    user: str = ""  # a label for the operator's own use: checked, never looked at


class CompletionRequest(CommonRequest, frozen=True, kw_only=True):
    prompt: str | list[str | Token | list[Token]]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None


class TextPart(Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class Message(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One turn. Members of other features are accepted empty, as the client library repeats an answer's message."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Nothing = None
    tool_calls: Nothing = None


class ChatRequest(CommonRequest, frozen=True, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None


# Parameters that aren't supported, with the values besides null that ask for nothing.
_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "response_format": ({"type": "text"},),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
}
_NEUTRAL_CHAT: Final[dict[str, tuple[Any, ...]]] = _NEUTRAL | {
    "modalities": (["text"],),
    "store": (False,),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "parallel_tool_calls": (),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}
_NEUTRAL_COMPLETION: Final[dict[str, tuple[Any, ...]]] = _NEUTRAL | {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}

R = TypeVar("R", bound=CommonRequest)


class RequestParser(Generic[R]):
    """Decodes one kind of body, parameter by parameter, so that each error can name its own."""

    def __init__(self, kind: type[R], neutral: dict[str, tuple[Any, ...]]) -> None:
        types = get_type_hints(kind, include_extras=True)
        # A run-time type: None is the same as absent for every parameter.
        self._decoders = {
            name: msgspec.json.Decoder(Optional[types[name]])  # noqa: UP045
            for name in kind.__struct_fields__
        }
        self._required = tuple(field.name for field in msgspec.structs.fields(kind) if field.required)
        self._kind = kind
        self._neutral = neutral

    def parse(self, body: bytes) -> R:
        """Raises ``ApiError``; its ``param`` is the parameter at fault, the message has the path inside it."""
        try:
            members = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        except msgspec.ValidationError:
            raise ApiError("the body must be a JSON object") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ApiError(f"the body is not valid JSON: {error}") from None
        except RecursionError:
            raise ApiError("the body is nested too deeply") from None
        values: dict[str, Any] = {}
        for name, raw in members.items():
            if name in self._neutral:
                self._check_neutral(name, raw)
            elif (value := self._decode(name, raw)) is not None:
                values[name] = value
        for name in self._required:
            if name not in values:
                raise ApiError(f"{name}: this parameter is required", param=name)
        return self._kind(**values)

    def _decode(self, name: str, raw: msgspec.Raw) -> Any:
        decoder = self._decoders.get(name)
        if decoder is None:
            raise ApiError(f"{_shown(name)}: unknown parameter", param=_shown(name), code="unknown_parameter")
        try:
            return decoder.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError(_located(name, str(error)), param=name) from None

    def _check_neutral(self, name: str, raw: msgspec.Raw) -> None:
        try:
            value = msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError(_located(name, str(error)), param=name) from None
        allowed = (None, *self._neutral[name])
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed):
            values = " or ".join(msgspec.json.encode(one).decode() for one in allowed)
            raise ApiError(
                f"{name}: not supported; only {values} is accepted",
                param=name,
                code="unsupported_parameter",
            )


def _located(name: str, message: str) -> str:
    """msgspec's "Expected `int` - at `$[0].x`" as "name[0].x: expected `int`"."""
    matched = re.fullmatch(r"(.*?)(?: - at `\$(.*)`)?", message, re.DOTALL)
    assert matched is not None
    text, path = matched.group(1), matched.group(2) or ""
    return f"{name}{path.replace('[...]', '')}: {text[:1].lower()}{text[1:]}"


def _shown(name: str) -> str:
    """A parameter's name as the client sent it, within reason: it can be as long as the body."""
    return name if len(name) <= 64 else name[:64] + "…"


parse_completion: Final = RequestParser(CompletionRequest, _NEUTRAL_COMPLETION).parse
parse_chat: Final = RequestParser(ChatRequest, _NEUTRAL_CHAT).parse

"""Text to ids and back, on the `tokenizers` library alone (importing transformers would cost seconds of start).

Encoding and chat templates give what transformers' fast tokenizer of the same folder gives; tests compare them.
All methods may be called from any thread.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import tokenizers

from sdcp_mono.models.identity import ModelError, chat_template, eos_ids, read_json

SPECIAL_NAMES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
REASONING_NAMES: Final = ("reasoning_content", "thinking", "reasoning")
BYTE_TOKEN: Final = re.compile("<0x([0-9A-F]{2})>")

Message = Mapping[str, Any]


class Tokenizer:
    """The tokenizer of a Hugging Face folder. Raises ``ModelError`` if the folder has none that loads.

    ``special_ids`` are left out of decoded text; ``eos_ids`` end a generation.
    """

    def __init__(self, folder: Path) -> None:
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ModelError(
                f"{folder} has no tokenizer.json. Make one with transformers: "
                f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})."
            )
        try:
            self._backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"{file} can't be read ({error}). Copy or download the model again.") from error
        self._backend.no_padding()
        self._backend.no_truncation()
        config_file = folder / "tokenizer_config.json"
        config = read_json(config_file) if config_file.is_file() else {}
        self._special_names = _special_names(folder, config)
        self._add_missing_tokens(config)
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, entry in added.items() if entry.special)
        self.bos_id = self._id("bos_token")
        self.eos_ids = eos_ids(folder) or tuple(token for token in (self._id("eos_token"),) if token is not None)
        self._template = _compile(template) if (template := chat_template(folder)) is not None else None

    @property
    def vocab_size(self) -> int:
        """Number of tokens with their added ones; the model's logits may be wider."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of ``text``; with ``special``, BOS and EOS are added where tokenizer.json's post-processor adds them.

        As in transformers, add_bos_token in tokenizer_config.json has no say where there is a tokenizer.json.
        Special tokens written out in ``text`` become their ids. Raises ``ValueError`` for text that isn't Unicode.
        """
        try:
            return self._backend.encode(text, add_special_tokens=special).ids
        except TypeError:  # how the library refuses lone surrogates
            raise ValueError("text holds half of a surrogate pair, which is not a character") from None

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of ``ids``, U+FFFD for bytes that are no character. Unknown ids are left out."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it, or None."""
        return self._backend.id_to_token(token_id)

    def apply_chat(self, messages: Sequence[Message], *, generation_prompt: bool = True, **variables: Any) -> list[int]:
        """Ids of a conversation. BOS comes from the template alone, so there are never two. Raises ``ValueError``."""
        text = self.render_chat(messages, generation_prompt=generation_prompt, **variables)
        return self.encode(text, special=False)

    def render_chat(self, messages: Sequence[Message], *, generation_prompt: bool = True, **variables: Any) -> str:
        """The chat template's text for ``messages`` (``role``, ``content``, ...), as transformers renders it.

        Raises ``ValueError`` if the folder has no template, there are no messages, or the template refuses them.
        """
        if self._template is None:
            raise ValueError("this model has no chat template: send a plain prompt instead")
        if not messages:
            raise ValueError("messages is empty")
        known: dict[str, Any] = {"tools": None, "documents": None, **self._special_names, **variables}
        try:
            return self._template.render(
                messages=[_template_message(message) for message in messages],
                add_generation_prompt=generation_prompt,
                **known,
            )
        except (jinja2.TemplateError, TypeError, ArithmeticError, LookupError, AttributeError) as error:
            raise ValueError(f"the model's chat template refuses messages: {error}") from error

    def first_difference(self, other: Tokenizer) -> int | None:
        """The smallest id that names another token in ``other``, or a token in only one of the two; None if equal."""
        mine, theirs = self._tokens, other._tokens
        different = (token for token in mine.keys() | theirs.keys() if mine.get(token) != theirs.get(token))
        return min(different, default=None)

    def incremental(self, *, skip_special: bool = True) -> IncrementalDecoder:
        """A decoder for one stream of ids."""
        return IncrementalDecoder(self, skip_special=skip_special)

    @cached_property
    def _tokens(self) -> dict[int, str]:
        return {token: text for text, token in self._backend.get_vocab(with_added_tokens=True).items()}

    @cached_property
    def _decoder_kinds(self) -> tuple[str, ...]:
        """Types of the decoding steps, e.g. ``("ByteLevel",)``."""
        if self._backend.decoder is None:
            return ()
        state = json.loads(self._backend.decoder.__getstate__())
        return tuple(step["type"] for step in state.get("decoders", [state]))

    def _id(self, name: str) -> int | None:
        text = self._special_names.get(name)
        return None if text is None else self._backend.token_to_id(text)

    def _add_missing_tokens(self, config: Mapping[str, Any]) -> None:
        """Tokens that only tokenizer_config.json names, in order of id."""
        declared = config.get("added_tokens_decoder") or {}
        present = self._backend.get_added_tokens_decoder()
        for token, entry in sorted(declared.items(), key=lambda item: int(item[0])):
            if int(token) not in present:
                flags = {key: entry[key] for key in ("single_word", "lstrip", "rstrip", "normalized") if key in entry}
                added = tokenizers.AddedToken(entry["content"], special=bool(entry.get("special")), **flags)
                (self._backend.add_special_tokens if added.special else self._backend.add_tokens)([added])


class IncrementalDecoder:
    """Text of a growing list of ids, without ever splitting a character, at bounded work per id.

    The pieces and the final ``flush`` add up to ``decode`` of all ids, with two exceptions: decoders that rewrite
    earlier text (WordPiece's clean-up), and SentencePiece's byte fallback on bytes that are no text. There ``decode``
    gives up a whole run of byte tokens for one bad byte; a stream has shown its good characters by then.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped: frozenset[int] = tokenizer.special_ids if skip_special else frozenset()
        self._byte_level = tokenizer._decoder_kinds == ("ByteLevel",)
        self._byte_fallback = "ByteFallback" in tokenizer._decoder_kinds
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")  # holds the bytes of an incomplete character
        self._before: list[int] = []  # the last id shown: a first token loses its leading space, later ones don't

    def push(self, ids: Sequence[int]) -> str:
        """The text that became certain with ``ids``; empty while a character is incomplete."""
        return "".join(self._step(token) for token in ids if token not in self._skipped)

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a broken tail."""
        return self._bytes.decode(b"", final=True)

    def _step(self, token: int) -> str:
        text = self._tokenizer.token(token)
        if text is None:
            return ""
        if self._byte_level:
            return self._bytes.decode(_token_bytes(text))
        if self._byte_fallback and (byte := BYTE_TOKEN.fullmatch(text)):
            self._before = [token]
            return self._bytes.decode(bytes.fromhex(byte[1]))
        known = self._tokenizer.decode(self._before, skip_special=False)
        piece = self._tokenizer.decode([*self._before, token], skip_special=False)[len(known) :]
        self._before = [token]
        return self.flush() + piece


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes as printable characters, the other way round."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {chr(byte): byte for byte in printable}
    return spelled | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTE_OF: Final = _byte_alphabet()


def _token_bytes(token: str) -> bytes:
    """A byte-level token's bytes; tokens added as plain text are spelled as themselves."""
    try:
        return bytes(BYTE_OF[character] for character in token)
    except KeyError:
        return token.encode()


def _special_names(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and the like, as text."""
    legacy = folder / "special_tokens_map.json"
    merged = {**(read_json(legacy) if legacy.is_file() else {}), **config}
    named = {}
    for name in SPECIAL_NAMES:
        value = merged.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str):
            named[name] = text
    return named


def _template_message(message: Message) -> dict[str, Any]:
    """A message as templates expect it: no null members, reasoning under its standard name."""
    known = {key: _plain(value) for key, value in message.items() if value is not None}
    reasoning = next((known[name] for name in REASONING_NAMES if known.get(name) is not None), None)
    return known if reasoning is None else {"thinking": reasoning, **known, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """JSON types only: a template is code from the model's author and must not reach our objects' methods."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value)


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's text for training; here it only shows its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(template: str) -> jinja2.Template:
    """Compile a chat template in the environment that transformers gives it. Raises ``ModelError``."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # jinja2's own filter escapes HTML

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise ModelError(f"the model's chat template is not valid Jinja: {error}") from error

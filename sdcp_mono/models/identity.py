"""What a model folder is: its files, their digests, its card (design, section 4; AMB-031, AMB-032).

Nothing here imports torch or transformers: a start reads a few small JSON files and, the first time, hashes the
weights. The digests are kept beside the model and used again only for files whose name, size and mtime are unchanged.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sdcp_mono.core.messages import Hash32
from sdcp_mono.core.ports import ModelCard

Progress = Callable[[str, int, int], None]
"""``progress(description, done, total)``: called often on long work, in bytes or steps, from the calling thread."""

IDENTITY_FILE: Final = "sdcp-identity.json"
CONFIG_FILES: Final = ("config.json", "generation_config.json")
TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
# Architectures spell the context length differently; the first that is present counts.
CONTEXT_KEYS: Final = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "n_ctx")


class ModelError(Exception):
    """A model can't be used. The message says what happened and what to do next."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A Hugging Face folder that is complete on this disk.

    ``eos_ids`` end a generation; ``chat_template`` says whether the folder brings one.
    """

    path: Path
    name: str
    card: ModelCard
    eos_ids: tuple[int, ...]
    chat_template: bool


def no_progress(description: str, done: int, total: int) -> None:
    """A ``Progress`` for callers that show none."""


def read_folder(path: Path, name: str, cache_dir: Path, progress: Progress = no_progress) -> ModelFolder:
    """Read a Hugging Face folder's card and identify it. Raises ``ModelError``.

    ``cache_dir`` holds the digests of folders that can't be written to.
    """
    config = read_json(path / "config.json")
    text = config.get("text_config") or config  # multimodal checkpoints nest the decoder's settings
    context = next((text[key] for key in CONTEXT_KEYS if isinstance(text.get(key), int)), None)
    for field, value in (("vocab_size", text.get("vocab_size")), ("max_position_embeddings", context)):
        if not isinstance(value, int) or value < 1:
            raise ModelError(f"{path / 'config.json'} has no usable {field!r}: is this a decoder-only language model?")
    files = model_files(path)
    digests = file_digests(files, _cache_file(path, cache_dir), progress)
    card = ModelCard(
        name=name,
        target=manifest_digest(files, digests),
        tokenizer=_tokenizer_digest(path, digests),
        vocab_size=text["vocab_size"],
        context=int(context or 0),
    )
    return ModelFolder(path, name, card, eos_ids(path), chat_template(path) is not None)


def model_files(path: Path) -> list[Path]:
    """Every file that tensors, configuration or tokenizer are read from, weights last. Raises ``ModelError``."""
    weights = _weight_files(path)
    missing = [file.name for file in weights if not file.is_file()]
    if missing:
        raise ModelError(f"{path} is incomplete: {', '.join(missing)} missing. Copy or download the model again.")
    if not weights:
        raise ModelError(f"{path} has no *.safetensors weights. Save the model with save_pretrained() first.")
    return [file for name in (*CONFIG_FILES, *TOKENIZER_FILES) if (file := path / name).is_file()] + weights


def manifest_digest(paths: Iterable[Path], digests: Mapping[Path, str] | None = None) -> Hash32:
    """SHA-256 over lines ``<file name> <sha256>\\n`` sorted by file name (DSpark 6.7, AMB-031)."""
    known = digests or {}
    named = sorted((path.name, known.get(path) or sha256_file(path)) for path in paths)
    return hashlib.sha256("".join(f"{name} {digest}\n" for name, digest in named).encode()).digest()


def file_digests(paths: Iterable[Path], cache: Path, progress: Progress = no_progress) -> dict[Path, str]:
    """SHA-256 of each file in hex. Hashes only files whose name, size or mtime in ns are not in ``cache``."""
    known = _read_cache(cache)
    stats = {path: path.stat() for path in paths}
    keys = {path: [stat.st_size, stat.st_mtime_ns] for path, stat in stats.items()}
    stale = {path for path in keys if known.get(path.name, [])[:2] != keys[path]}
    total, done = sum(stats[path].st_size for path in stale), 0
    digests = {}
    for path in keys:
        if path in stale:
            digests[path] = sha256_file(path)
            done += stats[path].st_size
            progress("Identifying the model", done, total)
        else:
            digests[path] = known[path.name][2]
    if stale:
        # A folder that can't be written to is hashed at every start; that is slow, not wrong.
        with contextlib.suppress(OSError):
            write_atomic(cache, json.dumps({path.name: [*keys[path], digests[path]] for path in keys}, indent=1))
    return digests


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def eos_ids(path: Path) -> tuple[int, ...]:
    """The ids that end a generation: generation_config.json, else config.json, as transformers' ``generate`` does."""
    for name in ("generation_config.json", "config.json"):
        if not (path / name).is_file():
            continue
        config = read_json(path / name)
        value = config.get("eos_token_id", (config.get("text_config") or {}).get("eos_token_id"))
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list) and value:
            return tuple(int(token) for token in value)
    return ()


def chat_template(path: Path) -> str | None:
    """The folder's (default) chat template: chat_template.jinja, else the one in tokenizer_config.json."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    config = path / "tokenizer_config.json"
    template = read_json(config).get("chat_template") if config.is_file() else None
    if isinstance(template, list):  # several named templates
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model's file. Raises ``ModelError``."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing: {path.parent} is not a complete model folder.") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} can't be read ({error}). Copy or download the model again.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object. Copy or download the model again.")
    return value


def write_atomic(path: Path, text: str) -> None:
    """Write a small file so that a reader sees all of it or the old one."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _weight_files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map", {})
        return [index, *(path / name for name in sorted(set(weight_map.values())))]
    return [file] if (file := path / "model.safetensors").is_file() else []


def _tokenizer_digest(path: Path, digests: Mapping[Path, str]) -> Hash32:
    """SHA-256 of tokenizer.json's bytes; without one, the manifest of the tokenizer files (AMB-032)."""
    if digest := digests.get(path / "tokenizer.json"):
        return bytes.fromhex(digest)
    return manifest_digest((file for file in digests if file.name in TOKENIZER_FILES), digests)


def _cache_file(path: Path, cache_dir: Path) -> Path:
    if os.access(path, os.W_OK):
        return path / IDENTITY_FILE
    return cache_dir / f"identity-{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:16]}.json"


def _read_cache(cache: Path) -> dict[str, list[Any]]:
    try:
        known = json.loads(cache.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(known, dict):
        return {}
    return {name: entry for name, entry in known.items() if isinstance(entry, list) and len(entry) == 3}

"""GGUF file to Hugging Face folder, once: safetensors, config, tokenizer.json, chat template.

Weights are dequantised to float32 and then, unless float32 is asked for, rounded to bfloat16. That loses something:
a Q4_1 weight is ``scale * q + minimum`` with float16 scale and minimum, which needs more than bfloat16's 8 bits of
mantissa. In SmolLM2-135M-Instruct.Q4_1 79 % of the 134.5 million values change, each by at most 2**-8 of itself
(norm weights are exact). So the bfloat16 folder is another model than the float32 one, with its own identity; float32
is the reference, and tests compare within one dtype.

The output depends on the GGUF file and the libraries only, not on the machine or the day: members that transformers
writes about itself are removed, so that two machines get the same digests.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

from sdcp_mono.models.identity import ModelError, Progress, no_progress, read_json

Dtype = Literal["bfloat16", "float32"]

CONVERTER: Final = 1  # increase it when the output changes: folders of another number are converted again
RECORD_FILE: Final = "conversion.json"
STEPS: Final = 4  # for the progress callback: read, load, write, flush

# The value of tokenizer.ggml.pre names the regular expressions that split text before BPE. transformers builds those
# that it knows; GPT-2's own come with any byte-level tokenizer. These split numbers into digits first, which
# transformers 5.24 leaves out: "a  12" then gets other ids than the model was trained on (transformers#31630).
DIGITS_FIRST: Final = frozenset(
    {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"},
)
GPT2_SPLIT: Final = frozenset({"gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais", "roberta-bpe", "jina-es", "jina-de"})
VOLATILE: Final = ("transformers_version", "_model_name_or_path", "_from_model_config", "is_local", "local_files_only")

log = logging.getLogger(__name__)


def convert_gguf(gguf: Path, folder: Path, dtype: Dtype = "bfloat16", progress: Progress = no_progress) -> None:
    """Write ``gguf`` as a Hugging Face folder into the existing empty ``folder``, flushed to disk.

    Needs memory for the weights in ``dtype`` and one tensor in float32. Raises ``ModelError``; ``OSError`` if the disk
    is full.
    """
    progress("Converting: reading the GGUF header", 0, STEPS)
    header = _read_header(gguf)
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    with _quiet():
        progress("Converting: loading and dequantising", 1, STEPS)
        try:
            tokenizer = AutoTokenizer.from_pretrained(**source, local_files_only=True)
            # Without dequantize=True save_pretrained refuses the model.
            model = AutoModelForCausalLM.from_pretrained(
                **source,
                dtype=getattr(torch, dtype),
                quantization_config=GgufConfig(dequantize=True),
                local_files_only=True,
            )
        except Exception as error:  # transformers raises many kinds for what it doesn't know
            raise ModelError(
                f"transformers can't load {gguf.name} (architecture {header.get('general.architecture')!r}): {error}. "
                "Use the model's Hugging Face folder instead of its GGUF file."
            ) from error
        _repair_split(tokenizer, header)
        progress("Converting: writing", 2, STEPS)
        try:
            model.save_pretrained(str(folder))
            tokenizer.save_pretrained(str(folder))
        except SafetensorError as error:  # how safetensors reports what the file system refuses
            raise OSError(errno.ENOSPC if "No space" in str(error) else errno.EIO, str(error)) from error
    _finish_configs(folder, header)
    progress("Converting: flushing to disk", 3, STEPS)
    record = {"converter": CONVERTER, "source": gguf.name, "size": gguf.stat().st_size, "dtype": dtype}
    (folder / RECORD_FILE).write_text(json.dumps(record, indent=1), encoding="utf-8")
    flush_folder(folder)
    progress("Converting: done", STEPS, STEPS)


def is_converted(folder: Path) -> bool:
    """Whether ``folder`` was written by this converter (folders get their name only when they are complete)."""
    record = folder / RECORD_FILE
    return record.is_file() and read_json(record).get("converter") == CONVERTER


def flush_folder(folder: Path) -> None:
    """Force a folder's files to disk, so that no rename outlives their content."""
    for path in (*folder.iterdir(), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _read_header(gguf: Path) -> dict[str, Any]:
    """The scalar members of a GGUF file's header."""
    try:
        from gguf import GGUFReader

        fields = GGUFReader(gguf).fields
        return {key: field.contents() for key, field in fields.items() if len(field.data) == 1}
    except (ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
        raise ModelError(f"{gguf} is not a readable GGUF file ({error}). Download it again.") from error


def _repair_split(tokenizer: Any, header: dict[str, Any]) -> None:
    """Give a byte-level tokenizer the text split that ``tokenizer.ggml.pre`` names."""
    if header.get("tokenizer.ggml.model") != "gpt2":
        return
    from tokenizers import pre_tokenizers

    backend, pre = tokenizer.backend_tokenizer, header.get("tokenizer.ggml.pre")
    if pre in DIGITS_FIRST:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif pre not in GPT2_SPLIT and not isinstance(backend.pre_tokenizer, pre_tokenizers.Sequence):
        log.warning(
            "tokenizer.ggml.pre %r is unknown: text is split as GPT-2 does, perhaps not as this model was trained. "
            "Prefer the model's Hugging Face folder.",
            pre,
        )


def _finish_configs(folder: Path, header: dict[str, Any]) -> None:
    """Remove what differs between machines and add the end-of-turn token that only the GGUF header names."""
    for path in (folder / "config.json", folder / "generation_config.json", folder / "tokenizer_config.json"):
        if not path.is_file():
            continue
        config = {key: value for key, value in read_json(path).items() if key not in VOLATILE}
        if path.name == "generation_config.json":
            ends = [header.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
            ids = list(dict.fromkeys(int(token) for token in ends if token is not None))
            if ids:
                config["eos_token_id"] = ids[0] if len(ids) == 1 else ids
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' progress bars out of ours; they are written to stderr, log records are not affected."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield

"""Models on disk: where they come from, what identifies them, and their tokenizers. No tensors at serve time."""

from sdcp_mono.models.identity import ModelError, ModelFolder, Progress, manifest_digest, no_progress, read_folder
from sdcp_mono.models.source import DEFAULT_ID, DEFAULT_NAME, describe, pull, resolve
from sdcp_mono.models.tokenizer import IncrementalDecoder, Tokenizer

__all__ = [
    "DEFAULT_ID",
    "DEFAULT_NAME",
    "IncrementalDecoder",
    "ModelError",
    "ModelFolder",
    "Progress",
    "Tokenizer",
    "describe",
    "manifest_digest",
    "no_progress",
    "pull",
    "read_folder",
    "resolve",
]

"""Drafters: each answers the ``DraftModel`` port; none commits, each is removable by deleting its module.

Nothing is imported here, so that a command line can be checked without loading torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, cast

Kind = Literal["none", "ngram", "quantized", "model"]

FORMS: Final = ("none", "ngram", "quantized", "model:DIR")
LATER: Final = ("dspark", "looped")  # named in the command line's documentation, not built yet


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """One ``--draft`` value. ``folder`` is the draft model's, for kind ``model`` only."""

    kind: Kind
    folder: Path | None = None


def parse(spec: str) -> DraftSpec:
    """Read one ``--draft`` value. Raises ``ValueError`` that lists what there is."""
    kind, colon, rest = spec.partition(":")
    if kind == "model" and rest:
        return DraftSpec("model", Path(rest).expanduser())
    if not colon and kind in ("none", "ngram", "quantized"):
        return DraftSpec(cast("Kind", kind))
    there_is = f"use {', '.join(FORMS[:-1])} or {FORMS[-1]}"
    if kind in LATER:
        raise ValueError(f"draft: {spec!r} comes in a later version; {there_is}")
    raise ValueError(f"draft: {spec!r} is no drafter; {there_is}")

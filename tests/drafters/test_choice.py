"""``--draft`` values, and the drafters that are loaded from a folder."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sdcp_mono.core.ports import DraftRequest
from sdcp_mono.drafters import DraftSpec, parse
from sdcp_mono.drafters.detached import check_vocabulary, load_detached
from sdcp_mono.drafters.quantized import load_quantized
from sdcp_mono.models.identity import ModelFolder, read_folder
from sdcp_mono.models.tokenizer import Tokenizer

Request = Callable[..., DraftRequest]
KV_BYTES, TOKEN_BUDGET = 1 << 22, 64


def folder_of(path: Path) -> ModelFolder:
    return read_folder(path, path.name, path)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("none", DraftSpec("none")),
        ("ngram", DraftSpec("ngram")),
        ("quantized", DraftSpec("quantized")),
        ("model:/models/small", DraftSpec("model", Path("/models/small"))),
        ("model:C:odd name", DraftSpec("model", Path("C:odd name"))),
    ],
)
def test_parse(text: str, spec: DraftSpec) -> None:
    assert parse(text) == spec


@pytest.mark.parametrize("text", ["", "model", "model:", "ngram:3", "Ngram", "eagle", " none"])
def test_parse_refuses_and_lists_what_there_is(text: str) -> None:
    with pytest.raises(ValueError, match=r"^draft: .*use none, ngram, quantized or model:DIR$"):
        parse(text)


@pytest.mark.parametrize("text", ["dspark:tcp://127.0.0.1:7000", "looped"])
def test_parse_names_what_comes_later(text: str) -> None:
    with pytest.raises(ValueError, match="comes in a later version; use none"):
        parse(text)


def test_quantized_drafts_as_its_target(chainA: Path, request_of: Request) -> None:
    target = folder_of(chainA)
    drafter = load_quantized(target.path, target.card.target, kv_bytes=KV_BYTES, token_budget=TOKEN_BUDGET)
    assert drafter.name == "quantized"
    assert drafter.vocab_size == 64
    assert drafter.identity == hashlib.sha256(b"sdcp-mono quantized 1\nint4\n" + target.card.target).digest()
    (draft,) = drafter.draft([request_of([5, 9], 8)])
    assert draft is not None
    assert draft.tokens == (10, 11, 3, 20, 21, 22, 23, 24)


def test_detached_drafts_as_its_own_model(chainA: Path, cyc: Path, request_of: Request) -> None:
    draft_folder, target = folder_of(cyc), folder_of(chainA)
    check_vocabulary(draft_folder.card, Tokenizer(cyc), target.card, Tokenizer(chainA))
    drafter = load_detached(
        draft_folder.path, draft_folder.card, weights="float32", kv_bytes=KV_BYTES, token_budget=TOKEN_BUDGET
    )
    assert drafter.identity == draft_folder.card.target != target.card.target
    assert drafter.name == f"model:{draft_folder.name}"
    (draft,) = drafter.draft([request_of([5, 17], 5)])
    assert draft is not None
    assert draft.tokens == (18, 19, 10, 11, 12)


def test_c36_other_tokenizer_of_the_same_size_is_refused(chainA: Path, cyc: Path, tmp_path: Path) -> None:
    other = tmp_path / "swapped"
    shutil.copytree(cyc, other)
    file = other / "tokenizer.json"
    definition = json.loads(file.read_text())
    words = definition["model"]["vocab"]
    words["t40"], words["t41"] = 41, 40
    file.write_text(json.dumps(definition))
    with pytest.raises(ValueError, match=r"swapped .*: id 40 is 't41' in the draft, 't40' in the target\."):
        check_vocabulary(folder_of(other).card, Tokenizer(other), folder_of(chainA).card, Tokenizer(chainA))


def test_c36_smaller_tokenizer_is_refused(chainA: Path, cyc: Path, tmp_path: Path) -> None:
    other = tmp_path / "smaller"
    shutil.copytree(cyc, other)
    file = other / "tokenizer.json"
    definition = json.loads(file.read_text())
    del definition["model"]["vocab"]["t63"]
    file.write_text(json.dumps(definition))
    with pytest.raises(ValueError, match="id 63 is missing in the draft, 't63' in the target"):
        check_vocabulary(folder_of(other).card, Tokenizer(other), folder_of(chainA).card, Tokenizer(chainA))


def test_c36_other_width_is_refused(chainA: Path, cyc: Path, tmp_path: Path) -> None:
    """The same tokenizer, but the logits are padded to another width."""
    other = tmp_path / "padded"
    shutil.copytree(cyc, other)
    file = other / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": 72}))
    padded = folder_of(other)
    with pytest.raises(ValueError, match=r"has 72 logits, .* 64: id 64 is in only one of them"):
        check_vocabulary(padded.card, Tokenizer(other), folder_of(chainA).card, Tokenizer(chainA))

import hashlib
import json
import os

import pytest

from sdcp_mono.models import ModelError, manifest_digest, read_folder
from sdcp_mono.models.identity import IDENTITY_FILE, chat_template, eos_ids, file_digests, model_files


def rewrite(path, **members):
    path.write_text(json.dumps(json.loads(path.read_text()) | members), encoding="utf-8")


def test_dspark_6_7_manifest_vector(tmp_path):
    # The `identity` entry of the dspark group in the specification's vectors.
    for name, text in {"config.json": '{"n":2}\n', "model.safetensors": "weights", "a.json": ""}.items():
        (tmp_path / name).write_text(text)
    digest = manifest_digest(tmp_path.iterdir())
    assert digest.hex() == "824b441de9e3424e434821ab32a0a6d7255fc10db9c5fe579eb1cdf4721bc955"


def test_amb_031_one_byte_in_one_shard_is_another_target(make_folder, tmp_path):
    folder = make_folder()
    before = read_folder(folder, "tiny", tmp_path).card
    shard = folder / "model-2-of-2.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    after = read_folder(folder, "tiny", tmp_path).card
    assert after.target != before.target
    assert after.tokenizer == before.tokenizer


def test_amb_031_covers_weights_configuration_and_tokenizer(make_folder):
    assert {path.name for path in model_files(make_folder())} == {
        "config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
        "model.safetensors.index.json", "model-1-of-2.safetensors", "model-2-of-2.safetensors",
    }  # fmt: skip


def test_amb_032_tokenizer_digest_is_of_the_bytes_of_tokenizer_json(make_folder, tmp_path):
    folder = make_folder()
    expected = hashlib.sha256((folder / "tokenizer.json").read_bytes()).digest()
    assert read_folder(folder, "tiny", tmp_path).card.tokenizer == expected


def test_amb_032_without_tokenizer_json_it_is_the_manifest_of_the_tokenizer_files(make_folder, tmp_path):
    folder = make_folder()
    (folder / "tokenizer.json").unlink()
    expected = manifest_digest([folder / "tokenizer_config.json", folder / "chat_template.jinja"])
    assert read_folder(folder, "tiny", tmp_path).card.tokenizer == expected


def test_digests_are_computed_once_and_kept_beside_the_model(make_folder, tmp_path):
    folder = make_folder()
    seen = []
    first = read_folder(folder, "tiny", tmp_path, lambda *step: seen.append(step))
    total = sum(path.stat().st_size for path in model_files(folder))
    assert seen[-1] == ("Identifying the model", total, total)
    seen.clear()
    assert read_folder(folder, "tiny", tmp_path, lambda *step: seen.append(step)) == first
    assert seen == []
    assert (folder / IDENTITY_FILE).is_file()


@pytest.mark.parametrize("change", ["size", "mtime"])
def test_a_kept_digest_is_not_trusted_when_the_file_differs(tmp_path, change):
    file, cache = tmp_path / "w", tmp_path / "cache.json"
    file.write_bytes(b"one")
    file_digests([file], cache)
    stat = file.stat()
    content = b"longer" if change == "size" else b"two"
    file.write_bytes(content)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + (change == "mtime")))
    assert file_digests([file], cache)[file] == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("damage", ["", "[]", "{", '{"w": 3}', '{"w": [1, 2]}'])
def test_a_damaged_digest_file_is_computed_again(tmp_path, damage):
    file, cache = tmp_path / "w", tmp_path / "cache.json"
    file.write_bytes(b"one")
    cache.write_text(damage)
    assert file_digests([file], cache)[file] == hashlib.sha256(b"one").hexdigest()


def test_card_and_end_tokens(make_folder, tmp_path):
    folder = read_folder(make_folder(), "tiny", tmp_path)
    assert (folder.card.name, folder.card.vocab_size, folder.card.context) == ("tiny", 400, 64)
    assert folder.eos_ids == (2,)
    assert folder.chat_template


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [({"eos_token_id": [5, 6]}, {"eos_token_id": 2}, (5, 6)), ({}, {"eos_token_id": 0}, (0,)), (None, {}, ())],
)
def test_generation_config_says_what_ends_a_text(tmp_path, generation, config, expected):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert eos_ids(tmp_path) == expected


def test_default_of_several_chat_templates(tmp_path):
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert chat_template(tmp_path) == "D"


def test_errors_name_the_field_or_file(make_folder, tmp_path):
    folder = make_folder()
    rewrite(folder / "config.json", vocab_size=None)
    with pytest.raises(ModelError, match="'vocab_size'"):
        read_folder(folder, "tiny", tmp_path)
    rewrite(folder / "config.json", vocab_size=400)
    (folder / "model-2-of-2.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-2-of-2\.safetensors missing"):
        read_folder(folder, "tiny", tmp_path)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json can't be read"):
        read_folder(folder, "tiny", tmp_path)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        read_folder(folder, "tiny", tmp_path)

"""Tiny real checkpoints made on the spot, and the default model, fetched once into a folder that survives the run."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from sdcp_mono.models import ModelFolder, resolve

CORPUS = ["the cat sat on the mat, the dog didn't", "naïve café 2024", "你好，世界", "a  b   c\n\n\td"] * 8
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def test_data() -> Path:
    """Where downloaded and converted models are kept between runs."""
    return Path(os.environ.get("SDCP_TEST_DATA") or Path(__file__).parents[2] / ".cache" / "sdcp-test")


@pytest.fixture(scope="session")
def smollm2(test_data: Path) -> ModelFolder:
    return resolve(None, test_data)


@pytest.fixture(scope="session")
def byte_level() -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer, as GPT-2, Llama 3 and SmolLM2 have."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@pytest.fixture(scope="session")
def byte_fallback() -> tokenizers.Tokenizer:
    """A SentencePiece-like tokenizer with byte fallback, as Llama 2 and Mistral have."""
    special = ["<unk>", "<s>", "</s>"]
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        special_tokens=[*special, *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    tokenizer.train_from_iterator([text for text in CORPUS if text.isascii()], trainer)
    saved = json.loads(tokenizer.to_str())
    saved["added_tokens"] = [token for token in saved["added_tokens"] if token["content"] in special]
    return tokenizers.Tokenizer.from_str(json.dumps(saved))


@pytest.fixture
def make_folder(tmp_path: Path, byte_level: tokenizers.Tokenizer):
    """A small folder that has everything a model folder has; its two shards hold one tensor each."""

    def make(
        name: str = "tiny",
        tokenizer: tokenizers.Tokenizer | None = None,
        template: str | None = CHATML,
        **config: object,
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (tokenizer or byte_level).save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|im_end|>"}
        write_json(folder / "tokenizer_config.json", settings | config)
        write_json(folder / "config.json", {"vocab_size": 400, "max_position_embeddings": 64, "eos_token_id": 2})
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        for number in (1, 2):
            save_file({f"w{number}": np.full(8, number, np.float32)}, folder / f"model-{number}-of-2.safetensors")
        weight_map = {f"w{number}": f"model-{number}-of-2.safetensors" for number in (1, 2)}
        write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})
        return folder

    return make


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")

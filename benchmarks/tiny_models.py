"""A tiny Llama of random weights, and a noisy copy of it that drafts well but not perfectly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB = 64
CONTEXT = 512
NOISE = 0.02  # standard deviation, of weights of 0.2: some three of four drafted tokens are then right
SPECIAL = 2  # ids 0 and 1 are unknown and BOS; there is no EOS


def write_models(folder: Path) -> tuple[Path, Path]:
    """Target and draft model, float32, as folders that any loader takes; no output ends before ``max_tokens``."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, bos_token_id=1, eos_token_id=None,
        initializer_range=0.2, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    target = _write(folder / "target", model)
    with torch.no_grad():
        for weights in model.parameters():
            weights.add_(torch.randn_like(weights) * NOISE)
    return target, _write(folder / "draft", model)


def _write(folder: Path, model: Any) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model.save_pretrained(folder)
    words = {f"t{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0", bos_token="t1")
    fast.save_pretrained(folder)
    return folder

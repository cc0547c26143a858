"""Tiny real Hugging Face checkpoints.

The *chain* models' next-token logits depend only on the last token: all attention and MLP outputs are zero and the
embeddings one-hot, so that the right ids are known by hand while the normal loader, KV cache and batches run. They say
nothing about what is in the KV; for that there is ``random_llama``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

torch.set_num_threads(1)  # these models are so small that threads would only wait for one another

VOCAB = 64
EOS = 2
CONTEXT = 512
CHAIN_A = (9, 10, 11, 3, 20, 21, 22, 23, 24, EOS, *range(30, 39))  # the last one is followed by itself
P = {50: 0.2, 51: 0.4, 52: 0.3, 53: 0.1}
Q = {50: 0.4, 51: 0.3, 52: 0.2, 53: 0.1}

Distribution = Mapping[int, float]


def write_checkpoint(folder: Path, model: PreTrainedModel) -> Path:
    """Model and tokenizer as a folder that any loader takes. Token i is the word ``t<i>``; 0 unknown, 1 BOS, 2 EOS."""
    model.save_pretrained(folder)
    words = {f"t{i}": i for i in range(model.config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0", bos_token="t1", eos_token="t2")
    fast.save_pretrained(folder)
    return folder


def chain_model(
    following: Mapping[int, Distribution], otherwise: Distribution, *, nan_after: int = -1
) -> LlamaForCausalLM:
    """``following[i]`` is the next token's distribution after token i; 'otherwise' holds for tokens it doesn't name.

    Everything after a token ``nan_after`` has NaN logits: its embedding is NaN, which reaches the KV.
    """
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=VOCAB,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-12,
        bos_token_id=1,
        eos_token_id=EOS,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    scale = math.sqrt(VOCAB)  # what the final norm makes of a one-hot vector
    head = torch.full((VOCAB, VOCAB), -1e4 / scale)  # probability exactly 0, in float64 too
    for last in range(VOCAB):
        for token, probability in following.get(last, otherwise).items():
            head[token, last] = math.log(probability) / scale
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(VOCAB))
        if nan_after >= 0:
            model.model.embed_tokens.weight[nan_after] = math.nan
        model.lm_head.weight.copy_(head)
    return model


def edges(*chain: int) -> dict[int, Distribution]:
    return {a: {b: 1.0} for a, b in zip(chain, (*chain[1:], chain[-1]), strict=True)}


def random_model(vocab_size: int = VOCAB, seed: int = 0, layers: int = 3) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=layers,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=1,
        eos_token_id=EOS,
        initializer_range=0.2,  # peaked enough that greedy output isn't one token for ever
    )
    return LlamaForCausalLM(config).eval()


Checkpoint = Callable[[str], Path]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A checkpoint's folder by name: chainA, targetP, draftQ, nan20, cyc, random_llama. Written on first use."""
    builders: dict[str, Callable[[], PreTrainedModel]] = {
        "chainA": lambda: chain_model(edges(*CHAIN_A), {9: 1.0}),
        "targetP": lambda: chain_model({}, P),
        "draftQ": lambda: chain_model({}, Q),
        "nan20": lambda: chain_model(edges(*CHAIN_A), {9: 1.0}, nan_after=20),
        "cyc": lambda: chain_model({**edges(*range(10, 20)), 19: {10: 1.0}}, {10: 1.0}),
        "random_llama": random_model,
    }
    written: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in written:
            written[name] = write_checkpoint(tmp_path_factory.mktemp(name), builders[name]())
        return written[name]

    return get


@pytest.fixture(scope="session")
def chainA(checkpoint: Checkpoint) -> Path:
    """9>10>11>3>20>21>22>23>24>2(EOS)>30>31>…>38. Greedy on [5, 9] gives 10 11 3 20 21 22 23 24 2."""
    return checkpoint("chainA")


@pytest.fixture(scope="session")
def targetP(checkpoint: Checkpoint) -> Path:
    """(.2, .4, .3, .1) on ids 50..53 after any token."""
    return checkpoint("targetP")


@pytest.fixture(scope="session")
def draftQ(checkpoint: Checkpoint) -> Path:
    """(.4, .3, .2, .1) on ids 50..53 after any token."""
    return checkpoint("draftQ")


@pytest.fixture(scope="session")
def nan20(checkpoint: Checkpoint) -> Path:
    """chainA, but every logit is NaN once 20 has been seen."""
    return checkpoint("nan20")


@pytest.fixture(scope="session")
def cyc(checkpoint: Checkpoint) -> Path:
    """10>11>…>19>10 for ever."""
    return checkpoint("cyc")


@pytest.fixture(scope="session")
def random_llama(checkpoint: Checkpoint) -> Path:
    """Random weights, float32, 3 layers, 6 heads over 2 KV heads, V = 64, context 512: what the KV holds matters."""
    return checkpoint("random_llama")

"""HfDecoder against transformers' own forward pass, over many architectures."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

from sdcp_mono.runners import hf
from sdcp_mono.runners.decoder import RaggedBatch
from sdcp_mono.runners.hf import HfDecoder
from sdcp_mono.runners.paged import Feed, PagedModel

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
WINDOW = 9  # shorter than the sequences below, longer than a verification

FAMILIES: dict[str, Any] = {
    "llama": lambda: tf.LlamaConfig(**SMALL),
    "llama-rope-llama3": lambda: tf.LlamaConfig(
        **SMALL,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "qwen2": lambda: tf.Qwen2Config(**SMALL),
    "qwen3": lambda: tf.Qwen3Config(**SMALL, head_dim=8),
    "qwen3-moe": lambda: tf.Qwen3MoeConfig(**SMALL, head_dim=8, num_experts=4, num_experts_per_tok=2),
    "mistral-sliding": lambda: tf.MistralConfig(**SMALL, sliding_window=WINDOW),
    "gemma2": lambda: tf.Gemma2Config(**SMALL, head_dim=8, sliding_window=WINDOW, query_pre_attn_scalar=11),
    "gemma3": lambda: tf.Gemma3TextConfig(**SMALL, head_dim=8, sliding_window=WINDOW),
    "phi3": lambda: tf.Phi3Config(**SMALL),
    "olmo2": lambda: tf.Olmo2Config(**SMALL),
    "granite": lambda: tf.GraniteConfig(**SMALL, attention_multiplier=0.3),
    "gemma4": lambda: tf.Gemma4TextConfig(**SMALL, head_dim=8, sliding_window=WINDOW),
    "mixtral": lambda: tf.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
    "cohere2": lambda: tf.Cohere2Config(**SMALL, sliding_window=WINDOW),
    "smollm3": lambda: tf.SmolLM3Config(**SMALL),
    "starcoder2": lambda: tf.Starcoder2Config(**SMALL, sliding_window=WINDOW),
    "gpt-neox": lambda: tf.GPTNeoXConfig(**{k: v for k, v in SMALL.items() if k != "num_key_value_heads"}),
    "gpt2": lambda: tf.GPT2Config(
        vocab_size=64, n_embd=48, n_layer=3, n_head=6, n_positions=128, initializer_range=0.2
    ),
    "deepseek-v3": lambda: tf.DeepseekV3Config(
        **{**SMALL, "num_key_value_heads": 6},
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
    ),
}


def build(config: tf.PretrainedConfig, attention: str = "eager", seed: int = 1) -> tf.PreTrainedModel:
    torch.manual_seed(seed)
    return tf.AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention).eval()


@torch.inference_mode()
def reference(model: tf.PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """transformers' own logits for every position, (n, V), one sequence at a time, no cache."""
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


def tokens(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, 64, length).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_pass_equals_transformers(family: str) -> None:
    """Prefill of three sequences in one pass, then verification of 1, 5 and 3 rows that joins them all."""
    config = FAMILIES[family]()
    plain = build(config)
    paged = PagedModel(HfDecoder(build(config)), b"x", blocks=40, block_size=4, token_budget=128)
    texts = [tokens(n, n) for n in (30, 17, 5)]
    for name, text in zip("abc", texts, strict=True):
        assert paged.admit(name.encode(), len(text) + 8)
    first = paged.feed([Feed(n.encode(), t, len(t), (), len(t)) for n, t in zip("abc", texts, strict=True)])
    for text, got in zip(texts, first, strict=True):
        assert got is not None
        torch.testing.assert_close(got, reference(plain, text), atol=1e-4, rtol=0)
    guesses = [(), tuple(tokens(4, 50)), tuple(tokens(2, 51))]
    second = paged.feed(
        [Feed(n.encode(), t, len(t), g, len(g) + 1) for n, t, g in zip("abc", texts, guesses, strict=True)]
    )
    for text, guess, got in zip(texts, guesses, second, strict=True):
        assert got is not None
        torch.testing.assert_close(got, reference(plain, [*text, *guess])[len(text) - 1 :], atol=1e-4, rtol=0)


def test_greedy_equals_generate(random_llama: Path) -> None:
    plain = tf.AutoModelForCausalLM.from_pretrained(random_llama, dtype=torch.float32)
    paged = PagedModel(HfDecoder.load(random_llama), b"x", blocks=40)
    prompt = tokens(20, 3)
    want = plain.generate(torch.tensor([prompt]), max_new_tokens=60, do_sample=False, eos_token_id=None)[0].tolist()
    assert paged.admit(b"s", 80)
    text = list(prompt)
    while len(text) < 80:
        (logits,) = paged.feed([Feed(b"s", text, len(text))])
        assert logits is not None
        text.append(int(logits[-1].argmax()))
    assert text == want
    assert len(set(text[20:])) > 5


def test_bfloat16_runs_and_counts_its_bytes(random_llama: Path) -> None:
    single, half = HfDecoder.load(random_llama), HfDecoder.load(random_llama, dtype=torch.bfloat16)
    assert single.kv_bytes_per_token == 3 * 2 * 2 * 8 * 4  # layers, K and V, KV heads, head width, bytes
    assert half.kv_bytes_per_token * 2 == single.kv_bytes_per_token
    assert (half.vocab_size, half.context) == (64, 512)
    paged = PagedModel(half, b"x", blocks=4)
    text = tokens(20, 1)
    assert paged.admit(b"s", 20)
    (logits,) = paged.feed([Feed(b"s", text, 20, (), 20)])
    assert logits is not None
    assert logits.dtype == torch.float32
    want = reference(tf.AutoModelForCausalLM.from_pretrained(random_llama, dtype=torch.bfloat16), text).float()
    assert (logits - want).abs().max() < 0.05 * want.abs().max()


def test_attention_sinks_are_refused() -> None:
    config = tf.GptOssConfig(**SMALL, head_dim=8, num_local_experts=2, num_experts_per_tok=1)
    with pytest.raises(ValueError, match="s_aux"):
        HfDecoder(build(config))


def test_chunked_attention_is_refused() -> None:
    config = tf.Llama4TextConfig(
        **SMALL,
        head_dim=8,
        intermediate_size_mlp=64,
        num_local_experts=1,
        attention_chunk_size=8,
        no_rope_layers=[1, 1, 1],
    )
    with pytest.raises(ValueError, match="unsupported model"):
        HfDecoder(build(config))


def test_state_space_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="unsupported model"):
        HfDecoder(tf.MambaForCausalLM(tf.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4)))
    with pytest.raises(ValueError, match=r"layers without attention: \[0, 1, 2\]"):
        HfDecoder(build(tf.Qwen3NextConfig(**SMALL, head_dim=8)))


def test_bidirectional_attention_is_refused() -> None:
    config = tf.Gemma3TextConfig(**SMALL, head_dim=8, sliding_window=WINDOW, use_bidirectional_attention=True)
    with pytest.raises(ValueError, match="unsupported model"):
        HfDecoder(build(config))


def test_encoder_decoders_are_refused() -> None:
    config = tf.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4)
    with pytest.raises(ValueError, match="encoder-decoder"):
        HfDecoder(tf.T5ForConditionalGeneration(config))


def test_growing_rope_caps_the_context() -> None:
    """Past the trained length such models' angles depend on the longest neighbour in the batch."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 64,
        "factor": 2.0,
    }
    decoder = HfDecoder(build(tf.Phi3Config(**SMALL, original_max_position_embeddings=64, rope_parameters=rope)))
    assert decoder.context == 64


def flash_attn_varlen_func(  # what flash-attn 2 documents, in plain torch
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, block_table=None,
):  # fmt: skip
    assert causal
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    out = torch.empty(*q.shape[:2], v.shape[-1])
    for s in range(len(cu_seqlens_q) - 1):
        a, b = int(cu_seqlens_q[s]), int(cu_seqlens_q[s + 1])
        c, d = int(cu_seqlens_k[s]), int(cu_seqlens_k[s + 1])
        assert b - a <= max_seqlen_q
        assert d - c <= max_seqlen_k
        if block_table is None:
            keys, values = k[c:d], v[c:d]
        else:
            assert block_table.dtype == torch.int32
            assert k.shape[1] % 256 == 0
            keys, values = (
                k[block_table[s].long()].flatten(0, 1)[: d - c],
                v[block_table[s].long()].flatten(0, 1)[: d - c],
            )
        group = q.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q[a:b], keys) * softmax_scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        row = torch.arange(b - a)[:, None] + (d - c) - (b - a)
        column = torch.arange(d - c)
        hidden = column > row
        if window_size[0] >= 0:
            hidden |= column < row - window_size[0]
        out[a:b] = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)
    return out


@pytest.mark.parametrize("block_size", [4, 256])
@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral-sliding"])
def test_flash_attn_is_called_as_it_documents(family: str, block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU needed: the same passes through a stand-in that follows flash-attn's documentation."""
    config = FAMILIES[family]()
    decoder = HfDecoder(build(config))
    monkeypatch.setattr(decoder, "flash", flash_attn_varlen_func)
    paged = PagedModel(decoder, b"x", blocks=20, block_size=block_size)
    texts = [tokens(n, n) for n in (30, 17)]
    for name, text in zip("ab", texts, strict=True):
        assert paged.admit(name.encode(), len(text) + 8)
    for extra in ((), (7, 8, 9)):
        work = [Feed(n.encode(), t, len(t), extra, len(extra) + 1) for n, t in zip("ab", texts, strict=True)]
        for text, got in zip(texts, paged.feed(work), strict=True):
            assert got is not None
            want = reference(build(config), [*text, *extra])[len(text) - 1 :]
            torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def test_flash_attn_needs_a_gpu_and_the_package() -> None:
    assert torch.cuda.is_available() or hf.flash_attention() is None


def test_scattered_blocks_equal_contiguous_ones(random_llama: Path) -> None:
    """The same rows through a shuffled block table."""
    decoder = HfDecoder.load(random_llama)
    text = np.asarray(tokens(14, 9), np.int32)
    results = []
    for table in ([0, 1, 2, 3], [6, 1, 7, 2]):
        decoder.allocate(8, 4)
        where = np.arange(14, dtype=np.int32)
        blocks = np.asarray(table, np.int32)
        results.append(
            decoder.forward(
                RaggedBatch(
                    token_ids=text,
                    positions=where,
                    query_starts=np.asarray([0, 14], np.int32),
                    context=np.asarray([14], np.int32),
                    block_tables=blocks[None],
                    slots=blocks[where // 4] * 4 + where % 4,
                    logit_rows=where,
                )
            )
        )
    torch.testing.assert_close(results[0], results[1], atol=1e-6, rtol=0)


def test_packed_linears_give_the_same_logits(random_llama: Path) -> None:
    text = tokens(20, 6)
    want = reference(tf.AutoModelForCausalLM.from_pretrained(random_llama, dtype=torch.float32), text)
    paged = PagedModel(HfDecoder.load(random_llama, pack="float32"), b"x", blocks=4)
    assert paged.admit(b"s", 20)
    (got,) = paged.feed([Feed(b"s", text, 20, (), 20)])
    assert got is not None
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)

"""The promise (design, section 6): with rule 1 the committed tokens equal plain decoding of the same engine."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize("m", [1, 2, 4, 8])
@pytest.mark.parametrize("draft", ["ngram", "quantized", "self"])
@pytest.mark.parametrize("together", [1, 8])
def test_greedy_output_equals_plain_decoding(
    engine: Any, prompts: Any, plain: Any, draft: str, m: int, together: int
) -> None:
    """64 prompts, alone and eight at a time: as one ends the next one joins, so neighbours come and go."""
    node = engine.node(draft, m=m)
    outputs = engine.run(node, [engine.request(prompt) for prompt in prompts], together)
    differ = [
        i for i, (a, b) in enumerate(zip(outputs, plain, strict=True)) if (a.tokens, a.finish) != (b.tokens, b.finish)
    ]
    assert differ == []
    drafted = sum(bool(info.proposed) for output in outputs for info in output.rounds)
    accepted = sum(info.accepted for output in outputs for info in output.rounds)
    assert drafted > 0
    assert accepted > 0


def test_plain_decoding_in_a_crowd_equals_plain_decoding_alone(engine: Any, prompts: Any, plain: Any) -> None:
    outputs = engine.run(engine.node(), [engine.request(prompt) for prompt in prompts], together=16)
    assert [output.tokens for output in outputs] == [output.tokens for output in plain]


def test_float32_equals_transformers_generate(
    smollm2_float32: Any, prompts: Any, tmp_path: Any, load_engine: Any
) -> None:
    import torch
    import transformers

    engine = load_engine(smollm2_float32, tmp_path, ("quantized",), dtype="float32", kv_memory_mb=256)
    outputs = engine.run(engine.node("quantized"), [engine.request(prompt, 16) for prompt in prompts], together=8)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(smollm2_float32.path, dtype=torch.float32)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=16, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
        assert output.tokens == tuple(expected[0, len(prompt) :].tolist())

"""The fused decoder against transformers' own models, and against itself: batch invariance to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from sdcp_mono.kernels import native
from sdcp_mono.kernels.packed import round_weight
from sdcp_mono.runners.decoder import RaggedBatch
from sdcp_mono.runners.fused import FusedDecoder, supports

pytestmark = pytest.mark.skipif(not native.available(), reason="the kernels are not built")

BASE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 80, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "initializer_range": 0.2,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": False, "hidden_size": 96, "num_attention_heads": 6}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "hidden_size": 48, "head_dim": 16}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "hidden_size": 96}),
    "llama-rope-llama3": ("llama", {"rope_parameters": LLAMA3, "hidden_size": 96}),
    "llama-rope-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
                                    "hidden_size": 96}),
    "llama-one-kv-head": ("llama", {"num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 70,
                                    "head_dim": 10}),
    "llama-no-groups": ("llama", {"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 64,
                                  "head_dim": 72}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 16}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
}  # fmt: skip
SIZE = 16  # tokens of a block
BLOCKS = 96
Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Checkpoints with random weights (norms and biases too, so that a forgotten one shows), made once each."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            kind, changes = MODELS[name]
            torch.manual_seed(len(made))
            config = AutoConfig.for_model(kind, **BASE | changes)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.ndim == 1:
                        parameter += torch.randn_like(parameter) * 0.3
            made[name] = tmp_path_factory.mktemp(name)
            model.save_pretrained(made[name])
        return made[name]

    return make


class Pages:
    """Sequences over one decoder, their blocks in a shuffled order."""

    def __init__(self, decoder: FusedDecoder, seed: int = 0) -> None:
        self.decoder = decoder
        decoder.allocate(BLOCKS, SIZE)
        self.free = [int(b) for b in np.random.default_rng(seed).permutation(BLOCKS)]
        self.tables: dict[Any, list[int]] = {}
        self.length: dict[Any, int] = {}

    def batch(self, feeds: Mapping[Any, Sequence[int]]) -> RaggedBatch:
        tokens: list[int] = []
        positions: list[int] = []
        starts, context, slots = [0], [], []
        for name, ids in feeds.items():
            table, start = self.tables.setdefault(name, []), self.length.get(name, 0)
            end = start + len(ids)
            while len(table) * SIZE < end:
                table.append(self.free.pop())
            where = np.arange(start, end)
            tokens += ids
            positions += where.tolist()
            slots += [table[p // SIZE] * SIZE + p % SIZE for p in where]
            starts.append(len(tokens))
            context.append(end)
            self.length[name] = end
        tables = np.full((len(feeds), max(-(-c // SIZE) for c in context)), -1)
        for row, name, length in zip(tables, feeds, context, strict=True):
            row[: -(-length // SIZE)] = self.tables[name][: -(-length // SIZE)]
        arrays = (tokens, positions, starts, context, tables, slots, range(len(tokens)))
        return RaggedBatch(*(np.asarray(a, dtype=np.int32) for a in arrays))

    def feed(self, feeds: Mapping[Any, Sequence[int]]) -> dict[Any, np.ndarray]:
        """One pass; the logits (rows, V) of each sequence's new rows."""
        batch = self.batch(feeds)
        logits = self.decoder.forward(batch).numpy().copy()
        return {name: logits[batch.query_starts[i] : batch.query_starts[i + 1]] for i, name in enumerate(feeds)}

    def feed_in_chunks(self, name: Any, ids: Sequence[int], chunk: int) -> np.ndarray:
        return np.concatenate([self.feed({name: ids[i : i + chunk]})[name] for i in range(0, len(ids), chunk)])


def ids(count: int, seed: int, below: int = 96) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, below, count)]


def reference(path: Path, tokens: Sequence[int]) -> Any:
    """transformers' float32 logits (T, V)."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].numpy()


# ---- against transformers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers_for_ragged_batches_and_chunks(folder: Folder, name: str) -> None:
    path = folder(name)
    pages = Pages(FusedDecoder.from_pretrained(path, "float32", threads=2))
    texts = {"a": ids(300, 1), "b": ids(37, 2), "c": ids(1, 3)}
    first = pages.feed({"a": texts["a"][:170], "b": texts["b"][:5]})
    second = pages.feed({"c": texts["c"], "b": texts["b"][5:], "a": texts["a"][170:299]})
    third = pages.feed({"a": texts["a"][299:]})
    got = {
        "a": np.concatenate([first["a"], second["a"], third["a"]]),
        "b": np.concatenate([first["b"], second["b"]]),
        "c": second["c"],
    }
    for sequence, tokens in texts.items():
        np.testing.assert_allclose(got[sequence], reference(path, tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_greedy_tokens_equal_transformers_generate(folder: Folder, name: str) -> None:
    path, prompt = folder(name), ids(20, 7)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    want = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None)[0].tolist()
    pages = Pages(FusedDecoder.from_pretrained(path, "float32", threads=2))
    got, new = list(prompt), prompt
    while len(got) < len(want):
        new = [int(pages.feed({0: new})[0][-1].argmax())]
        got += new
    assert got == want


@pytest.mark.parametrize(("weights", "error"), [("bfloat16", 0.02), ("int8", 0.1), ("int4", 0.1)])
def test_logits_are_those_of_the_rounded_weights(folder: Folder, weights: Any, error: float) -> None:
    """Against transformers with the same weights rounded: what is left is the rounding of activations."""
    path, tokens = folder("llama"), ids(64, 4)
    got = Pages(FusedDecoder.from_pretrained(path, weights, threads=2)).feed({0: tokens})[0]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear):
                head = name == "lm_head" and weights == "int4"  # its head is int8
                module.weight.copy_(round_weight(module.weight, "int8" if head else weights))
        want = model(torch.tensor([tokens])).logits[0].numpy()
    assert np.linalg.norm(got - want) < error * np.linalg.norm(want)


@pytest.mark.parametrize("isa", ["generic", "avx2"])
def test_every_instruction_set_computes_the_same_model(folder: Folder, tmp_path: Path, isa: str) -> None:
    path, tokens = folder("qwen3"), ids(200, 5)
    script = (
        "import sys, numpy as np; sys.path[:0] = eval(sys.argv[1]); import test_fused as t\n"
        "pages = t.Pages(t.FusedDecoder.from_pretrained(sys.argv[2], 'float32', threads=2))\n"
        "np.save(sys.argv[3], pages.feed({0: t.ids(200, 5)})[0])"
    )
    paths = repr([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-c", script, paths, str(path), str(tmp_path / "logits.npy")]
    subprocess.run(command, check=True, timeout=100, env=os.environ | {"SDCP_ISA": isa})
    np.testing.assert_allclose(np.load(tmp_path / "logits.npy"), reference(path, tokens), atol=1e-4, rtol=1e-4)


# ---- batch invariance -----------------------------------------------------------------------------------------------

every_format = pytest.mark.parametrize("weights", list(native.FORMATS))


@every_format
@pytest.mark.parametrize("name", ["llama", "qwen3", "llama-one-kv-head"])
def test_rows_do_not_depend_on_chunks_neighbours_or_threads(folder: Folder, name: str, weights: Any) -> None:
    tokens = ids(290, 11)
    path = folder(name)
    alone = Pages(FusedDecoder.from_pretrained(path, weights, threads=1))
    want = alone.feed_in_chunks("x", tokens, 1)
    for threads in (1, 2, 3):
        for chunk in (7, 64, 290):
            pages = Pages(FusedDecoder.from_pretrained(path, weights, threads=threads), seed=chunk)
            np.testing.assert_array_equal(pages.feed_in_chunks("x", tokens, chunk), want)
        pages = Pages(FusedDecoder.from_pretrained(path, weights, threads=threads))
        others = {n: ids(9 + n, n) for n in range(16)}
        pages.feed(others)
        pages.feed({"x": tokens[:280]})
        mixed = pages.feed({n: [n] for n in range(8)} | {"x": tokens[280:]} | {n: [n] * 3 for n in range(8, 16)})
        np.testing.assert_array_equal(mixed["x"], want[280:])


@every_format
def test_roll_back_and_rewrite_leave_no_trace(folder: Folder, weights: Any) -> None:
    tokens = ids(150, 21)
    pages = Pages(FusedDecoder.from_pretrained(folder("llama"), weights, threads=2))
    want = pages.feed({"x": tokens})["x"]
    pages.feed({"y": tokens[:125] + ids(20, 22)})  # 20 rejected tokens
    pages.length["y"] = 125
    got = pages.feed({"y": tokens[125:]})["y"]
    np.testing.assert_array_equal(got, want[125:])


def test_logits_come_for_the_wanted_rows_only_and_in_order(folder: Folder) -> None:
    pages = Pages(FusedDecoder.from_pretrained(folder("llama"), "bfloat16", threads=2))
    batch = pages.batch({0: ids(10, 1), 1: ids(4, 2)})
    every = pages.decoder.forward(batch).numpy().copy()
    some = replace(batch, logit_rows=np.asarray([2, 9, 13], np.int32))
    np.testing.assert_array_equal(pages.decoder.forward(some).numpy(), every[[2, 9, 13]])
    none = replace(batch, logit_rows=np.zeros(0, np.int32))
    assert pages.decoder.forward(none).shape == (0, 96)


def test_the_pool_of_one_pass_may_differ_from_the_next(folder: Folder) -> None:
    pages = Pages(FusedDecoder.from_pretrained(folder("llama"), "bfloat16", threads=1))
    batch = pages.batch({0: ids(300, 1)})
    want = pages.decoder.forward(batch).numpy().copy()
    for threads in (4, 1, 2):
        native.set_threads(threads)
        np.testing.assert_array_equal(pages.decoder.forward(batch).numpy(), want)


# ---- faults ---------------------------------------------------------------------------------------------------------


@every_format
def test_a_nan_reaches_only_the_rows_that_see_it(folder: Folder, tmp_path: Path, weights: Any) -> None:
    """Token 95's embedding is NaN. Clean tokens are those below 95."""
    state = load_file(folder("llama") / "model.safetensors")
    state["model.embed_tokens.weight"][95] = float("nan")
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folder("llama") / "config.json").read_text())
    tokens, other = ids(140, 31, 95), ids(33, 32, 95)
    decoder = FusedDecoder.from_pretrained(tmp_path, weights, threads=2)
    pages = Pages(decoder)
    want = pages.feed({"x": tokens, "y": other})
    pages = Pages(decoder)
    poisoned = [*tokens[:130], 95, *tokens[131:]]
    got = pages.feed({"x": poisoned, "y": other})
    np.testing.assert_array_equal(got["y"], want["y"])
    np.testing.assert_array_equal(got["x"][:130], want["x"][:130])
    assert np.isnan(got["x"][130:]).all(axis=1).all(), "a row that sees NaN must show it"
    pages.length["x"] = 130  # roll back: its block still holds NaN behind the end
    np.testing.assert_array_equal(pages.feed({"x": tokens[130:]})["x"], want["x"][130:])


BAD = {
    "token_ids": (96, -1, 2**31 - 1),
    "positions": (-1, 14, 400),
    "query_starts": (3, -5, 10**6),
    "context": (0, -3, 513, 500),
    "block_tables": (-1, BLOCKS, -(2**31)),
    "slots": (-1, BLOCKS * SIZE),
    "logit_rows": (-1, 14),
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in BAD.items() for v in values])
def test_a_batch_that_makes_no_sense_is_refused_by_field_and_changes_nothing(
    folder: Folder, field: str, value: int
) -> None:
    pages = Pages(FusedDecoder.from_pretrained(folder("llama"), "float32", threads=2))
    batch = pages.batch({0: ids(10, 1), 1: ids(4, 2)})
    before = [bytes(pages.decoder.read_block(b)) for b in range(BLOCKS)]
    array = getattr(batch, field).copy()
    array.flat[0] = value
    # A context longer than the table is a fault of either.
    with pytest.raises(ValueError, match=r"block_tables|context" if value == 500 else field):
        pages.decoder.forward(replace(batch, **{field: array}))
    assert [bytes(pages.decoder.read_block(b)) for b in range(BLOCKS)] == before
    if field != "logit_rows":  # a pass may want none
        with pytest.raises(ValueError, match=r"expected|out of range"):
            pages.decoder.forward(replace(batch, **{field: array[:0]}))


def test_block_size_must_be_a_multiple_of_16(folder: Folder) -> None:
    decoder = FusedDecoder.from_pretrained(folder("llama"), "float32")
    with pytest.raises(RuntimeError, match="allocate"):
        decoder.forward(Pages.__new__(Pages))  # type: ignore[arg-type]
    for size in (0, 8, 24, -16):
        with pytest.raises(ValueError, match="block_size"):
            decoder.allocate(4, size)


# ---- blocks and loading ---------------------------------------------------------------------------------------------


@every_format
def test_blocks_can_be_copied_read_and_written(folder: Folder, weights: Any) -> None:
    decoder = FusedDecoder.from_pretrained(folder("qwen3"), weights, threads=2)
    tokens = ids(40, 41)
    pages = Pages(decoder)
    want = pages.feed({"x": tokens})["x"][32:]
    saved = [bytes(decoder.read_block(b)) for b in pages.tables["x"][:2]]
    assert len(saved[0]) == decoder.block_bytes == SIZE * decoder.kv_bytes_per_token
    pages = Pages(decoder, seed=9)  # zeroed
    pages.tables["y"] = [3, 4, 5]
    decoder.write_block(3, saved[0])
    decoder.write_block(8, saved[1])
    decoder.copy_block(8, 4)
    pages.length["y"] = 32
    np.testing.assert_array_equal(pages.feed({"y": tokens[32:]})["y"], want)
    with pytest.raises(ValueError, match="data"):
        decoder.write_block(3, saved[0][:-1])
    for bad in (-1, BLOCKS):
        with pytest.raises(IndexError):
            decoder.read_block(bad)


def test_supports_exactly_what_is_handled(folder: Folder) -> None:
    config = json.loads((folder("llama") / "config.json").read_text())
    for name in MODELS:
        assert supports(json.loads((folder(name) / "config.json").read_text())), name
    old_names = {k: v for k, v in config.items() if k != "rope_parameters"} | {"rope_theta": 1e4, "rope_scaling": None}
    assert supports(old_names | {"torch_dtype": "bfloat16", "_name_or_path": "x"})
    for change in (
        {"architectures": ["LlamaForSequenceClassification"]},
        {"architectures": ["GemmaForCausalLM"]},
        {"architectures": None},
        {"model_type": "gemma"},
        {"hidden_act": "gelu"},
        {"sliding_window": 128, "use_sliding_window": True},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"quantization_config": {"bits": 4}},
        {"logit_scale": 0.5},
        {"attn_logit_softcapping": 50.0},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"pretraining_tp": 2},
        {"head_dim": 15},
        {"num_key_value_heads": 4},
    ):
        assert not supports(config | change), change
    mistral = json.loads((folder("mistral") / "config.json").read_text())
    assert not supports(mistral | {"sliding_window": 128})
    assert supports(mistral | {"sliding_window": 512})
    assert not supports({})


def test_loading_names_the_tensor_that_is_wrong(folder: Folder, tmp_path: Path) -> None:
    state = load_file(folder("qwen2") / "model.safetensors")
    (tmp_path / "config.json").write_text((folder("qwen2") / "config.json").read_text())
    name = "model.layers.1.self_attn.k_proj.bias"
    for broken in (
        {k: v for k, v in state.items() if k != name},
        state | {name: state[name][:-1].clone()},
        {k: v for k, v in state.items() if k != name} | {name + "_2": state[name]},
    ):
        save_file(broken, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=name):
            FusedDecoder.from_pretrained(tmp_path, "float32")
    save_file(state | {"model.layers.0.self_attn.g_proj.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="g_proj"):
        FusedDecoder.from_pretrained(tmp_path, "float32")
    with pytest.raises(ValueError, match="weights"):
        FusedDecoder.from_pretrained(folder("qwen2"), "fp8")  # type: ignore[arg-type]


def test_loading_reports_progress_to_the_end(folder: Folder) -> None:
    seen: list[tuple[int, int]] = []
    decoder = FusedDecoder.from_pretrained(folder("llama"), progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > 96 * 96
    assert (decoder.vocab_size, decoder.context, decoder.kv_dtype) == (96, 512, torch.bfloat16)
    assert decoder.kv_bytes_per_token == 2 * 2 * 2 * 32 * 2  # layers, KV heads, K and V, head, bytes

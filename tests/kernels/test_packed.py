"""PackedLinear and pack_linears, compiled and with the torch fallback."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from sdcp_mono.kernels import native
from sdcp_mono.kernels.native import FORMATS, Format
from sdcp_mono.kernels.packed import PackedLinear, available, pack_linears, round_activations, round_weight

# Relative error against float32 nn.Linear on normal weights and activations, with a margin of a quarter.
ERROR: dict[Format, float] = {"float32": 1e-6, "bfloat16": 0.003, "int8": 0.009, "int4": 0.1}


@pytest.fixture(params=["native", "torch"], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setenv("SDCP_KERNELS", "torch")
    elif not native.available():
        pytest.skip("the kernels aren't compiled here")
    name: str = request.param
    return name


def linear(n: int, k: int, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(n * 1000 + k)
    module = nn.Linear(k, n, bias=bias)
    nn.init.normal_(module.weight, std=0.05)
    return module


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


def test_available_follows_the_environment(backend: str) -> None:
    assert available() == (backend == "native")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("n", "k", "bias"), [(96, 64, True), (33, 100, False), (7, 31, True)])
def test_packed_linear_equals_linear(format: Format, n: int, k: int, bias: bool) -> None:
    module = linear(n, k, bias=bias)
    packed = PackedLinear(module.weight, module.bias, format)
    x = torch.randn(5, k)
    y = packed(x)
    assert relative(y, module(x)) < ERROR[format]
    exact = round_activations(x, format).double() @ round_weight(module.weight, format).double().T
    assert relative(y, exact + module.bias if bias else exact) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (3,), (1, 4), (2, 3, 5), (0,), (2, 0, 1)])
def test_any_leading_shape_and_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    module = linear(10, 48)
    packed = PackedLinear(module.weight, module.bias, "bfloat16")
    x = torch.randn(*shape, 48).to(dtype)
    y = packed(x)
    assert (y.shape, y.dtype) == ((*shape, 10), dtype)
    if y.numel():
        assert relative(y, module(x.float())) < 0.006


def test_strided_input() -> None:
    packed = PackedLinear(linear(10, 48).weight)
    x = torch.randn(48, 6).T
    assert torch.equal(packed(x), packed(x.contiguous()))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_any_dtype(format: Format, dtype: torch.dtype) -> None:
    weight = linear(40, 70).weight.detach().to(dtype)
    x = torch.randn(3, 70)
    assert torch.equal(PackedLinear(weight, None, format)(x), PackedLinear(weight.float(), None, format)(x))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("n", "k"), [(96, 64), (161, 577)])
def test_batch_invariance(format: Format, n: int, k: int) -> None:
    """Also what torch's own matmul does here at one fixed shape."""
    packed = PackedLinear(linear(n, k).weight, None, format)
    x = torch.randn(200, k)
    whole = packed(x)
    for rows in (*range(1, 34), 64):
        for start in (0, 3, 200 - rows):
            assert torch.equal(packed(x[start : start + rows]), whole[start : start + rows])


@pytest.mark.parametrize("format", FORMATS)
def test_backends_agree(format: Format, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = linear(130, 200)
    x = torch.randn(6, 200)
    y = PackedLinear(module.weight, module.bias, format)(x)
    monkeypatch.setenv("SDCP_KERNELS", "native" if backend == "torch" else "torch")
    assert relative(PackedLinear(module.weight, module.bias, format)(x), y) < 1e-5


def test_errors_name_what_is_wrong() -> None:
    weight = linear(4, 8).weight
    with pytest.raises(ValueError, match="format: 'fp8'"):
        PackedLinear(weight, None, "fp8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weight: "):
        PackedLinear(weight[0])
    with pytest.raises(ValueError, match="in_features 8"):
        PackedLinear(weight)(torch.randn(2, 9))
    with pytest.raises(ValueError, match="format: "):
        pack_linears(nn.Sequential(), "q4")  # type: ignore[arg-type]


@pytest.mark.parametrize("format", FORMATS)
def test_pack_linears_of_a_model_with_a_tied_head(format: Format) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=101,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).requires_grad_(False)
    tokens = torch.arange(12)[None]
    expected = model(tokens).logits
    assert pack_linears(model, format) == 2 * 7 + 1
    assert isinstance(model.lm_head, PackedLinear)
    assert not any(isinstance(module, nn.Linear) for module in model.modules())
    assert relative(model(tokens).logits, expected) < 4 * ERROR[format]
    assert pack_linears(model, format) == 0


def test_pack_linears_keeps_a_shared_module_shared_and_leaves_subclasses() -> None:
    class Adapter(nn.Linear):
        pass

    shared = linear(8, 8)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, nn.ReLU()), "c": Adapter(8, 8)})
    x = torch.randn(3, 8)
    expected = shared(x)
    assert pack_linears(model, "float32") == 1
    assert isinstance(model["a"], PackedLinear)
    assert model["a"] is model["b"][0]  # type: ignore[index]
    assert isinstance(model["c"], Adapter)
    assert relative(model["a"](x), expected) < 1e-6

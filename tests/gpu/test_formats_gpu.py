"""The arithmetic of number formats on a GPU is that of the CPU, bit for bit."""

from __future__ import annotations

import pytest
import torch

from hf_ptq.model.views import WeightView
from hf_ptq.quantization.algorithm import Mse
from hf_ptq.quantization.algorithms import ALGORITHMS
from hf_ptq.quantization.assignment import QuantizedWeight
from hf_ptq.quantization.formats import codecs, encode
from hf_ptq.quantization.formats.description import FORMATS
from hf_ptq.quantization.formats.ranges import Ranges, weight_amax

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

WEIGHT_FORMATS = [name for name, fmt in FORMATS.items() if "weight" in fmt.roles]


def weights() -> torch.Tensor:
    """[6, 256, 256]: heavy tails, an outlier, zeros, the largest values, tiny ones, ties."""
    weight = torch.randn(6, 256, 256, generator=torch.Generator().manual_seed(0)) ** 3
    weight[1, 3, 5] = 1e4
    weight[2, :, ::2] = 0
    weight[3] = 3e38
    weight[4] *= 1e-38
    weight[5] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(256, 32)
    return weight


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_codes_and_scales(name: str, dtype: torch.dtype) -> None:
    fmt, weight = FORMATS[name], weights().to(dtype)
    cpu = encode(fmt, weight, Ranges(weight_amax(weight, fmt)))
    gpu = encode(fmt, weight.cuda(), Ranges(weight_amax(weight.cuda(), fmt)))
    assert [local for local in cpu if not torch.equal(raw(cpu[local]), raw(gpu[local]))] == []
    decode = codecs()[name].decode
    assert torch.equal(raw(decode(cpu)), raw(decode(gpu)))


@pytest.mark.parametrize("name", ["mxfp4", "mxfp6", "mxfp8", "mxint8", "nvfp4", "nvfp4_rotate", "int8_per_token"])
def test_rounded_activations(name: str) -> None:
    values = weights()[:3].bfloat16()
    amax = values.abs().max().float()
    fake_quantize = codecs()[name].fake_quantize
    assert torch.equal(fake_quantize(values.cuda(), amax.cuda()).cpu(), fake_quantize(values, amax))


@pytest.mark.parametrize("spec", [Mse(), Mse(fp8_scale_sweep=True)])
@pytest.mark.parametrize("name", ["nvfp4_static", "int4_block128", "fp8_2d", "fp8"])
def test_searched_ranges(name: str, spec: Mse) -> None:
    weight = weights()[0]
    q = QuantizedWeight(WeightView(("m",), "m", (256, 256)), FORMATS[name], None, "m", "*")
    search = ALGORITHMS["mse"].weight_ranges
    cpu, gpu = search(spec, {q: weight})[q], search(spec, {q: weight.cuda()})[q]
    assert torch.equal(gpu.amax.cpu(), cpu.amax)
    if cpu.block_amax is not None:
        assert gpu.block_amax is not None
        assert torch.equal(gpu.block_amax.cpu(), cpu.block_amax)

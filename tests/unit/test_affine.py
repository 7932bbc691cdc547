"""Keys and values with a bias, and rotated ones: calibrated and rounded as their definition says; not for servers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_attention import IDS, make, with_cache

from hf_ptq.errors import UserError
from hf_ptq.quantization.affine import AffineQuantizer
from hf_ptq.quantization.algorithms import ALGORITHMS
from hf_ptq.quantization.apply import quantizing
from hf_ptq.quantization.formats import codecs
from hf_ptq.quantization.formats.description import FORMATS
from hf_ptq.quantization.formats.nvfp4 import rotated
from hf_ptq.quantization.quantizer import Quantizer
from hf_ptq.quantization.statistics import Statistics

MAX = ALGORITHMS["max"]
CPU = torch.device("cpu")
# Channels with large means of either sign, as keys have them.
MEANS = torch.randn(2, 1, 16, generator=torch.Generator().manual_seed(0)) * 20
KEYS = MEANS + torch.randn(3, 2, 10, 16, generator=torch.Generator().manual_seed(1))


def calibrated(quantizer: Quantizer, batches: list[torch.Tensor]) -> Quantizer:
    quantizers = {"k": quantizer}
    statistics = Statistics(MAX.statistics(quantizers), CPU)
    MAX.start(quantizers, statistics)
    for batch in batches:
        quantizer(batch)
        quantizer(batch)  # the same tensor is seen once
        statistics.commit()
    assert MAX.finish(quantizers, statistics) == []
    return quantizer


@pytest.mark.parametrize("name", ["fp8_affine", "nvfp4_affine"])
def test_bias_and_range(name: str) -> None:
    quantizer = calibrated(AffineQuantizer("k", FORMATS[name], 32), list(KEYS.split(1)))
    assert isinstance(quantizer, AffineQuantizer)
    assert quantizer.bias is not None
    bias = KEYS.double().mean((0, 2))
    assert torch.allclose(quantizer.bias.view(2, 16).double(), bias, rtol=1e-6)
    assert quantizer.amax is not None
    distance = (KEYS - quantizer.bias.view(1, 2, 1, 16)).abs().max()
    assert quantizer.amax == pytest.approx(distance.item(), rel=1e-5)
    assert quantizer.amax < 0.2 * KEYS.abs().max()
    with quantizing([quantizer]):
        rounded = quantizer(KEYS)
    plain = codecs()[name].fake_quantize(KEYS, KEYS.abs().max())
    assert (rounded - KEYS).norm() < 0.35 * (plain - KEYS).norm()


def test_a_channel_that_never_changes_sign_has_its_own_middle() -> None:
    keys = torch.tensor([5.0, 6.0, 7.0]).view(1, 1, 3, 1) * torch.tensor([1.0, -1.0])
    quantizer = calibrated(AffineQuantizer("k", FORMATS["fp8_affine"], 2), [keys])
    assert isinstance(quantizer, AffineQuantizer)
    assert quantizer.bias is not None
    assert quantizer.bias.tolist() == [6.0, -6.0]
    assert quantizer.amax == 1.0


def test_a_nan_in_keys_is_told() -> None:
    keys = KEYS.clone()
    keys[0, 0, 0, 0] = float("nan")
    with pytest.raises(Exception, match="held NaN"):
        calibrated(AffineQuantizer("k", FORMATS["fp8_affine"], 32), [keys])


def test_rotated_keys_have_the_range_of_rotated_keys() -> None:
    keys = torch.randn(2, 2, 8, 64)
    keys[..., 3] *= 50  # an outlier channel
    quantizer = calibrated(Quantizer("k", FORMATS["nvfp4_rotate"]), [keys])
    assert quantizer.amax == rotated(keys).abs().max()
    queries = torch.randn(2, 2, 8, 64)
    with quantizing([quantizer]):
        scores = queries @ quantizer(keys).mT
    assert quantizer.amax is not None
    served = rotated(queries) @ codecs()["nvfp4"].fake_quantize(rotated(keys), quantizer.amax).mT
    assert torch.allclose(scores, served, atol=1e-2, rtol=1e-3)


def relative_error(name: str) -> float:
    model = make("causal", "sdpa")
    quantizers = with_cache(model, name)
    assert all(isinstance(q, AffineQuantizer) == FORMATS[name].has_bias for q in quantizers.values())
    with torch.no_grad():
        plain = model(IDS).logits
        statistics = Statistics(MAX.statistics(quantizers), CPU)
        MAX.start(quantizers, statistics)
        model(IDS)
        statistics.commit()
        MAX.finish(quantizers, statistics)
        with quantizing(quantizers.values()):
            rounded = model(IDS).logits
    return float((rounded - plain).norm() / plain.norm())


@pytest.mark.parametrize("name", ["fp8_affine", "nvfp4_affine", "nvfp4_rotate"])
def test_a_model_computes_with_them(name: str) -> None:
    """On a random model, whose keys have no outliers, about as well as with the plain format."""
    assert 0.5 < relative_error(name) / relative_error(name.partition("_")[0]) < 1.5


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("fp8_affine", "the mean of each channel"),
        ("nvfp4_affine", "the mean of each channel"),
        ("nvfp4_rotate", "the rotation of queries and keys"),
    ],
)
def test_they_are_refused_for_servers(
    name: str, needs: str, tiny: Callable[[str], Path], quantize: Callable[..., Path]
) -> None:
    with pytest.raises(UserError, match=f"keys in {name}: no server reads {needs}, which they need"):
        quantize(tiny("llama"), "fp8", kv_cache_qformat=name, dry_run=True)


def test_latent_attention_has_no_channels_of_keys(tiny: Callable[[str], Path], quantize: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match=r"DeepseekV3Attention: no k_proj and v_proj"):
        quantize(tiny("deepseek_v3"), "fp8", kv_cache_qformat="fp8_affine", dry_run=True)

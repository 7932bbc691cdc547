"""The Triton kernels give the bytes of the torch codecs: stored tensors, rounded weights; their sums are close.

The inputs hold every rule that a kernel could break: ties, zeros of both signs, denormals, ranges that are out of
the fast division's reach, shapes that are no multiple of a tile, views into stacked parameters.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hf_ptq.export.tensors import _encode, _encode_by_parts
from hf_ptq.quantization import formats
from hf_ptq.quantization.formats import codecs
from hf_ptq.quantization.formats.description import FORMATS
from hf_ptq.quantization.formats.ranges import Ranges, weight_amax

if not torch.cuda.is_available():
    pytest.skip("needs CUDA", allow_module_level=True)
kernels = pytest.importorskip("hf_ptq.quantization.formats.kernels")

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
SHAPES = [(1, 256), (40, 48), (3, 17, 272), (2, 33, 528), (5, 768, 2048), (1000, 4096)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
View = Callable[[torch.Tensor], torch.Tensor]


def fillings(shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """fp32 weights of `shape`, each gone wrong in its own way."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    normal = torch.randn(shape, generator=generator, device=DEVICE)
    outlier = normal * 1e-2
    outlier.view(-1)[5] = 1e4
    zeros = normal.clone()
    zeros[..., -1, :] = 0
    zeros[..., 16:32] = -0.0
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0], device=DEVICE)
    index = torch.arange(normal.numel(), device=DEVICE)
    every = (index % 65536).to(torch.int16).view(torch.bfloat16).float()
    return {
        "normal": normal * 0.02,
        "heavy": normal**5,
        "outlier": outlier,
        "zero": torch.zeros_like(normal),
        "negative zero": torch.full_like(normal, -0.0),
        "zeros": zeros,
        "equal": torch.full_like(normal, -0.37),
        "ties": (ties[index % 8].view(shape) * 448).copysign(normal),
        "ties of small scales": (ties[index % 8].view(shape) / 448).copysign(normal),
        "largest": torch.full_like(normal, 3e38),
        "tiny": normal * 1e-30,
        "denormal": normal * 1e-36,
        "wide": normal * torch.exp2(normal * 20),
        "every bf16": torch.where(every.isfinite(), every, 1.0).view(shape),
    }


def same_bytes(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    return torch.equal(ours.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))


def assert_same(
    name: str, weight: torch.Tensor, what: str, view: View = lambda w: w, amax: float | None = None
) -> None:
    layout = codecs()[name].layout(tuple(view(weight).shape))
    found = weight_amax(view(weight), FORMATS[name])
    ranges = Ranges(found if amax is None else torch.full_like(found, amax))
    for keep_rounded in (False, True):
        mine, reference = weight.clone(), weight.clone()
        a, b = ({n: torch.zeros(s, dtype=d, device=DEVICE) for n, (d, s) in layout.items()} for _ in range(2))
        sums = kernels.KERNELS[name](view(mine), ranges.amax, a, keep_rounded)
        expected = _encode_by_parts(FORMATS[name], view(reference), ranges, b, keep_rounded)
        for local in layout:
            assert same_bytes(a[local], b[local]), (what, local)
        assert same_bytes(mine, reference), (what, "the rounded weight" if keep_rounded else "the weight was changed")
        for ours, theirs in zip(sums, expected, strict=True):
            assert (ours.dtype, ours.shape) == (torch.float64, theirs.shape)
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", list(kernels.KERNELS))
def test_the_bytes_are_those_of_torch(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for what, values in fillings(shape).items():
        weight = values.to(dtype)
        if weight.isfinite().all():
            assert_same(name, weight, what)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", list(kernels.KERNELS))
def test_views_are_encoded_where_they_lie(name: str, dtype: torch.dtype) -> None:
    stack = torch.randn((4, 96, 320), device=DEVICE).to(dtype)
    assert_same(name, stack, "rows of a stack", view=lambda w: w[:, 33:81])
    assert_same(name, stack, "experts of a stack", view=lambda w: w[1:3])
    assert_same(name, stack, "transposed", view=lambda w: w.transpose(1, 2))


@pytest.mark.parametrize("amax", [0.5, 6.0, 6.01, 1e4, 1e-25, 1e20])
@pytest.mark.parametrize("name", list(kernels.KERNELS))
def test_the_range_may_be_of_other_weights_too(name: str, amax: float) -> None:
    weight = (torch.randn((3, 64, 512), device=DEVICE) * 0.1).clamp(-0.5, 0.5)
    assert_same(name, weight, "a given range", amax=amax)
    assert_same(name, weight * 1e-40, "denormals under a given range", amax=amax)


@pytest.mark.parametrize("name", list(kernels.KERNELS))
def test_millions_of_quotients_of_full_precision(name: str) -> None:
    """fp32 weights and ranges with random mantissas: each quotient is another case of rounding."""
    for seed in range(4):
        generator = torch.Generator(DEVICE).manual_seed(seed)
        weight = torch.randn((64, 512, 2048), generator=generator, device=DEVICE) * 0.02
        assert_same(name, weight, f"seed {seed}")


def test_the_exporter_takes_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn((8, 768, 2048), device=DEVICE, dtype=torch.bfloat16)
    assert weight.numel() >= formats.SMALLEST_FUSED
    assert kernels.run_on(DEVICE)
    assert formats.fused("nvfp4", weight) is kernels.KERNELS["nvfp4"]
    assert formats.fused("nvfp4", weight[:1]) is None
    assert formats.fused("nvfp4", weight.cpu()) is None
    ranges = Ranges(weight_amax(weight, FORMATS["nvfp4"]))
    ours = _encode(FORMATS["nvfp4"], weight.clone(), ranges, True)
    monkeypatch.setattr("hf_ptq.export.tensors.fused", lambda *_: None)
    theirs = _encode(FORMATS["nvfp4"], weight.clone(), ranges, True)
    assert all(same_bytes(ours[0][local], theirs[0][local]) for local in theirs[0])
    torch.testing.assert_close(ours[1:], theirs[1:], rtol=1e-5, atol=0)


def test_sums_are_the_same_in_every_run() -> None:
    weight = torch.randn((8, 768, 2048), device=DEVICE, dtype=torch.bfloat16)
    ranges = Ranges(weight_amax(weight, FORMATS["nvfp4"]))
    runs = [_encode(FORMATS["nvfp4"], weight, ranges, False)[1:] for _ in range(3)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))

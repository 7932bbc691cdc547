"""The kernel that weighs and sums the outputs of experts gives the bits of the torch code."""

from __future__ import annotations

import pytest
import torch

from hf_ptq.model import experts

if not torch.cuda.is_available():
    pytest.skip("needs CUDA", allow_module_level=True)
kernels = pytest.importorskip("hf_ptq.model.kernels")

pytestmark = pytest.mark.gpu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    "dtypes", [(BF16, BF16, BF16), (BF16, FP32, BF16), (FP16, FP16, FP16), (FP32, FP32, BF16)], ids=str
)
@pytest.mark.parametrize("hidden", [64, 768, 2048, 2880, 7168])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 6, 8, 9, 10])
def test_the_bits_are_those_of_torch(
    k: int, hidden: int, dtypes: tuple[torch.dtype, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator("cuda").manual_seed(k)
    tokens = 4096
    outputs = torch.randn((tokens * k, hidden), generator=generator, device="cuda").to(dtypes[0])
    outputs *= torch.exp2(torch.randn((tokens * k, 1), generator=generator, device="cuda") * 4).to(dtypes[0])
    places = torch.randperm(tokens * k, generator=generator, device="cuda")
    weights = torch.rand((tokens, k), generator=generator, device="cuda").to(dtypes[1])
    ours = kernels.weighted_sum(outputs, places, weights, dtypes[2])
    monkeypatch.setattr(experts, "kernels_run_on", lambda _: False)
    theirs = experts.weighted_sum(outputs, places, weights, dtypes[2])
    assert ours.dtype == dtypes[2]
    assert torch.equal(ours, theirs)


def test_experts_take_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(kernels, "weighted_sum", lambda *_: calls.append(1))
    outputs = torch.randn((4096, 1024), device="cuda", dtype=BF16)
    places, weights = torch.arange(4096, device="cuda"), torch.ones((1024, 4), device="cuda", dtype=BF16)
    experts.weighted_sum(outputs, places, weights, BF16)
    assert calls == [1]
    experts.weighted_sum(outputs[:1024], places[:1024], weights[:256], BF16)
    assert calls == [1], "too few to compile a kernel for"
    experts.weighted_sum(outputs.requires_grad_(), places, weights, BF16).sum().backward()
    assert calls == [1], "a kernel has no gradient"
    assert bool(outputs.grad.abs().min() > 0)  # type: ignore[union-attr]

"""Our own fake-quantized model, caught in the middle of a run: rounded weights in place, quantizers switched on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hf_ptq import steps
from hf_ptq.driver import Job
from hf_ptq.quantization.apply import quantizing
from hf_ptq.quantization.quantizer import Quantizer

Rounds = Callable[[Quantizer], bool]


class Captured:
    """`of(job, quantizers)` is called where the second preview would be; the result is in `value`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, of: Callable[[Job], torch.Tensor], rounds: Rounds) -> None:
        self.value = torch.empty(0)

        def capture(_config, job: Job, quantizers: dict[str, Quantizer], *_rest) -> None:
            with quantizing([q for q in quantizers.values() if rounds(q)]), torch.no_grad():
                self.value = of(job).clone()
            job.release()

        monkeypatch.setattr(steps, "preview_before", lambda *_: None)
        monkeypatch.setattr(steps, "preview_after", capture)


def logits_of(ids: torch.Tensor) -> Callable[[Job], torch.Tensor]:
    """The model's logits."""
    return lambda job: job.model(ids, use_cache=False).logits


def greedy(ids: torch.Tensor, new_tokens: int) -> Callable[[Job], torch.Tensor]:
    """The tokens that follow, without a cache, so that nothing but the model has a say."""

    def generate(job: Job) -> torch.Tensor:
        tokens = ids
        for _ in range(new_tokens):
            best = job.model(tokens, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, best], dim=-1)
        return tokens[:, ids.shape[1] :]

    return generate


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """|found - expected| / |expected|."""
    return float((found - expected).norm() / expected.norm())


def float32_tiny(name: str, directory: Path) -> Path:
    """A tiny checkpoint in fp32."""
    from tiny import save_tiny

    return save_tiny(name, directory, torch.float32)

"""Gradients through rounding: the straight-through estimator, and ranges that are learned.

Rounding has no useful derivative. The estimator (Bengio, Leonard, Courville 2013, arXiv:1308.3432) takes it for 1
inside the range and for 0 outside, where values are clamped; `clips=False` takes it for 1 everywhere. A learned range
gets the derivative of learned step sizes (Esser et al. 2020, arXiv:1902.08153), written for amax = step * q_max:

    d rounded / d amax  =  (rounded - value) / amax  inside,  sign(value) outside

The value of the result is exactly `rounded`: `x - x.detach()` is zero and carries the gradient. (A zero loses its
sign.) No class of autograd's is needed, so that torch.compile sees plain operations. This file knows no format.
"""

from __future__ import annotations

import torch


def with_gradient(
    values: torch.Tensor, rounded: torch.Tensor, amax: torch.Tensor | None, clips: bool = True
) -> torch.Tensor:
    """`rounded` (no gradient) with the gradient of `values`, both of one shape and dtype.

    `amax`: fp32, broadcasts to the values; gets its own gradient if it requires one. None where ranges are made at run
    time: nothing is clamped.
    """
    passed = values - values.detach()
    if amax is None:
        return rounded + passed
    fixed = amax.detach()
    inside = values.detach().abs() <= fixed
    if clips:
        passed = torch.where(inside, passed, torch.zeros_like(passed))
    result = rounded + passed
    if amax.requires_grad:
        exact = values.detach().float()
        slope = torch.where(inside, (rounded.float() - exact) / fixed.clamp(min=1e-30), exact.sign())
        result = result + (slope * (amax - fixed)).to(result.dtype)
    return result

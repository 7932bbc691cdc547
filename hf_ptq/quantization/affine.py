"""Keys and values rounded as what differs from each channel's mean.

    bias = mean over all calibration tokens of x, for each head and channel
    amax = max over all tokens and channels of |x - bias|
    rounded(x) = round(x - bias; amax) + bias

Both come from one pass: the sums of the tokens, and the highest x and -x of each channel, from which the largest
distance to any bias follows. (KV presets fp8_affine and nvfp4_affine of Model Optimizer; no server reads a bias.)
"""

from __future__ import annotations

import torch

from hf_ptq.quantization.formats.description import NumberFormat
from hf_ptq.quantization.quantizer import Quantizer


class AffineQuantizer(Quantizer):
    """Quantizes keys or values [batch, heads, tokens, head_dim] with `channels` = heads * head_dim.

    `bias`: fp32 [channels], None before calibration.
    """

    measured = (*Quantizer.measured, "bias")

    def __init__(self, key: str, number_format: NumberFormat, channels: int) -> None:
        super().__init__(key, number_format, run_experts=range(2 * channels))
        self.channels = channels
        self.bias: torch.Tensor | None = None
        self._sums: torch.Tensor | None = None

    def start_summing(self, sums: torch.Tensor) -> None:
        """From now on add tokens to `sums`, fp32 [channels + 1]; the last counts them."""
        self._sums = sums

    def stop_summing(self, sums: torch.Tensor) -> None:
        """Calibration is over, with these totals; before `stop_observing`."""
        self._sums = None
        self.bias = (sums[:-1] / sums[-1]).float()

    def stop_observing(self, total: torch.Tensor, seen: torch.Tensor) -> None:
        """`total`: [2 * channels], the highest x and the highest -x of each channel."""
        assert self.bias is not None
        highest, lowest = total[: self.channels], -total[self.channels :]
        super().stop_observing(torch.maximum(highest - self.bias, self.bias - lowest), seen)

    def _rounded(self, values: torch.Tensor) -> torch.Tensor:
        assert self.bias is not None
        bias = self.bias.to(values.device).view(1, values.shape[1], 1, values.shape[3])
        return (super()._rounded(values.float() - bias) + bias).to(values.dtype)

    def _observe(self, values: torch.Tensor) -> None:
        assert self._pending is not None
        assert self._seen is not None
        assert self._sums is not None
        if values.numel() == 0 or self._is_last(values):
            return
        self._note(values)
        rows = values.float().transpose(1, 2).reshape(-1, self.channels)
        low, high = rows.aminmax(dim=0)
        highest, place = torch.cat([high, -low]), self._pending.device
        torch.maximum(self._pending, highest.to(place), out=self._pending)
        self._sums[:-1] += rows.sum(0).to(place)
        self._sums[-1] += len(rows)
        self._seen += 1

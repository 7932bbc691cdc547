"""One quantizer per activation: observes it in calibration, rounds it afterwards.

A quantizer holds its number format and its calibrated range. The state is plain tensors outside the module's
buffers: `state_dict`, FSDP2 and the loader do not see it. Members of a fused group share one quantizer object,
because they are multiplied with one tensor: it is reduced once (`observe` remembers which tensor it saw last).
"""

from __future__ import annotations

import weakref
from typing import Literal

import torch
from torch import nn

from hf_ptq.quantization.formats import codecs
from hf_ptq.quantization.formats.description import NumberFormat

Mode = Literal["off", "observe", "quantize"]


class Quantizer(nn.Module):
    """Quantizes one activation: a tensor [..., in], or the rows [rows, in] of all experts of a layer.

    `amax`: fp32 scalar, the calibrated range; for experts the layer's largest, which is what every server reduces to.
    `expert_amax`, `expert_rows`: [experts], the range and the number of rows of each, for the report. None
    before calibration and for formats that need none. `run_experts`: the experts whose rows this process sees.
    """

    def __init__(
        self,
        key: str,
        number_format: NumberFormat,
        num_experts: int | None = None,
        run_experts: range | None = None,
    ) -> None:
        super().__init__()
        self.key = key
        self.format = number_format
        self.num_experts = num_experts
        self.run_experts = run_experts if run_experts is not None else range(num_experts or 1)
        self.codec = codecs()[number_format.name]
        self.mode: Mode = "off"
        constant = number_format.constant_amax
        self.amax: torch.Tensor | None = None if constant is None else torch.tensor(constant)
        self.expert_amax: torch.Tensor | None = None
        self.expert_rows: torch.Tensor | None = None
        self._pending: torch.Tensor | None = None
        self._seen: torch.Tensor | None = None
        self._last_seen: weakref.ref[torch.Tensor] | None = None
        self._last_rounded: torch.Tensor | None = None

    def start_observing(self, pending: torch.Tensor, seen: torch.Tensor) -> None:
        """From now on fold max |x| into `pending` and count tensors (rows, for experts) in `seen`.

        Both are fp32 [1], or [experts], of which those of `run_experts` are written.
        """
        place = slice(self.run_experts.start, self.run_experts.stop)
        self._pending, self._seen, self.mode = pending[place], seen[place], "observe"

    def stop_observing(self, total: torch.Tensor, seen: torch.Tensor) -> None:
        """Calibration is over: the range is the maximum of `total`, [1] or [experts]."""
        self._pending = self._seen = self._last_seen = None
        self.amax, self.mode = total.amax(), "off"
        if self.num_experts is not None:
            self.expert_amax, self.expert_rows = total.clone(), seen.clone()

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """`values` as they are, or rounded as a server rounds them; same shape and dtype."""
        if self.mode == "observe" and self._pending is not None:
            self._observe(values)
        elif self.mode == "quantize":
            return self._round_once(values)
        return values

    def quantize_rows(
        self, values: torch.Tensor, source: torch.Tensor | None, experts: torch.Tensor, is_token: torch.Tensor | None
    ) -> torch.Tensor:
        """The same for rows [rows, in] that belong to `experts` (int64 [rows]): `values`, or `values[source]`.

        Tokens are reduced and rounded before they are copied for each of their experts. `is_token` is given under
        expert parallelism: rows that are no token are not recorded.
        """
        if self.mode == "observe" and self._pending is not None:
            assert self._seen is not None
            low, high = values.aminmax(dim=-1)
            amax = torch.maximum(high, -low).float()
            amax = amax if source is None else amax[source]
            if is_token is None:
                counted = torch.ones_like(amax)
            else:
                amax, counted = torch.where(is_token, amax, 0.0), is_token.float()
            place = self._pending.device  # statistics are on one device, layers may be on several
            experts = experts.to(place)
            self._pending.scatter_reduce_(0, experts, amax.to(place), "amax")
            self._seen.scatter_add_(0, experts, counted.to(place))
        elif self.mode == "quantize":
            values = self._rounded(values)
        return values if source is None else values.index_select(0, source)

    def _round_once(self, values: torch.Tensor) -> torch.Tensor:
        """Rounded values; the members of a group ask for the same tensor one after the other."""
        if self._last_rounded is None or self._last_seen is None or self._last_seen() is not values:
            self._last_seen = weakref.ref(values, self._forget)
            self._last_rounded = self._rounded(values)
        return self._last_rounded

    def _rounded(self, values: torch.Tensor) -> torch.Tensor:
        amax = self.amax
        if amax is not None and amax.is_cuda:  # as statistics are on one device; a constant may stay on the CPU
            amax = amax.to(values.device)
        return self.codec.fake_quantize(values, amax)  # type: ignore[arg-type]

    def _forget(self, _: object) -> None:
        """The tensor seen last is gone: nobody will ask for its rounded values again."""
        self._last_rounded = None

    def _observe(self, values: torch.Tensor) -> None:
        assert self._pending is not None
        assert self._seen is not None
        if self._last_seen is not None and self._last_seen() is values:
            return
        self._last_seen = weakref.ref(values)
        low, high = self.codec.observed(values).aminmax()
        amax = torch.maximum(high, -low).float()
        torch.maximum(self._pending, amax.to(self._pending.device), out=self._pending)  # a NaN stays
        self._seen += 1

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return f"{self.format.name}, {self.mode}"

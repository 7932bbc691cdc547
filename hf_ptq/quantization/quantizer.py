"""One quantizer per tensor: observes activations in calibration, rounds tensors afterwards, lets gradients through.

A quantizer holds its number format and its range. The state is plain tensors outside the module's buffers:
`state_dict`, FSDP2 and the loader do not see it. Members of a fused group share one input quantizer, because they are
multiplied with one tensor: it is reduced once (`observe` remembers which tensor it saw last), and one range tensor for
their weights. A weight is rounded to what its export decodes to: by the same two functions. Where a gradient is wanted,
gradients.py attaches one; the rounded values stay the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from hf_ptq.errors import Problem, RunError
from hf_ptq.quantization.formats import codecs, encode
from hf_ptq.quantization.formats.description import NumberFormat
from hf_ptq.quantization.formats.ranges import Ranges
from hf_ptq.quantization.gradients import with_gradient

Mode = Literal["off", "observe", "quantize"]
_SWITCHED = ("mode",)
_OF_THE_MOMENT = ("_pending", "_seen", "_last_seen", "_last_rounded")  # neither copied nor saved


@dataclass(frozen=True)
class Slot:
    """Which tensor of its module a quantizer is for.

    `leaf`: the parameter's name, of weights. `channel_dim`: the dimension along which formats with a scale per channel
    have their scales (of a weight: its outputs), `channels`: its size. `rows`: (start, number) in the second-to-last
    dimension of a stack of experts; None for all.
    """

    role: Literal["weight", "input"] = "input"
    leaf: str = ""
    channel_dim: int = -1
    channels: int = 1
    rows: tuple[int, int] | None = None


class Quantizer(nn.Module):
    """Quantizes one tensor: an activation [..., in], the rows [rows, in] of all experts of a layer, or a weight.

    `amax`: fp32, the range: a scalar for activations (for experts the layer's largest, which is what every server
    reduces to) and for formats with one scale per matrix ([experts] for a stack of weights), [channels] or
    [experts, out] for a scale per channel, as `formats.ranges.weight_amax` has it for blocks and tiles. None before
    calibration and for formats that need none. `block_amax`: ranges of a weight's blocks that an algorithm chose.
    `expert_amax`, `expert_rows`: [experts], the range and the number of rows of each, for the report.
    `run_experts`: the experts whose rows this process sees. `is_enabled`: off, it leaves values as they are;
    `clips`: no gradient for what is outside of the range. `is_shared`: several modules call it, one after the other
    with one tensor. `names`: of the modules that call it, as rules know them.
    """

    def __init__(
        self,
        key: str,
        number_format: NumberFormat,
        num_experts: int | None = None,
        run_experts: range | None = None,
        slot: Slot = Slot(),
    ) -> None:
        super().__init__()
        self.key = key
        self.names: tuple[str, ...] = (key,)
        self.format = number_format
        self.num_experts = num_experts
        self.slot = slot
        self.run_experts = run_experts if run_experts is not None else range(self.size)
        self.codec = codecs()[number_format.name]
        self.mode: Mode = "off"
        self.is_enabled = True
        self.clips = True
        self.is_shared = False
        constant = number_format.constant_amax
        self.amax: torch.Tensor | None = None if constant is None else torch.tensor(constant)
        self.block_amax: torch.Tensor | None = None
        self.expert_amax: torch.Tensor | None = None
        self.expert_rows: torch.Tensor | None = None
        self.forget_moment()

    measured: tuple[str, ...] = ("amax", "block_amax", "expert_amax", "expert_rows")

    @property
    def is_weight(self) -> bool:
        """True for the quantizer of a parameter."""
        return self.slot.role == "weight"

    @property
    def has_channels(self) -> bool:
        """True where each channel has a range of its own."""
        return self.format.granularity == "channel"

    @property
    def size(self) -> int:
        """Numbers that calibration notes down of an activation's range."""
        return self.num_experts or (self.slot.channels if self.has_channels else 1)

    @property
    def needs_range(self) -> bool:
        """True where values cannot be rounded without a range that somebody measured."""
        return self.format.constant_amax is None and (self.is_weight or not self.format.is_dynamic)

    # --- calibration -----------------------------------------------------------------------------

    def start_observing(self, pending: torch.Tensor, seen: torch.Tensor) -> None:
        """From now on fold max |x| into `pending` and count tensors (rows, for experts) in `seen`.

        Both are fp32 [1], or [experts], of which those of `run_experts` are written; `pending` may be [channels].
        """
        self.forget_moment()
        place = slice(self.run_experts.start, self.run_experts.stop)
        self._pending, self._seen, self.mode = pending[place], seen[place], "observe"

    def stop_observing(self, total: torch.Tensor, seen: torch.Tensor) -> None:
        """Calibration is over: the range is the maximum of `total`, [1] or [experts], or all of [channels]."""
        self.forget_moment()
        self.amax, self.mode = total.clone() if self.has_channels else total.amax(), "off"
        if self.num_experts is not None:
            self.expert_amax, self.expert_rows = total.clone(), seen.clone()

    def memory(self) -> dict[str, Any]:
        """What calibration changes, for `remember`."""
        return {name: vars(self)[name] for name in self.measured + _SWITCHED}

    def remember(self, memory: Mapping[str, Any]) -> None:
        """Be as it was when `memory` was taken."""
        self.forget_moment()
        vars(self).update(memory)

    # --- forward ---------------------------------------------------------------------------------

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """`values` as they are, or rounded as a server rounds them; same shape and dtype.

        Raises RunError for what is no tensor of floating-point numbers, such as ids.
        """
        if self.mode == "observe" and self._pending is not None:
            self._check(values)
            self._observe(values)
        elif self.mode == "quantize" and self.is_enabled:
            self._check(values)
            return self._quantized(values, once=True)
        return values

    def _check(self, values: torch.Tensor) -> None:
        if isinstance(values, torch.Tensor) and values.is_floating_point():
            return
        told = f"a tensor of {values.dtype}" if isinstance(values, torch.Tensor) else f"a {type(values).__name__}"
        what = f"{self.key} was given {told}, and rounds floating-point numbers"
        raise RunError(Problem(what, "give the input no format, or hf_ptq.register the class with channel_dim=None"))

    def quantize_rows(self, values: torch.Tensor, source: torch.Tensor | None, experts: torch.Tensor) -> torch.Tensor:
        """The same for rows [rows, in] that belong to `experts` (int64 [rows]): `values`, or `values[source]`.

        Tokens are reduced and rounded before they are copied for each of their experts.
        """
        if self.mode == "observe" and self._pending is not None:
            assert self._seen is not None
            low, high = values.aminmax(dim=-1)
            amax = torch.maximum(high, -low).float()
            amax = amax if source is None else amax[source]
            place = self._pending.device  # statistics are on one device, layers may be on several
            experts = experts.to(place)
            amax = amax.to(place)
            self._pending.scatter_reduce_(0, experts, amax, "amax")
            self._seen.scatter_add_(0, experts, torch.ones_like(amax))
        elif self.mode == "quantize" and self.is_enabled:
            values = self._quantized(values)
        return values if source is None else values.index_select(0, source)

    def _quantized(self, values: torch.Tensor, once: bool = False) -> torch.Tensor:
        if self.amax is None and self.needs_range:
            what = f"{self.key}: its {self.slot.role} has no range yet"
            raise RunError(Problem(what, "run hf_ptq.calibrate, or restore_quantizers"))
        learns = self.amax is not None and self.amax.requires_grad
        if torch.is_grad_enabled() and (values.requires_grad or learns):
            rounded = self._rounded(values.detach())
            return with_gradient(values, rounded, self._spread(values), self.clips)
        if once and self.is_shared and not torch.compiler.is_compiling():
            return self._round_once(values)
        return self._rounded(values)

    def _round_once(self, values: torch.Tensor) -> torch.Tensor:
        """Rounded values; the members of a group ask for the same tensor one after the other."""
        if self._last_rounded is None or not self._is_last(values):
            self._note(values)
            self._last_rounded = self._rounded(values)
        return self._last_rounded

    def _is_last(self, values: torch.Tensor) -> bool:
        """Whether this is the tensor seen last, with the same numbers in it, under the same range."""
        last = None if self._last_seen is None else self._last_seen()
        return last is values and self._last_versions == self._versions(values)

    def _note(self, values: torch.Tensor) -> None:
        self._last_rounded = None
        self._last_seen = weakref.ref(values, self._forget)
        self._last_versions = self._versions(values)

    def _versions(self, values: torch.Tensor) -> tuple[float, ...]:
        """Counts of changes in place; never equal for tensors that do not count them."""
        return tuple(float("nan") if t.is_inference() else t._version for t in (values, self.amax) if t is not None)

    def _rounded(self, values: torch.Tensor) -> torch.Tensor:
        amax = self._range_at(values.device)
        if "weight" not in self.format.roles or not (self.is_weight or self.has_channels):
            return self.codec.fake_quantize(values, amax)  # type: ignore[arg-type]
        if self.num_experts is not None:
            return self._decoded(values, amax)
        moved = values.movedim(self.slot.channel_dim, 0)
        rows = self._decoded(moved.reshape(moved.shape[0], -1), amax)
        return rows.view(moved.shape).movedim(0, self.slot.channel_dim)

    def _decoded(self, matrices: torch.Tensor, amax: torch.Tensor | None) -> torch.Tensor:
        """What the stored tensors of [..., out, in] decode to, in the dtype of `matrices`."""
        ranges = Ranges(amax, self.block_amax)  # type: ignore[arg-type]
        return self.codec.decode(encode(self.format, matrices, ranges)).to(matrices.dtype)

    def _range_at(self, device: torch.device) -> torch.Tensor | None:
        amax = self.amax
        if amax is not None:
            amax = amax.detach()
            if amax.is_cuda:  # as statistics are on one device; a constant may stay on the CPU
                amax = amax.to(device)
        return amax

    def _spread(self, values: torch.Tensor) -> torch.Tensor | None:
        """The range so that it broadcasts to `values`, with its gradient; None where none limits them."""
        amax = self.amax
        has_own_blocks = self.format.granularity == "block" and not self.format.has_global_scale
        if amax is None or self.format.is_dynamic or has_own_blocks:
            return None
        amax = amax.to(values.device)
        if amax.dim() == 0:
            return amax
        if self.num_experts is not None:
            return amax.reshape(*amax.shape, *[1] * (values.dim() - amax.dim()))
        shape = [1] * values.dim()
        shape[self.slot.channel_dim] = -1
        return amax.view(shape)

    def _observe(self, values: torch.Tensor) -> None:
        assert self._pending is not None
        assert self._seen is not None
        if values.numel() == 0 or (self.is_shared and self._is_last(values)):
            return
        self._note(values)
        if self.has_channels:
            moved = values.movedim(self.slot.channel_dim, 0)
            low, high = moved.reshape(moved.shape[0], -1).aminmax(dim=1)
        else:
            low, high = self.codec.observed(values).aminmax()
        amax = torch.maximum(high, -low).float()
        torch.maximum(self._pending, amax.to(self._pending.device), out=self._pending)  # a NaN stays
        self._seen += 1

    # --- the module ------------------------------------------------------------------------------

    def _forget(self, _: object) -> None:
        """The tensor seen last is gone: nobody will ask for its rounded values again."""
        self.__dict__["_last_rounded"] = None  # it may be called while the interpreter ends

    def forget_moment(self) -> None:
        """Forget the tensor seen last, and where to note down ranges."""
        self._pending: torch.Tensor | None = None
        self._seen: torch.Tensor | None = None
        self._last_seen: weakref.ref[torch.Tensor] | None = None
        self._last_rounded: torch.Tensor | None = None
        self._last_versions: tuple[float, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        """For copies of a model: without what belongs to a forward in progress."""
        return {**self.__dict__, **dict.fromkeys(_OF_THE_MOMENT)}

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Quantizer:
        """The range goes where the model goes, and stays fp32."""
        super()._apply(fn, recurse)
        if self.amax is not None:
            with torch.no_grad():
                moved = fn(self.amax)
            if moved.device != self.amax.device and not moved.is_meta and not self.amax.is_meta:
                learned = self.amax.requires_grad
                self.amax = self.amax.detach().to(moved.device).requires_grad_(learned)
        return self

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return f"{self.format.name}, {self.mode if self.is_enabled else 'disabled'}"

"""What a recipe can ask of calibration: the algorithms by name, with their settings, without torch.

`algorithm` of a recipe is a name (`mse`), a mapping with the name under `method` and settings beside it, or a list of
these, carried out one after the other. Every algorithm that is built so far chooses the ranges of all weights anew, so
the last of a list decides. The work is in `algorithms/`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

MAX_CANDIDATES = 1000


class Max(BaseModel):
    """The range of a weight, and of an activation, is its largest magnitude."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    method: Literal["max"] = "max"


class Mse(BaseModel):
    """The range of each weight, row or block is the candidate of the smallest squared error; activations as by max.

    The candidates are the largest magnitude times `start_multiplier` to `stop_multiplier` in steps of `step_size`; or,
    with `fp8_scale_sweep`, for the blocks of `nvfp4_static` all E4M3 scales (other formats then stay as by max).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    method: Literal["mse"] = "mse"
    start_multiplier: float = Field(default=0.25, gt=0, allow_inf_nan=False)
    stop_multiplier: float = Field(default=4.0, gt=0, allow_inf_nan=False)
    step_size: float = Field(default=0.1, gt=0)
    fp8_scale_sweep: bool = False

    @model_validator(mode="after")
    def _in_order(self) -> Mse:
        if self.stop_multiplier < self.start_multiplier:
            raise ValueError("stop_multiplier is below start_multiplier")
        if (self.stop_multiplier - self.start_multiplier) / self.step_size > MAX_CANDIDATES:
            raise ValueError(f"step_size makes more than {MAX_CANDIDATES} candidates, each a pass over all weights")
        return self

    @property
    def multipliers(self) -> list[float]:
        """Evenly spaced, both ends among them; a last step may be smaller than asked for."""
        span = self.stop_multiplier - self.start_multiplier
        count = -int(-span / self.step_size // 1) if span else 0
        return (
            [self.start_multiplier + span * i / count for i in range(count + 1)] if count else [self.start_multiplier]
        )


AlgorithmSpec = Max | Mse
METHODS: dict[str, type[Max] | type[Mse]] = {"max": Max, "mse": Mse}
# Algorithms that users know from the peer -> what is missing.
NOT_BUILT_YET: dict[str, str] = {
    **dict.fromkeys(("awq_lite", "awq_clip", "awq_full"), "AWQ"),
    "smoothquant": "SmoothQuant",
    "svdquant": "SVDQuant",
    "gptq": "GPTQ",
    "local_hessian": "the local Hessian search",
    "nvfp4_act_headroom": "the search for headroom of activations",
    "lsq": "learned step sizes",
}


def read_algorithm(value: Any) -> AlgorithmSpec:
    """What the `algorithm` key of a recipe means; nothing means max. Raises ValueError saying what is wrong."""
    if value is None:
        return Max()
    if isinstance(value, (Max, Mse)):
        return value
    if isinstance(value, list):
        return [read_algorithm(item) for item in value][-1] if value else Max()
    settings = {"method": value} if isinstance(value, str) else value
    if not isinstance(settings, dict) or "method" not in settings:
        raise ValueError("give the name of an algorithm, or a mapping with its name under `method`")
    name = settings["method"] if settings["method"] is not None else "max"
    if name in NOT_BUILT_YET:
        raise ValueError(
            f"{name!r} is not built yet ({NOT_BUILT_YET[name]} is missing); use one of {', '.join(METHODS)}"
        )
    if name not in METHODS:
        raise ValueError(f"there is no algorithm {name!r}; known are {', '.join(METHODS)}")
    try:
        return METHODS[name].model_validate({**settings, "method": name})
    except ValidationError as error:
        wrong = [
            f"{'.'.join(map(str, e['loc'])) or name}: {e['msg'].removeprefix('Value error, ')}" for e in error.errors()
        ]
        known = ", ".join(METHODS[name].model_fields)
        raise ValueError(f"{name}: {'; '.join(wrong)} (its settings are {known})") from error

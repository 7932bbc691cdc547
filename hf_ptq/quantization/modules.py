"""Which kinds of modules can be quantized, and which of their tensors.

The table is looked up along a module's method resolution order, so that a subclass is treated as its nearest
registered base and is never missed because its exact type is not listed. `register` adds to it.

Servers know linears; everything else here is for models that stay in PyTorch. This file knows no recipe.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

import transformers
from torch import nn

from hf_ptq.errors import Problem, UserError


@dataclass(frozen=True)
class ModuleKind:
    """The tensors of a module that a recipe can give formats to.

    `weights`: globs on the names of its parameters. `out_dim`: the dimension of a weight that counts its outputs.
    `channel_dim`: the dimension of the input that counts its channels; None where inputs are no numbers to round.
    `channels`: the attribute that tells how many; empty where the module does not know.
    """

    name: str
    weights: tuple[str, ...] = ("weight",)
    out_dim: int = 0
    channel_dim: int | None = -1
    channels: str = ""

    def leaves(self, module: nn.Module) -> Iterator[str]:
        """Names of the module's own parameters that are weights in this sense."""
        for leaf, parameter in module._parameters.items():
            if parameter is not None and any(fnmatchcase(leaf, pattern) for pattern in self.weights):
                yield leaf

    def num_channels(self, module: nn.Module) -> int | None:
        """Channels of the module's input; None where it does not know."""
        if not self.channels:
            return None
        number = getattr(module, self.channels)
        return number if isinstance(number, int) else number[-1]


LINEAR = ModuleKind("Linear", channels="in_features")
_BATCH_NORM = ModuleKind("BatchNorm", (), channel_dim=1, channels="num_features")
_RECURRENT = ("weight_ih_l[0-9]*", "weight_hh_l[0-9]*", "weight_hr_l[0-9]*")
_POOLS = ("AvgPool", "MaxPool", "AdaptiveAvgPool", "AdaptiveMaxPool")

KINDS: dict[type[nn.Module], ModuleKind] = {
    nn.Linear: LINEAR,
    transformers.Conv1D: ModuleKind("Conv1D", out_dim=1, channels="nx"),
    nn.Embedding: ModuleKind("Embedding", channel_dim=None),
    nn.LayerNorm: ModuleKind("LayerNorm", (), channels="normalized_shape"),
    nn.BatchNorm1d: _BATCH_NORM,
    nn.BatchNorm2d: _BATCH_NORM,
    nn.BatchNorm3d: _BATCH_NORM,
    nn.SyncBatchNorm: _BATCH_NORM,
    nn.LSTM: ModuleKind("LSTM", _RECURRENT, channels="input_size"),
    nn.GRU: ModuleKind("GRU", _RECURRENT, channels="input_size"),
}
for _dims in (1, 2, 3):  # inputs may come without a batch: their channels are counted from the end
    _channel = -1 - _dims
    KINDS[getattr(nn, f"Conv{_dims}d")] = ModuleKind("Conv", channel_dim=_channel, channels="in_channels")
    KINDS[getattr(nn, f"ConvTranspose{_dims}d")] = ModuleKind(
        "ConvTranspose", out_dim=1, channel_dim=_channel, channels="in_channels"
    )
    KINDS[getattr(nn, f"InstanceNorm{_dims}d")] = ModuleKind(
        "InstanceNorm", (), channel_dim=_channel, channels="num_features"
    )
    KINDS |= {getattr(nn, f"{_pool}{_dims}d"): ModuleKind(_pool, (), channel_dim=_channel) for _pool in _POOLS}


def kind_of(module: nn.Module) -> ModuleKind | None:
    """The kind of the nearest registered base class; None where there is none."""
    return next((KINDS[base] for base in type(module).__mro__ if base in KINDS), None)


def class_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the module's classes, from its own to nn.Module; what `parent_class` of a rule is compared with."""
    return tuple(base.__name__ for base in type(module).__mro__ if issubclass(base, nn.Module))


def register(
    module_type: type[nn.Module],
    *,
    weights: tuple[str, ...] = ("weight",),
    out_dim: int = 0,
    channel_dim: int | None = -1,
    channels: str = "",
) -> None:
    """Let modules of this class, and of its subclasses, be quantized; the arguments are those of `ModuleKind`.

    The forward of such a module reads its weights as attributes, and takes the input as its first argument.
    Raises UserError for what is no class of modules, and for one without anything to quantize.
    """
    if not (isinstance(module_type, type) and issubclass(module_type, nn.Module)):
        raise UserError(Problem(f"{module_type!r} is no class of modules", "give a subclass of torch.nn.Module"))
    if not weights and channel_dim is None:
        what = f"{module_type.__name__} is registered with neither weights nor an input"
        raise UserError(Problem(what, "name its weights, or the dimension of its input's channels"))
    KINDS[module_type] = ModuleKind(module_type.__name__, weights, out_dim, channel_dim, channels)

"""Batches of a user's own loader through a model, and the state that a model is in meanwhile.

The command's own loop is loop.py. This file knows nothing of quantizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from transformers import PreTrainedModel

from hf_ptq.model.wrappers import unwrapped


@torch.no_grad()
def calibration_loop(
    model: nn.Module,
    loader: Iterable[Any],
    device: torch.device | str | None = None,
    forward: Callable[[Mapping[str, Any]], object] | None = None,
) -> None:
    """Run every batch of `loader` through the model once; for `forward_loop`.

    Batches are mappings of keyword arguments, tuples or lists of positional ones, or the only argument. `device`: their
    tensors go there first; `forward` then takes a new mapping, else the loader's own. A transformers model keeps no
    cache meanwhile.
    """
    with _no_cache(model):
        for batch in loader:
            moved = batch if device is None else _moved(batch, device)
            if forward is not None:
                forward(moved)
            elif isinstance(moved, Mapping):
                model(**moved)
            else:
                model(*(moved if _is_several(moved) else (moved,)))


def _is_several(batch: Any) -> bool:
    """Whether a batch is a sequence of tensors; a packed sequence is a tuple, and one argument."""
    return isinstance(batch, (tuple, list)) and not isinstance(batch, PackedSequence)


def _moved(batch: Any, device: torch.device | str) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, PackedSequence):
        return batch.to(device)  # type: ignore[arg-type]  # torch declares the form with a dtype alone
    if isinstance(batch, Mapping):
        return {key: _moved(value, device) for key, value in batch.items()}
    if not _is_several(batch):
        return batch
    make = getattr(type(batch), "_make", type(batch))  # of a namedtuple
    return make([_moved(value, device) for value in batch])


@contextmanager
def _no_cache(model: nn.Module) -> Iterator[None]:
    root = unwrapped(model)
    configs = [root.config, root.config.get_text_config()] if isinstance(root, PreTrainedModel) else []
    before = [vars(config).get("use_cache") for config in configs]
    for config in configs:
        config.use_cache = False
    try:
        yield
    finally:
        for config, value in zip(configs, before, strict=True):
            config.use_cache = value


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside the block the model is in eval mode; afterwards each module is as it was."""
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training

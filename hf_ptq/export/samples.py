"""Samples of the export, read back from the files and dequantized, against the source.

While a weight is encoded its error is measured in memory. Reading the worst and the first module of each kind back
from the finished files and finding the same error there shows that the bytes on disk, their names, dtypes and scales
are the ones that were meant.

    signal-to-noise in dB = 10 log10(sum w^2 / sum (decoded - w)^2)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hf_ptq.checkpoint.dtypes import TORCH_DTYPES
from hf_ptq.checkpoint.shards import ShardPlan, TensorPlan
from hf_ptq.checkpoint.slices import SourceReader
from hf_ptq.errors import Problem
from hf_ptq.export.layouts.layout import Layout, Storage
from hf_ptq.export.planned import taken_apart, tensor_names
from hf_ptq.export.tensors import WeightError
from hf_ptq.model.views import WeightView
from hf_ptq.quantization.assignment import Assignment

Place = tuple[Path, ShardPlan, TensorPlan]
TOLERANCE_DB = 0.05  # sums are taken in another order than in memory
PERFECT_DB = 200.0  # what is shown for a weight without error


@dataclass(frozen=True)
class Sample:
    """One module as it is on disk: cosine and signal-to-noise against the source."""

    module: str
    kind: str
    cosine: float
    db: float


def decibels(signal: float, noise: float) -> float:
    """Signal-to-noise ratio; PERFECT_DB without noise, 0 for noise without signal or noise that is no number."""
    if noise == 0:
        return PERFECT_DB
    if not (signal > 0 and math.isfinite(noise)):
        return 0.0
    return min(PERFECT_DB, 10 * math.log10(signal / noise))


def by_kind(errors: Sequence[WeightError]) -> dict[str, list[WeightError]]:
    """Errors by projection name and format, in order of appearance."""
    kinds: dict[str, list[WeightError]] = {}
    for error in errors:
        kinds.setdefault(f"{error.kind} {error.format}", []).append(error)
    return kinds


def worst_of(errors: Sequence[WeightError]) -> WeightError:
    """The one with the lowest signal-to-noise ratio."""
    return min(errors, key=lambda error: decibels(error.signal, error.noise))


def read_samples(
    directory: Path,
    shards: Sequence[ShardPlan],
    errors: Sequence[WeightError],
    reader: SourceReader,
    model: tuple[Assignment, Layout, torch.dtype],
) -> tuple[list[Sample], list[Problem]]:
    """The first and the worst module of each kind; problems where the disk tells another error than memory did.

    `model`: what is quantized, the layout, and the dtype that the model computes with.
    """
    assignment, layout, dtype = model
    paths = [directory / shard.file for shard in shards]
    pairs = zip(paths, shards, strict=True)
    places = {tensor.name: (path, shard, tensor) for path, shard in pairs for tensor in shard.tensors}
    samples: list[Sample] = []
    problems: list[Problem] = []
    for kind, members in by_kind(errors).items():
        for error in dict.fromkeys((members[0], worst_of(members))):
            quantized = assignment.by_module[error.module]
            weight = quantized.view.of_source(error.module, reader.tensor).to(dtype).float()
            decoded = _decode(places, error.module, layout.stored(quantized.scheme), quantized.view)
            signal, noise = float(weight.square().sum()), float((decoded - weight).square().sum())
            cosine = float(torch.nn.functional.cosine_similarity(decoded.flatten(), weight.flatten(), dim=0))
            samples.append(Sample(error.module, kind, cosine, decibels(signal, noise)))
            expected = decibels(error.signal, error.noise)
            if not abs(samples[-1].db - expected) <= TOLERANCE_DB:
                what = f"{error.module}: signal-to-noise {samples[-1].db:.2f} dB on disk, {expected:.2f} dB in memory"
                problems.append(Problem(what, "the disk or the memory is faulty; run again elsewhere"))
    return samples, problems


def _decode(places: Mapping[str, Place], module: str, storage: Storage, view: WeightView) -> torch.Tensor:
    """The module's weight from its tensors on disk, fp32 [out, in]."""
    stored = {}
    for local in storage.layout(view.shape, torch.bfloat16):
        (name,) = tensor_names(view, [module], local)
        tensor = _read(*places[name])
        stored[local] = taken_apart(tensor, view.modules.index(module)) if view.joined else tensor
    return storage.decode(stored)


def _read(path: Path, shard: ShardPlan, tensor: TensorPlan) -> torch.Tensor:
    """One tensor of a finished file, at its planned offset: a library would parse the whole header for each."""
    with path.open("rb", buffering=0) as file:
        file.seek(shard.offsets[tensor.name])
        data = bytearray(file.read(tensor.num_bytes))
    return torch.frombuffer(data, dtype=TORCH_DTYPES[tensor.dtype]).reshape(tensor.shape)

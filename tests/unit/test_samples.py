"""Samples read back from the files: the numbers, which modules are read, and what a damaged file is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hf_ptq.checkpoint.shards import ShardPlan, TensorPlan, lay_out
from hf_ptq.checkpoint.slices import SourceReader
from hf_ptq.checkpoint.source import open_source
from hf_ptq.checkpoint.writer import ShardWriter
from hf_ptq.export.layouts import LAYOUTS
from hf_ptq.export.layouts.layout import as_encoded
from hf_ptq.export.samples import PERFECT_DB, by_kind, decibels, read_samples, worst_of
from hf_ptq.export.tensors import WeightError
from hf_ptq.model.views import WeightView
from hf_ptq.quantization.assignment import Assignment, QuantizedWeight
from hf_ptq.quantization.formats import codecs
from hf_ptq.quantization.formats.description import FORMATS
from hf_ptq.report import Report

MODULES = ("layers.0.up", "layers.1.up", "layers.2.up", "layers.0.down")


@pytest.mark.parametrize(
    ("signal", "noise", "expected"),
    [(100.0, 1.0, 20.0), (1.0, 1.0, 0.0), (1.0, 10.0, -10.0), (1.0, 0.0, PERFECT_DB), (0.0, 0.0, PERFECT_DB),
     (0.0, 1.0, 0.0), (1.0, 1e-300, PERFECT_DB)],
)  # fmt: skip
def test_decibels(signal: float, noise: float, expected: float) -> None:
    assert decibels(signal, noise) == pytest.approx(expected)


def test_kinds_are_projection_and_format_in_order() -> None:
    errors = [
        WeightError(module, module.rpartition(".")[2], number_format, 1.0, 0.1)
        for module, number_format in (("a.up", "fp8"), ("a.down", "fp8"), ("b.up", "nvfp4"), ("c.up", "fp8"))
    ]
    kinds = {kind: [error.module for error in members] for kind, members in by_kind(errors).items()}
    assert kinds == {"up fp8": ["a.up", "c.up"], "down fp8": ["a.down"], "up nvfp4": ["b.up"]}
    assert list(kinds) == ["up fp8", "down fp8", "up nvfp4"]


def test_the_worst_is_the_one_with_the_lowest_ratio() -> None:
    errors = [WeightError("a", "k", "fp8", 1000.0, 2.0), WeightError("b", "k", "fp8", 1.0, 0.1),
              WeightError("c", "k", "fp8", 1.0, 0.0)]  # fmt: skip
    assert worst_of(errors).module == "b"


class Exported:
    """A source of four weights and its export in one format, over two files."""

    def __init__(self, directory: Path, number_format: str) -> None:
        draw = torch.Generator().manual_seed(0)
        codec = codecs()[number_format]
        self.export, source = directory / "export", directory / "source"
        self.export.mkdir()
        source.mkdir()
        weights = {module: torch.randn(48, 32, generator=draw).bfloat16() for module in MODULES}
        weights["layers.2.up"][0, 0] = 40.0  # the worst of its kind
        (source / "config.json").write_text('{"model_type": "llama"}')
        save_file({f"{module}.weight": weight for module, weight in weights.items()}, source / "model.safetensors")
        self.errors, self.files = [], {}
        for module, weight in weights.items():
            rows = weight.float().abs().amax(-1)
            tensors = codec.encode(weight, rows.amax() if FORMATS[number_format].is_shared else rows)
            exact, decoded = weight.double(), codec.decode(tensors).double()
            noise = float((decoded - exact).square().sum())
            kind = module.rpartition(".")[2]
            self.errors.append(WeightError(module, kind, number_format, float(exact.square().sum()), noise))
            self.files[module] = {f"{module}.{local}": tensor for local, tensor in tensors.items()}
        views = [WeightView((module,), f"{module}.weight", (48, 32)) for module in MODULES]
        quantized = (QuantizedWeight(view, FORMATS[number_format], None, view.modules[0], "*") for view in views)
        layout = replace(LAYOUTS["modelopt"], storage=lambda scheme: as_encoded(scheme[0], None))
        self.model = Assignment(tuple(quantized), (), None, ()), layout, torch.bfloat16
        self.reader = SourceReader(open_source(str(source), None, False, Report(verbose=False)))

    def write(self) -> tuple[ShardPlan, ...]:
        plans = [TensorPlan(name, spell(t), tuple(t.shape)) for part in self.files.values() for name, t in part.items()]
        shards = lay_out(plans, 4000)
        tensors = {name: tensor for part in self.files.values() for name, tensor in part.items()}
        with ShardWriter(self.export, shards) as writer:
            for name, tensor in tensors.items():
                writer.write(name, tensor)
            writer.finish(durable=False)
        assert len(shards) > 1
        return shards


def spell(tensor: torch.Tensor) -> str:
    return {torch.uint8: "U8", torch.int8: "I8", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3"}[tensor.dtype]


@pytest.fixture
def exported(tmp_path: Path) -> Iterator[Callable[[str], Exported]]:
    made: list[Exported] = []

    def get(number_format: str) -> Exported:
        made.append(Exported(tmp_path, number_format))
        return made[-1]

    yield get
    for one in made:
        one.reader.__exit__()


@pytest.mark.parametrize("number_format", ["fp8", "nvfp4", "int8_per_channel", "fp8_per_channel"])
def test_the_first_and_the_worst_of_each_kind_are_read_back(
    number_format: str, exported: Callable[[str], Exported]
) -> None:
    found = exported(number_format)
    samples, problems = read_samples(found.export, found.write(), found.errors, found.reader, found.model)
    assert problems == []
    assert [sample.module for sample in samples][:1] == ["layers.0.up"]
    worst = worst_of([error for error in found.errors if error.kind == "up"]).module
    assert {sample.module for sample in samples} == {"layers.0.up", worst, "layers.0.down"}
    by_module = {error.module: decibels(error.signal, error.noise) for error in found.errors}
    for sample in samples:
        assert sample.db == pytest.approx(by_module[sample.module], abs=0.01)
        assert sample.db > 15
        assert 0.98 < sample.cosine <= 1.0001


def test_bytes_that_are_not_the_ones_meant_are_told(exported: Callable[[str], Exported]) -> None:
    found = exported("nvfp4")
    codes = found.files["layers.0.up"]["layers.0.up.weight"]
    codes[3] ^= 0x88  # signs of one row
    _, problems = read_samples(found.export, found.write(), found.errors, found.reader, found.model)
    (problem,) = problems
    assert problem.what.startswith("layers.0.up: ")
    assert "on disk" in problem.what
    assert f"{decibels(found.errors[0].signal, found.errors[0].noise):.2f}" in problem.what


def test_weights_of_another_module_are_told(exported: Callable[[str], Exported]) -> None:
    found = exported("fp8")
    found.files["layers.0.down"]["layers.0.down.weight"] = found.files["layers.1.up"]["layers.1.up.weight"]
    _, problems = read_samples(found.export, found.write(), found.errors, found.reader, found.model)
    assert [problem.what.partition(":")[0] for problem in problems] == ["layers.0.down"]
    assert " -" in problems[0].what  # uncorrelated: about -3 dB


def test_a_scale_that_is_no_number_is_told(exported: Callable[[str], Exported]) -> None:
    found = exported("fp8")
    found.files["layers.0.down"]["layers.0.down.weight_scale"].fill_(float("nan"))
    _, problems = read_samples(found.export, found.write(), found.errors, found.reader, found.model)
    assert [problem.what.partition(":")[0] for problem in problems] == ["layers.0.down"]

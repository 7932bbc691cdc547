"""An export with each kind of damage in turn: verification has to name it."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest
import torch
from rich.console import Console

from hf_ptq.checkpoint.dtypes import SAFETENSORS_DTYPES
from hf_ptq.checkpoint.shards import ShardPlan, TensorPlan, index_json, lay_out
from hf_ptq.checkpoint.writer import ShardWriter
from hf_ptq.errors import RunError
from hf_ptq.export import verify as module
from hf_ptq.export.config_files import LayerAlgo, exported_config, quantization_config, write_json
from hf_ptq.export.layouts import LAYOUTS, Contents
from hf_ptq.export.verify import Expectation, verify_export
from hf_ptq.report import Report

NVFP4 = LayerAlgo("NVFP4", 16, 4, 4, "float")
FP8 = LayerAlgo("FP8", None, 8, 8, "float")
QUANTIZED, REST = ("model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"), ("lm_head",)


@dataclasses.dataclass
class Export:
    """A small export as the run would have written it."""

    directory: Path
    tensors: dict[str, torch.Tensor]
    shards: tuple[ShardPlan, ...]
    checksums: dict[str, int]
    expectation: Expectation
    report: Report

    def problems(self) -> list[str]:
        try:
            done = verify_export(self.directory, self.shards, self.checksums, self.expectation, self.report)
            self.report.record("verified", {**dataclasses.asdict(done), "percent": done.percent})
        except RunError as error:
            return [str(problem) for problem in error.problems]
        return []

    def contain(self, **changes) -> None:
        """Expect other contents."""
        contents = dataclasses.replace(self.expectation.contents, **changes)
        self.expectation = dataclasses.replace(self.expectation, contents=contents)

    def overwrite(self, name: str, data: bytes, at: int = 0) -> None:
        """Damage the bytes of one tensor."""
        shard = next(s for s in self.shards if name in s.offsets)
        with (self.directory / shard.file).open("r+b") as file:
            file.seek(shard.offsets[name] + at)
            file.write(data)

    def write_json(self, name: str, change) -> None:
        data = json.loads((self.directory / name).read_text())
        change(data)
        write_json(self.directory / name, data)


def make(directory: Path, max_shard_bytes: int = 20_000, layers: dict[str, LayerAlgo] | None = None) -> Export:
    torch.manual_seed(0)
    tensors = {"model.embed_tokens.weight": torch.randn(40, 64).bfloat16(), "empty": torch.zeros(0, 4)}
    for name in QUANTIZED:
        tensors[f"{name}.weight"] = torch.randint(0, 255, (128, 64), dtype=torch.uint8)
        tensors[f"{name}.weight_scale"] = (torch.rand(128, 8) + 0.1).to(torch.float8_e4m3fn)
        tensors[f"{name}.weight_scale_2"] = torch.tensor(0.01)
        tensors[f"{name}.input_scale"] = torch.tensor(0.02)
    plans = [TensorPlan(n, SAFETENSORS_DTYPES[t.dtype], tuple(t.shape)) for n, t in tensors.items()]
    shards = lay_out(plans, max_shard_bytes)
    with ShardWriter(directory, shards) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
        checksums = writer.finish(durable=True)
    flat, nested = quantization_config(layers or dict.fromkeys(QUANTIZED, NVFP4), REST, None)
    config = exported_config({"model_type": "x", "id2label": {"0": "a"}, "sizes": (1, 2)}, flat)
    write_json(directory / "config.json", config)
    write_json(directory / "hf_quant_config.json", nested)
    if len(shards) > 1:
        write_json(directory / "model.safetensors.index.json", index_json(shards))
    (directory / "sub").mkdir()
    (directory / "sub/code.py").write_text("x")
    scales = [name for name in tensors if "scale" in name]
    schemes = dict.fromkeys(QUANTIZED, ("nvfp4", "nvfp4"))
    files = {"config.json": config, "hf_quant_config.json": nested}
    contents = Contents(schemes, REST)
    expectation = Expectation(files, LAYOUTS["modelopt"], contents, scales, [Path("sub/code.py")])
    return Export(directory, tensors, shards, checksums, expectation, Report(Console(quiet=True)))


@pytest.fixture
def export(tmp_path) -> Export:
    made = make(tmp_path)
    assert len(made.shards) == 2
    return made


@pytest.mark.parametrize("max_shard_bytes", [20_000, 10**9])
def test_a_sound_export_passes_and_it_is_said_how_much_was_read(tmp_path, max_shard_bytes):
    export = make(tmp_path, max_shard_bytes)
    (tmp_path / "hf_ptq_report.json").write_text("{}")  # may be there already
    assert export.problems() == []
    total = sum(t.numel() * t.element_size() for t in export.tensors.values())
    assert export.report.sections["verified"] == {
        "shards": len(export.shards), "tensors": len(export.tensors), "of_tensors": len(export.tensors),
        "bytes": total, "of_bytes": total, "percent": 100.0,
    }  # fmt: skip


@pytest.mark.parametrize("at", [0, 4000, 8191])
def test_a_changed_byte(export, at):
    name = f"{QUANTIZED[1]}.weight"
    old = int(export.tensors[name].flatten()[at])
    export.overwrite(name, bytes([old ^ 1]), at)
    assert export.problems() == [f"{name}: model-00002-of-00002.safetensors does not hold the bytes that were written"]


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("suffix", ["input_scale", "weight_scale"])
def test_a_bad_scale_that_was_written_faithfully(tmp_path, suffix, value, monkeypatch):
    export = make(tmp_path)
    name = f"{QUANTIZED[0]}.{suffix}"
    tensor = export.tensors[name].clone()
    tensor.view(-1)[-1] = value
    if not bool((tensor.float().view(-1)[-1:] > 0).logical_and(tensor.float().view(-1)[-1:].isfinite())):
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        export.overwrite(name, raw)
        export.checksums[name] = module.zlib.crc32(raw)
        assert export.problems() == [f"{name}: 1 scales are NaN, infinite, zero or negative"]
    else:  # e4m3 has no infinity; this torch saturates
        assert (suffix, value) == ("weight_scale", float("inf"))


def test_e8m0_scales_may_be_zero_but_not_nan(tmp_path):
    export = make(tmp_path)
    name = f"{QUANTIZED[0]}.weight"  # bytes 0 to 254
    export.expectation = dataclasses.replace(export.expectation, scales=[name])
    assert (export.tensors[name] == 0).any()
    assert export.problems() == []
    raw = bytearray(export.tensors[name].numpy().tobytes())
    raw[7] = raw[4000] = 255
    export.overwrite(name, raw)
    export.checksums[name] = module.zlib.crc32(raw)
    assert export.problems() == [f"{name}: 2 scales are NaN, infinite, zero or negative"]


def test_a_scale_that_was_never_planned(export):
    export.expectation = dataclasses.replace(export.expectation, scales=["x.input_scale"])
    assert export.problems() == ["x.input_scale: a scale that the layout does not have"]


def test_damaged_files_are_named_and_the_others_still_checked(export):
    first, second = (export.directory / shard.file for shard in export.shards)
    first.write_bytes(first.read_bytes()[:-5])
    export.overwrite(f"{QUANTIZED[1]}.weight_scale_2", bytes(4))
    assert export.problems() == [
        f"{first.name}: has {export.shards[0].num_bytes - 5} bytes, the layout has {export.shards[0].num_bytes}",
        f"{QUANTIZED[1]}.weight_scale_2: {second.name} does not hold the bytes that were written",
        f"{QUANTIZED[1]}.weight_scale_2: 1 scales are NaN, infinite, zero or negative",
    ]
    first.unlink()
    assert f"{first.name}: missing" in export.problems()


def test_a_changed_header(export):
    path = export.directory / export.shards[0].file
    data = bytearray(path.read_bytes())
    place = data.index(b'"U8"')
    data[place : place + 4] = b'"I8"'
    path.write_bytes(data)
    assert export.problems() == [f"{path.name}: its header differs from the layout at byte {place + 1}"]


def test_files_that_are_missing_or_too_many(export):
    (export.directory / "sub/code.py").unlink()
    (export.directory / "model-00003-of-00003.safetensors").touch()
    (export.directory / "sub/core.123").touch()
    assert export.problems() == [
        "sub/code.py: missing",
        "model-00003-of-00003.safetensors: no part of the export",
        "sub/core.123: no part of the export",
    ]


def test_the_index(export, tmp_path):
    export.write_json("model.safetensors.index.json", lambda data: data["metadata"].update(total_size=1))
    assert export.problems() == ["model.safetensors.index.json: is not the index of the layout"]
    (export.directory / "model.safetensors.index.json").unlink()
    assert export.problems() == ["model.safetensors.index.json: missing"]
    (tmp_path / "single").mkdir()
    single = make(tmp_path / "single", 10**9)
    write_json(single.directory / "model.safetensors.index.json", {})
    assert single.problems() == ["model.safetensors.index.json: no part of the export"]


def test_a_config_that_was_changed_on_the_way(export):
    export.write_json("config.json", lambda data: data.update(model_type="y", extra=None))
    assert export.problems() == ["config.json: does not hold what was to be written, in model_type, extra"]
    (export.directory / "hf_quant_config.json").write_text("{")
    assert any(
        line == "hf_quant_config.json: does not hold what was to be written, in producer, quantization"
        for line in export.problems()
    )


def test_config_files_that_contradict_each_other_or_the_tensors(export):
    """Written as planned, but the plan was wrong."""
    config = dict(export.expectation.files["config.json"])
    config["quantization_config"] = config["quantization_config"] | {"ignore": ["lm_head", "model.layers.1"]}
    write_json(export.directory / "config.json", config)
    files = {**export.expectation.files, "config.json": config}
    export.expectation = dataclasses.replace(export.expectation, files=files)
    problems = export.problems()
    assert problems[0].startswith("config.json and hf_quant_config.json differ in the excluded modules")
    assert problems[1:] == [f"{QUANTIZED[1]}: is quantized but excluded for vLLM, SGLang, TensorRT-LLM"]


def test_a_linear_that_nobody_excludes(export):
    export.contain(unquantized=(*REST, "model.layers.0.mlp.gate"))
    (problem,) = export.problems()
    assert problem.startswith("model.layers.0.mlp.gate: is not quantized and not excluded for vLLM, SGLang")


def test_mixed_precision_has_to_list_exactly_the_quantized_layers(tmp_path):
    export = make(tmp_path, layers={QUANTIZED[0]: NVFP4, QUANTIZED[1]: FP8})
    export.contain(unquantized=("not.excluded.but.not.listed",))
    assert export.problems() == []
    export.contain(schemes=dict.fromkeys([QUANTIZED[0], "new"], ("nvfp4", "nvfp4")))
    assert export.problems() == [
        f"config.json: quantized_layers and the quantized layers differ in {QUANTIZED[1]}, new",
    ]


def test_many_problems_of_a_kind_are_counted(tmp_path):
    export = make(tmp_path)
    for i in range(25):
        (export.directory / f"junk{i:02}").touch()
    problems = export.problems()
    assert len(problems) == 11
    assert problems[-1] == "... and 15 more like these"


def test_an_even_sample_where_there_is_too_much_to_read(monkeypatch):
    rng = random.Random(0)
    plans = []
    for i in range(400):
        plans.append(TensorPlan(f"{i}.weight", "U8", (rng.randrange(10_000, 90_000),)))
        plans.append(TensorPlan(f"{i}.weight_scale", "U8", (5000,)))
        plans.append(TensorPlan(f"{i}.input_scale", "F32", ()))
    shards = lay_out(plans, 10**6)
    scales = {p.name for p in plans if "scale" in p.name}
    total = sum(p.num_bytes for p in plans)
    monkeypatch.setattr(module, "READ_BYTES", total // 10)
    chosen = [tensor for _, tensor in module._chosen(shards, scales, total)]
    half = [tensor for _, tensor in module._chosen(shards[: len(shards) // 2], set(), total)]
    assert total * 0.04 < sum(t.num_bytes for t in half) < total * 0.06, "the ranks share what is read back"
    names = {tensor.name for tensor in chosen}
    assert {f"{i}.input_scale" for i in range(400)} <= names
    num_bytes = sum(t.num_bytes for t in chosen)
    assert total * 0.09 < num_bytes <= total * 0.1 + 400 * 4
    for start in range(0, 400, 50):  # every stretch of the model gives its share
        part = [t for t in chosen if start <= int(t.name.split(".")[0]) < start + 50]
        of = sum(p.num_bytes for p in plans if start <= int(p.name.split(".")[0]) < start + 50)
        assert 0.05 < sum(t.num_bytes for t in part) / of < 0.15
    assert [t.name for t in chosen] == [t.name for s in shards for t in s.tensors if t.name in names]


def test_a_sample_is_what_is_reported(tmp_path, monkeypatch):
    export = make(tmp_path)
    monkeypatch.setattr(module, "READ_BYTES", 12_000)
    assert export.problems() == []
    verified = export.report.sections["verified"]
    assert 0 < verified["bytes"] < 13_000
    assert 30 < verified["percent"] < 60
    assert verified["tensors"] < len(export.tensors)


def test_pieces_of_large_tensors(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PIECE_BYTES", 64)
    monkeypatch.setattr(module, "BATCH_BYTES", 3000)
    export = make(tmp_path)
    assert export.problems() == []
    export.overwrite(f"{QUANTIZED[0]}.weight_scale", b"\x00", at=1023)
    assert [line.split(": ")[1] for line in export.problems()] == [
        "model-00001-of-00002.safetensors does not hold the bytes that were written",
        "1 scales are NaN, infinite, zero or negative",
    ]

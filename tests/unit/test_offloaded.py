"""Weights that live where nothing is computed: in host memory or in a file, and how they get there and back."""

from __future__ import annotations

import dataclasses
import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from hf_ptq.checkpoint.slices import SourceReader
from hf_ptq.checkpoint.source import TensorEntry, open_source
from hf_ptq.distributed.plan import Plan
from hf_ptq.errors import RunError
from hf_ptq.model.build import MetaModel, build_meta_model
from hf_ptq.model.device_map import Offloaded, brought, by_place, places_to_fill
from hf_ptq.model.fill import Filler, _cut
from hf_ptq.model.ranges import Range
from hf_ptq.model.units import Unit, split_units
from hf_ptq.report import Report


def meta_of(directory: Path) -> MetaModel:
    return build_meta_model(open_source(str(directory), None, False, Report(Console(quiet=True), verbose=False)))


def test_offloaded_weights_in_memory_and_in_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    values = {
        "half": torch.randn(3, 5).bfloat16(),
        "whole": torch.randn(7),
        "number": torch.tensor(2.5, dtype=torch.float16),
        "empty": torch.empty(0, 4),
    }
    here = torch.arange(4.0)
    offloaded = Offloaded()
    offloaded.keep("here", here)
    for name, tensor in values.items():
        offloaded.store(name, tensor, folder)
    offloaded.tie("other", "half")
    assert folder.is_dir()
    assert not list(folder.iterdir()), "the file has no name: it cannot be left behind"
    assert set(offloaded) == {"here", *values, "other"}
    assert len(offloaded) == 6
    assert "half" in offloaded
    assert "other" in offloaded
    assert "nothing" not in offloaded
    for name, tensor in values.items():
        found = offloaded[name]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found, tensor), name
    assert offloaded["here"] is here
    assert offloaded["half"] is not offloaded["half"]
    changed = torch.randn(3, 5).bfloat16()
    offloaded.update("other", changed)
    offloaded.update("here", torch.zeros(4))
    assert torch.equal(offloaded["half"], changed)
    assert torch.equal(offloaded["whole"], values["whole"])
    assert here.tolist() == [0, 0, 0, 0]
    offloaded.close()
    assert len(offloaded) == 1  # a name without a weight


def test_the_room_of_the_file_is_given_back_without_close(tmp_path: Path) -> None:
    def open_files() -> int:
        links = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        return sum(str(tmp_path) in link for link in links)

    offloaded = Offloaded()
    offloaded.store("x", torch.ones(4), tmp_path)
    assert open_files() == 1
    del offloaded
    gc.collect()
    assert open_files() == 0


def test_a_folder_that_fails_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"--offload_folder .*file/inside: Not a directory"):
        Offloaded().store("x", torch.ones(4), tmp_path / "file" / "inside")


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(RunError, match=r"No space left on device\n.*more room"):
        Offloaded().store("x", torch.ones(4), tmp_path)


@pytest.mark.parametrize("write_back", [True, False])
def test_brought_weights_are_real_inside_and_go_back_where_they_live(write_back: bool, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model.requires_grad_(False)
    own = [parameter.clone() for parameter in model.parameters()]
    offloaded = Offloaded()
    offloaded.keep("0.weight", own[0].clone())
    offloaded.store("1.weight", own[1], tmp_path)
    names = ["0.weight", "1.weight", "2.weight"]
    for module in model[:2]:
        module.weight = nn.Parameter(module.weight.to("meta"), requires_grad=False)
    with brought(model, names, offloaded, torch.device("cpu"), write_back):
        for name, value in zip(names, own, strict=True):
            assert torch.equal(model.get_parameter(name), value)
            model.get_parameter(name).mul_(2)
    assert [parameter.is_meta for parameter in model.parameters()] == [True, True, False]
    factor = 2 if write_back else 1
    assert torch.equal(offloaded["1.weight"], own[1] * factor)
    if write_back:
        assert torch.equal(offloaded["0.weight"], own[0] * 2)


def test_a_failure_inside_changes_nothing_on_the_disk(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False)).requires_grad_(False)
    own = model[0].weight.clone()
    offloaded = Offloaded()
    offloaded.store("0.weight", own, tmp_path)

    def fail() -> None:
        with brought(model, ["0.weight"], offloaded, torch.device("cpu"), True):
            model[0].weight.zero_()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert model[0].weight.is_meta
    assert torch.equal(offloaded["0.weight"], own)


def test_places_to_fill(tiny: Callable[[str], Path]) -> None:
    """Weights on the host or the disk are filled on the host, their buffers where they compute."""
    meta = meta_of(tiny("deepseek_v3"))
    homes = {"model.embed_tokens": "cuda:0", "model.layers.0": "cuda:1", "model.layers.1": "cpu", "": "disk"}
    plan = Plan("device map", "cuda:0", 0, (), device_map=homes)
    places = places_to_fill(meta, plan)
    assert places.keys() | {"model.embed_tokens.weight"} >= {p.parameter for p in meta.placements.values()} - {
        "model.layers.1.mlp.gate.e_score_correction_bias",
        "model.layers.2.mlp.gate.e_score_correction_bias",
    }
    assert "model.embed_tokens.weight" not in places
    assert places["model.layers.0.self_attn.o_proj.weight"] == torch.device("cuda:1")
    assert places["model.layers.1.mlp.gate.weight"] == torch.device("cpu")
    assert places["model.layers.2.mlp.gate.weight"] == torch.device("cpu")
    assert "model.layers.1.mlp.gate.e_score_correction_bias" not in places
    assert places_to_fill(meta, Plan("single", "cuda:0", 0, ())) == {}
    source = ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]
    parts = by_place(Unit("rest", tuple(source)), meta, places)
    assert [part.tensors for part in parts] == [("lm_head.weight", "model.norm.weight"), ("model.embed_tokens.weight",)]


def test_a_chunk_is_for_one_device() -> None:
    entries = [TensorEntry(name, "f", "BF16", (4,), offset, 8) for name, offset in (("a", 0), ("b", 8), ("c", 16))]
    devices = ["cpu", "cpu", "meta"]
    targets = [torch.empty(4, dtype=torch.bfloat16, device=device) for device in devices]
    chunks = list(_cut(zip([Range(entry, 0, 0, 4) for entry in entries], targets, strict=True)))
    assert [[piece.entry.name for piece in chunk] for chunk in chunks] == [["a", "b"], ["c"]]


def test_what_transformers_loader_fills_goes_to_its_place_too(tiny: Callable[[str], Path]) -> None:
    """Without byte ranges for the experts (a converter of another kind)."""
    source = open_source(str(tiny("qwen3_moe")), None, False, Report(Console(quiet=True), verbose=False))
    meta = dataclasses.replace(build_meta_model(source), stacking={})
    units = [unit for unit in split_units(meta.model, meta.placements) if not unit.is_carried]
    elsewhere = "model.layers.1.mlp.experts.down_proj"
    places = {elsewhere: torch.device("meta")}
    with SourceReader(source) as reader, Filler(meta, reader, torch.device("cpu"), places=places) as filler:
        list(filler.fill(units, lambda _: None))
    assert [name for name, parameter in meta.model.named_parameters() if parameter.is_meta] == [elsewhere]


def test_no_unit_is_begun_before_the_last_one_is_done_with(tiny: Callable[[str], Path]) -> None:
    source = open_source(str(tiny("llama")), None, False, Report(Console(quiet=True), verbose=False))
    meta = build_meta_model(source)
    units = [unit for unit in split_units(meta.model, meta.placements) if not unit.is_carried]
    device = torch.device("cpu")
    due = 0
    with SourceReader(source) as reader, Filler(meta, reader, device, read_ahead=0) as filler:
        for unit in filler.fill(units, lambda _: None):
            due += sum(source.tensors[name].num_bytes for name in unit.tensors)
            assert reader.bytes_read == due
    assert due == source.total_bytes

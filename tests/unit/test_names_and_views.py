"""Where each tensor of the source lies in the model: every one placed once, stacked ones with their own bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tiny import CONFIGS, altered, load_tensors, raw, save_tiny
from transformers import AutoModelForCausalLM

from hf_ptq.checkpoint.names import Placement, by_parameter, place_tensors
from hf_ptq.checkpoint.slices import SourceReader
from hf_ptq.checkpoint.source import Source, open_source
from hf_ptq.model.build import MetaModel, build_meta_model, finish_loading, load_unit
from hf_ptq.model.units import CARRIED, find_decoder_layers, split_units
from hf_ptq.model.views import WeightView, weight_views
from hf_ptq.report import Report

CPU = torch.device("cpu")
MOE = [name for name, (_, options) in CONFIGS.items() if "num_experts_per_tok" in options]


@dataclass(frozen=True)
class Loaded:
    source: Source
    meta: MetaModel
    views: tuple[WeightView, ...]


def opened(directory: Path) -> Loaded:
    source = open_source(str(directory), None, False, Report(verbose=False))
    meta = build_meta_model(source)
    return Loaded(source, meta, weight_views(meta.placements, source.tensors, meta.stacking))


def load(found: Loaded) -> None:
    """Fill the model unit by unit."""
    with SourceReader(found.source) as reader:
        for unit in split_units(found.meta.model, found.meta.placements):
            if not unit.is_carried:
                load_unit(found.meta, {name: reader.tensor(name) for name in unit.tensors}, CPU)
        finish_loading(found.meta, CPU)


@pytest.fixture(scope="module")
def loaded(tiny: Callable[[str], Path]) -> Callable[[str], Loaded]:
    made: dict[str, Loaded] = {}

    def get(name: str) -> Loaded:
        if name not in made:
            made[name] = opened(tiny(name))
            load(made[name])
        return made[name]

    return get


# ---- names


def test_positions_count_by_parameter_and_pattern() -> None:
    def rename(name: str) -> tuple[str | None, str | None]:
        if name.startswith("x"):
            return None, None
        return ("stacked", name[0]) if name[0] in "gu" else (f"model.{name}", None)

    placed = place_tensors(["g0", "u0", "g1", "u1", "norm", "x"], rename)
    assert placed == {
        "g0": Placement("stacked", "g", 0),
        "u0": Placement("stacked", "u", 0),
        "g1": Placement("stacked", "g", 1),
        "u1": Placement("stacked", "u", 1),
        "norm": Placement("model.norm"),
        "x": Placement(None),
    }
    assert by_parameter(placed) == {"stacked": ["g0", "u0", "g1", "u1"], "model.norm": ["norm"]}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_source_tensor_is_placed_once(name: str, loaded: Callable[[str], Loaded]) -> None:
    found = loaded(name)
    placements = found.meta.placements
    assert placements.keys() == found.source.tensors.keys()
    assert all(p.parameter is not None for p in placements.values()), "the tiny models have nothing to carry over"
    assert max(Counter(placements.values()).values()) == 1, "no two tensors lie in one place"
    state = found.meta.model.state_dict()
    elements = {p: sum(torch.Size(found.source.tensors[n].shape).numel() for n in names)
                for p, names in by_parameter(placements).items()}  # fmt: skip
    assert elements == {p: state[p].numel() for p in elements}, "and together they fill their parameter"


@pytest.mark.parametrize("name", MOE)
def test_positions_are_the_experts_numbers(name: str, loaded: Callable[[str], Loaded]) -> None:
    """With more than ten experts too: 10 comes after 9, not after 1."""
    stacked = {n: p for n, p in loaded(name).meta.placements.items() if p.pattern is not None}
    assert stacked
    assert {n: int(n.split(".experts.")[1].split(".")[0]) for n in stacked} == {
        n: p.position for n, p in stacked.items()
    }


def test_twelve_experts_keep_their_order(tmp_path: Path) -> None:
    found = opened(save_tiny("qwen3_moe", tmp_path / "twelve", num_experts=12))
    load(found)
    for view in found.views:
        if view.is_stacked:
            assert [int(m.split(".experts.")[1].split(".")[0]) for m in view.modules] == list(range(12))
    check_bytes(found)


# ---- views


def check_bytes(found: Loaded) -> None:
    """Each view of the loaded model is its source tensors bit for bit; routers kept in fp32 are so in value."""
    source = load_tensors(found.source.directory)
    for view in found.views:
        held = view.of(found.meta.model.get_parameter(view.parameter))
        parts = list(held) if view.is_stacked else [held]
        for module, part in zip(view.modules, parts, strict=True):
            stored = source[f"{module}.weight"]
            assert raw(part) == raw(stored.to(part.dtype)), module
            assert part.dtype == stored.dtype or module.endswith(".gate"), module


@pytest.mark.parametrize("name", CONFIGS)
def test_views_show_the_sources_bytes(name: str, loaded: Callable[[str], Loaded]) -> None:
    check_bytes(loaded(name))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_matrix_has_one_view(name: str, loaded: Callable[[str], Loaded]) -> None:
    found = loaded(name)
    viewed = Counter(module for view in found.views for module in view.modules)
    matrices = [n.removesuffix(".weight") for n, e in found.source.tensors.items() if len(e.shape) == 2]
    assert viewed == Counter(matrices)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_model_is_the_one_that_transformers_loads(
    name: str, loaded: Callable[[str], Loaded], tiny: Callable[[str], Path]
) -> None:
    """Every parameter and buffer with its dtype, and the logits."""
    ours = loaded(name).meta.model
    theirs = AutoModelForCausalLM.from_pretrained(tiny(name), dtype="auto").eval()
    mine, state = ours.state_dict(), theirs.state_dict()
    assert mine.keys() == state.keys()
    assert [key for key in mine if raw(mine[key]) != raw(state[key])] == []
    ids = torch.randint(3, 250, (2, 24), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        assert ours(ids).logits.equal(theirs(ids).logits)


def test_gate_and_up_lie_one_after_the_other(loaded: Callable[[str], Loaded]) -> None:
    views = {view.modules[0]: view for view in loaded("mixtral").views if view.is_stacked}
    layer = "model.layers.2.block_sparse_moe.experts.0"
    gate, up, down = (views[f"{layer}.{leaf}"] for leaf in ("w1", "w3", "w2"))
    assert gate.parameter == up.parameter == "model.layers.2.mlp.experts.gate_up_proj"
    assert down.parameter == "model.layers.2.mlp.experts.down_proj"
    assert (gate.start_row, up.start_row, down.start_row) == (0, 32, 0)
    assert (gate.shape, up.shape, down.shape) == ((32, 64), (32, 64), (64, 32))
    assert (gate.leaf, gate.owner) == ("w1", "model.layers.2.mlp.experts")
    assert gate.stack == "model.layers.2.block_sparse_moe.experts"
    assert gate.num_elements == 8 * 32 * 64


def test_a_view_shares_memory() -> None:
    parameter = torch.arange(2 * 6 * 3, dtype=torch.float32).reshape(2, 6, 3)
    view = WeightView(("e.0.up", "e.1.up"), "e.gate_up", (2, 3), start_row=4, is_stacked=True)
    assert view.of(parameter).equal(parameter[:, 4:6])
    view.of(parameter).zero_()
    assert parameter[:, 4:].abs().sum() == 0
    assert parameter[:, :4].sum() == sum(range(12)) + sum(range(18, 30))


# ---- units


@pytest.mark.parametrize("name", CONFIGS)
def test_units_divide_the_source(name: str, loaded: Callable[[str], Loaded]) -> None:
    found = loaded(name)
    model, placements = found.meta.model, found.meta.placements
    units = split_units(model, placements)
    assert Counter(n for unit in units for n in unit.tensors) == Counter(list(placements))
    assert find_decoder_layers(model) == "model.layers"
    layers = [f"model.layers.{i}" for i in range(len(model.model.layers))]
    assert [unit.name for unit in units] == ["embedding", *layers, "rest"]
    by_name = {unit.name: unit.tensors for unit in units}
    assert by_name["embedding"] == ("model.embed_tokens.weight",)
    assert set(by_name["rest"]) == {"model.norm.weight"} | ({"lm_head.weight"} & set(placements))
    assert all(n.startswith(f"{layer}.") for layer in layers for n in by_name[layer])


def test_what_the_model_never_builds_is_a_unit_of_its_own(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    extra = {"mtp.fc.weight": torch.ones(4, 4), "model.layers.3.mlp.up_proj.weight": torch.ones(4, 4)}
    found = opened(altered(tiny("llama"), tmp_path / "source", lambda tensors: tensors.update(extra)))
    assert all(found.meta.placements[name] == Placement(None) for name in extra)
    unit = split_units(found.meta.model, found.meta.placements)[-1]
    assert (unit.name, set(unit.tensors), unit.is_carried) == (CARRIED, set(extra), True)
    assert not any(module.startswith("mtp") for view in found.views for module in view.modules)


def test_a_checkpoint_of_the_bare_body_is_placed(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    found = opened(altered(tiny("llama_tied"), tmp_path / "source", rename))
    load(found)
    assert found.meta.placements["norm.weight"] == Placement("model.norm.weight")
    check_bytes(found)

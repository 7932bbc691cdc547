"""What is refused for runs of several ranks, beyond what needs several ranks to be seen."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from rich.console import Console

from hf_ptq import planning
from hf_ptq.checkpoint.source import open_source
from hf_ptq.config import RunConfig
from hf_ptq.distributed.plan import Plan
from hf_ptq.distributed.process_group import DistributedState
from hf_ptq.errors import UserError
from hf_ptq.quantization.algorithms import ALGORITHMS
from hf_ptq.quantization.recipe import load_recipe
from hf_ptq.report import Report


@pytest.fixture
def silent():
    return Report(Console(quiet=True), verbose=False)


def test_an_algorithm_that_is_not_built_for_several_ranks(tiny, tmp_path, silent, monkeypatch):
    monkeypatch.setitem(ALGORITHMS, "max", dataclasses.replace(ALGORITHMS["max"], plan_safe=False))
    config = RunConfig(str(tiny("llama")), tmp_path / "out", device="cpu")
    source = open_source(config.model, None, False, silent)
    meta, units, plan = planning.plan_model(config, source, DistributedState(0, 1, torch.device("cpu")), silent)
    planning.plan_export(config, planning.read_recipe(config), source, meta, units, plan, silent)
    several = Plan("replicated", "cpu", 0, (), world_size=2)
    with pytest.raises(UserError, match="'max' has not been built for several ranks"):
        planning.plan_export(config, planning.read_recipe(config), source, meta, units, several, silent)


def test_fewer_rows_asked_for_than_ranks_is_refused_before_any_is_read(tiny, tmp_path, silent):
    config = RunConfig(str(tiny("llama")), tmp_path / "out", device="cpu", calib_sizes=(1, 1))
    source = open_source(config.model, None, False, silent)
    meta, units, plan = planning.plan_model(config, source, DistributedState(0, 1, torch.device("cpu")), silent)
    planning.plan_export(config, planning.read_recipe(config), source, meta, units, plan, silent)
    planning.plan_export(
        config, planning.read_recipe(config), source, meta, units, dataclasses.replace(plan, world_size=2), silent
    )
    three = dataclasses.replace(plan, world_size=3)
    with pytest.raises(UserError, match="2 calibration rows cannot be dealt to 3 ranks"):
        planning.plan_export(config, planning.read_recipe(config), source, meta, units, three, silent)
    planning.plan_export(config, load_recipe("w4a16_nvfp4"), source, meta, units, three, silent)

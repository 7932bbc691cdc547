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
from hf_ptq.report import Report


@pytest.fixture
def silent():
    return Report(Console(quiet=True), verbose=False)


def test_an_algorithm_that_is_not_built_for_several_ranks(tiny, tmp_path, silent, monkeypatch):
    monkeypatch.setitem(ALGORITHMS, "max", dataclasses.replace(ALGORITHMS["max"], plan_safe=False))
    config = RunConfig(str(tiny("llama")), tmp_path / "out", device="cpu")
    source = open_source(config.model, None, False, silent)
    meta, units, plan = planning.plan_model(config, source, DistributedState(0, 1, torch.device("cpu")), silent)
    planning.plan_export(config, source, meta, units, plan, silent)
    several = Plan("replicated", "cpu", 0, (), world_size=2)
    with pytest.raises(UserError, match="'max' has not been built for several ranks"):
        planning.plan_export(config, source, meta, units, several, silent)

"""Calibration that passes a kind of module by stops on all ranks at the first batch, and is told once (P4)."""

from __future__ import annotations

import json

import pytest
from ranks import WORKER, torchrun
from tiny import save_tiny_vision


@pytest.mark.parametrize("options", [{}, {"ep_degree": 1}], ids=["expert-parallel", "replicated"])
def test_all_ranks_stop_where_no_rank_called_a_kind(options, token_rows, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text('rules:\n  - {import: fp8}\n  - {pattern: "*visual*", weight: fp8, input: fp8}\n')
    request = {
        "model": str(save_tiny_vision(tmp_path / "model")), "export_path": str(tmp_path / "out"), "recipe": str(recipe),
        "datasets": [str(token_rows)], "device": "cpu", "durable": False, "skip_generate": True, "batch_size": 1,
        "verbose": False, **options,
    }  # fmt: skip
    (tmp_path / "requests.json").write_text(json.dumps([request]))
    done = torchrun(2, WORKER, tmp_path / "requests.json")
    told = done.stdout + done.stderr
    assert done.returncode != 0
    assert "8 modules were never called in calibration" in told, told
    assert "model.visual.merger.linear_fc2" in told
    assert not (tmp_path / "out").exists()

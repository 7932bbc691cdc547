"""The frozen configuration and the readers of its text."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hf_ptq.config import RunConfig, parse_counts, parse_names
from hf_ptq.errors import UserError


def test_the_config_is_frozen():
    config = RunConfig("m", Path("out"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1


def test_lists():
    assert parse_counts("512") == (512,)
    assert parse_counts("1, 2,-3") == (1, 2, -3)
    assert parse_names("a, /b c/d.jsonl") == ("a", "/b c/d.jsonl")
    with pytest.raises(UserError, match=r"'x', '1\.5'"):
        parse_counts("1,x,1.5")
    with pytest.raises(UserError, match="empty"):
        parse_names("a,,b")


def wrong(**changed):
    """What is wrong with a request for a hub model, changed in these fields."""
    config = RunConfig(**{"model": "org/name", "export_path": Path("out"), **changed})
    return [problem.what for problem in config.problems()]


def test_a_sound_request_has_no_problem():
    assert wrong() == []
    assert wrong(revision="main", device="cuda:11", datasets=("a", "b"), calib_sizes=(1, 2), batch_size=0) == []


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"model": ""}, "--model is missing"),
        (
            {"model": "demo", "revision": "main"},
            "--revision main names a version on the hub, but --model demo is local",
        ),
        ({"device": "cuda:"}, "--device 'cuda:' is no device"),
        ({"device": "cuda:-1"}, "--device 'cuda:-1' is no device"),
        ({"device": "cpu:0"}, "--device 'cpu:0' is no device"),
        ({"calib_seq": 0}, "--calib_seq 0 is less than 1"),
        ({"batch_size": -1}, "--batch_size -1 is less than 0"),
        ({"max_shard_bytes": 0}, "--max_shard_size 0 is less than 1"),
        ({"seed": -1}, "--seed -1 is less than 0"),
    ],
)
def test_each_rule(changed, what):
    assert wrong(**changed) == [what]


def test_all_broken_rules_come_together():
    assert len(wrong(model="", device="x", calib_seq=0, batch_size=-1, max_shard_bytes=0, seed=-1)) == 6


def test_a_preset_does_not_count_beside_a_recipe():
    """The default least of all: a report that named it would tell of formats that were not used."""
    assert RunConfig("m", Path("out")).as_dict()["qformat"] == "fp8"
    preset = RunConfig("m", Path("out"), qformat="nvfp4")
    assert preset.as_dict() == dataclasses.asdict(preset)
    given = RunConfig("m", Path("out"), recipe="mine.yaml").as_dict()
    assert (given["qformat"], given["recipe"]) == (None, "mine.yaml")

"""What two ranks tell each other: see agreeing.py for the cases."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest
from ranks import torchrun

RANK_1 = f"rank 1 (node 0, {socket.gethostname()})"


@pytest.fixture(scope="module")
def told(tiny, tmp_path_factory) -> list[dict]:
    """By rank: case -> what it was told."""
    directory = tmp_path_factory.mktemp("agreeing")
    done = torchrun(2, Path(__file__).with_name("agreeing.py"), tiny("llama"), directory)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(directory.glob(".hf-ptq-probe*"))
    return [json.loads((directory / f"rank-{rank}.json").read_text()) for rank in (0, 1)]


def both(told: list[dict], case: str) -> object:
    """What both ranks were told: the same."""
    assert told[0][case] == told[1][case]
    return told[0][case]


def test_a_bug_of_one_rank_is_an_error_of_all_that_names_it(told):
    text = both(told, "one rank has a bug")
    assert text.startswith(f"RunError: {RANK_1}, step 'the step': ValueError: the reason\nTraceback")


def test_what_all_say_is_said_once_and_nameless(told):
    assert both(told, "all ranks refuse") == "UserError: not this\n    -> but that"
    assert both(told, "first refuses") == "UserError: no such model\n    -> name another"


def test_a_failure_outweighs_a_refusal(told):
    text = both(told, "one refuses, one fails")
    assert text.startswith("RunError: rank 0 (node 0, ")
    assert f"{RANK_1}, step 'the step': failed" in text


def test_an_inner_agreement_is_not_told_twice(told):
    text = both(told, "nested")
    assert text.startswith(f"RunError: {RANK_1}, step 'inner': ZeroDivisionError")
    assert "outer" not in text


def test_values_reach_all_ranks(told):
    assert both(told, "first decides") == {"text": "größer", "numbers": [1, 2.5, None]}
    assert both(told, "gather") == ["", "x" * 1000]
    assert both(told, "broadcast") == [[0, 1, 2], [3, 4, 5]]
    assert both(told, "numbers") == [3, 4]
    assert both(told, "one first") == [False, True]
    assert both(told, "a long decision") == "fetched"


def test_a_maximum_keeps_a_nan_as_infinity_and_a_sum_is_exact(told):
    assert both(told, "reduce") == [["4.0", "5.0", "inf"], [2.0**25, 2.0]]


def test_ranks_that_differ_are_named_with_what_they_have(told):
    text = both(told, "other options")
    assert "the ranks do not agree on the option calib_seq: 512 on rank 0; 513 on rank 1" in text
    assert "torch" not in text
    assert 'the option calib_seq: "512" on rank 0; "513" on rank 1' in both(told, "another config")


def test_paths_that_a_node_does_not_see_are_refused_by_its_name(told):
    assert both(told, "see the export") is None
    text = both(told, "an unseen export")
    assert text.startswith(f"UserError: {RANK_1}, step 'see the export path': --export_path ")
    assert "does not see what rank 0 writes there" in text
    assert "storage that all nodes share" in text
    both(told, "see the source")
    text = both(told, "an unseen source")
    assert re.match(
        rf"UserError: {re.escape(RANK_1)}, step 'see the source': the source: .*config.json is not seen", text
    )


def test_weights_that_a_node_does_not_see_are_refused_by_its_name(told):
    """Before a run, where they are on the disk, and after a download."""
    assert both(told, "weights that came") == [True, {}]
    for case, step in (("unseen weights", "see the source"), ("unseen weights that came", "see the weights")):
        assert re.match(
            rf"UserError: {re.escape(RANK_1)}, step '{step}': the source: .*/model\.safetensors is not seen on this node",
            str(both(told, case)),
        )


def test_an_export_directory_of_all_ranks(told):
    assert both(told, "destination") == ["of-rank-0", "of-rank-1"]
    assert both(told, "failing destination") == []

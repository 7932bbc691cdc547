"""The exchange of tokens between two ranks: what it gives, and how many bytes travel. See exchanging.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from exchanging import CASES, EXPERTS, HIDDEN, WAYS, K
from ranks import torchrun

LOCAL = EXPERTS // 2
LAYERS = [f"{name}, torch.{dtype}" for name in ("qwen3_moe", "gpt_oss") for dtype in ("bfloat16", "float32")]


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> list[dict]:
    """By rank: case -> what came of it."""
    directory = tmp_path_factory.mktemp("exchanging")
    done = torchrun(2, Path(__file__).with_name("exchanging.py"), directory)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((directory / f"rank-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layer", LAYERS)
def test_tokens_get_what_one_process_gives_them(layer, way, case, told):
    for rank in (0, 1):
        of_case = told[rank][f"{layer}, {way}, {case}"]
        assert of_case["equal"]
        assert of_case["any"] == (CASES[case][rank][0] > 0)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_token_travels_once_to_each_rank_and_its_outputs_come_back(layer, way, case, told):
    """Four collectives: numbers, choices (int32), tokens and outputs (bf16); nothing for a rank that keeps its own."""
    indices = [told[rank][f"{layer}, {way}, {case}"]["index"] for rank in (0, 1)]
    goes = [[way == "travels" or to != rank for to in (0, 1)] for rank in (0, 1)]
    tokens = [
        [goes[rank][to] * sum(any(e // LOCAL == to for e in row) for row in indices[rank]) for to in (0, 1)]
        for rank in (0, 1)
    ]
    outputs = [
        [goes[rank][to] * sum(e // LOCAL == to for row in indices[rank] for e in row) for to in (0, 1)]
        for rank in (0, 1)
    ]
    for rank in (0, 1):
        sent, came = tokens[rank], [tokens[other][rank] for other in (0, 1)]
        wanted, asked = outputs[rank], [outputs[other][rank] for other in (0, 1)]
        assert told[rank][f"{layer}, {way}, {case}"]["calls"] == [
            [[2, 2], 8, None, None, False],
            [[sum(sent), K], 4, came, sent, False],
            [[sum(sent), HIDDEN], 2, came, sent, False],
            [[sum(asked), HIDDEN], 2, wanted, asked, True],
        ]


def test_gradients_are_refused(told):
    assert [rank["gradient"] for rank in told] == [
        "the exchange of tokens has no gradient: run it under torch.no_grad()"
    ] * 2

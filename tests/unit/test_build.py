"""The model on meta: what is said when source and configuration do not fit, and what memory it takes (none)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import altered

from hf_ptq.checkpoint.source import Source, open_source
from hf_ptq.errors import UserError
from hf_ptq.model.build import build_meta_model
from hf_ptq.report import Report

Change = Callable[[dict[str, torch.Tensor]], object]
UP = "model.layers.1.mlp.up_proj.weight"


def opened(directory: Path) -> Source:
    return open_source(str(directory), None, False, Report(verbose=False))


@pytest.fixture
def source(tiny: Callable[[str], Path], tmp_path: Path) -> Callable[..., Source]:
    """A tiny llama with other tensors or configuration."""

    def make(change: Change = lambda tensors: None, model: str = "llama", **config: object) -> Source:
        return opened(altered(tiny(model), tmp_path / "source", change, **config))

    return make


def refusal(source: Source, **options: object) -> str:
    with pytest.raises(UserError) as caught:
        build_meta_model(source, **options)
    return str(caught.value)


def test_nothing_is_allocated(source: Callable[..., Source]) -> None:
    model = build_meta_model(source()).model
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_missing_tensors_are_named(source: Callable[..., Source]) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[UP], tensors["lm_head.weight"]

    said = refusal(source(change))
    assert f"source lacks 2 tensors that LlamaForCausalLM needs: {UP}, lm_head.weight\n" in said
    assert "the checkpoint is incomplete" in said


def test_of_many_missing_tensors_a_few_are_named(source: Callable[..., Source]) -> None:
    said = refusal(source(num_hidden_layers=5))
    assert "lacks 18 tensors" in said
    assert "model.layers.3.self_attn.q_proj.weight" in said
    assert said.count("model.layers.") == 5


def test_a_tied_head_is_not_missing(source: Callable[..., Source]) -> None:
    meta = build_meta_model(source(model="llama_tied"))
    assert "lm_head.weight" not in meta.placements


def test_wrong_shapes_are_named_with_both(source: Callable[..., Source]) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[UP] = tensors[UP][:90].clone()
        tensors["model.norm.weight"] = torch.ones(65)

    said = refusal(source(change))
    assert f"{UP} has shape [90, 64], the model of config.json needs [96, 64]" in said
    assert "model.norm.weight has shape [65], the model of config.json needs [64]" in said


def test_missing_and_misshapen_come_at_once(source: Callable[..., Source]) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["lm_head.weight"]
        tensors[UP] = tensors[UP].T.contiguous()

    said = refusal(source(change))
    assert "lacks 1 tensors" in said
    assert f"{UP} has shape [64, 96]" in said


EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


def test_a_missing_expert_is_named(source: Callable[..., Source]) -> None:
    said = refusal(source(lambda tensors: tensors.pop(EXPERT), model="qwen3_moe"))
    assert EXPERT in said or "model.layers.1.mlp.experts.gate_up_proj" in said


def test_a_misshapen_expert_is_named(source: Callable[..., Source]) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[EXPERT] = tensors[EXPERT][:16].clone()

    said = refusal(source(change, model="qwen3_moe"))
    assert EXPERT in said
    assert "[16, 64]" in said


def test_an_attention_that_there_is_not(source: Callable[..., Source]) -> None:
    said = refusal(source(), attn_implementation="flash_attention_9")
    assert "flash_attention_9" in said
    assert "check --attn_implementation" in said


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_the_attention_asked_for(kernel: str, source: Callable[..., Source]) -> None:
    assert build_meta_model(source(), kernel).model.config._attn_implementation == kernel


def test_a_configuration_that_transformers_refuses(source: Callable[..., Source]) -> None:
    said = refusal(source(hidden_size="many"))
    assert "config.json" in said or "transformers cannot build" in said


@pytest.mark.parametrize(
    ("declared", "stored", "expected"),
    [
        ("float16", torch.bfloat16, torch.float16),
        (None, torch.float32, torch.float32),
        (None, torch.bfloat16, torch.bfloat16),
    ],
)
def test_the_dtype_is_the_declared_one_or_that_of_most_weights(
    declared: str | None, stored: torch.dtype, expected: torch.dtype, source: Callable[..., Source]
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: t.to(stored) for name, t in tensors.items() if t.dim() == 2})

    meta = build_meta_model(source(change, dtype=declared))
    assert meta.dtype == expected
    assert next(meta.model.parameters()).dtype == expected


def test_end_ids_come_from_the_generation_config(source: Callable[..., Source]) -> None:
    opened_source = source()
    path = opened_source.directory / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [2, 5], "do_sample": False, "temperature": 0.6}))
    own = build_meta_model(opened_source).model.generation_config
    assert own.eos_token_id == [2, 5]
    assert own.temperature is None


def test_experts_are_stacked_by_known_patterns(source: Callable[..., Source]) -> None:
    meta = build_meta_model(source(model="mixtral"))
    joined = set(meta.stacking.values())
    assert sorted(len(patterns) for patterns in joined) == [1, 2]
    used = {p.pattern for p in meta.placements.values() if p.pattern is not None}
    assert used == set(meta.stacking)

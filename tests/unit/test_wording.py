"""Errors of the library speak of its arguments, where the command's speak of options."""

from __future__ import annotations

import inspect

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_ptq
from hf_ptq import cli, wording
from hf_ptq.distributed.process_group import DistributedState
from hf_ptq.errors import Problem, RunError, UserError
from hf_ptq.wording import in_own_words, reworded

ONE = DistributedState(0, 1, torch.device("cpu"))


def parameters(source, directory, *, recipe=None, ep_degree=None, overwrite=False, max_shard_bytes=5):
    """A function of the library, as far as it matters here."""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("--export_path /a is a file", "directory /a is a file"),
        ("add --overwrite to replace it", "add overwrite=True to replace it"),
        ("use --qformat fp8, or --recipe FILE", "use recipe fp8, or recipe FILE"),
        ("or --max_shard_size", "or max_shard_bytes"),
        ("--ep_degree 1 or 2", "ep_degree 1 or 2"),
        ("is no preset (--qformat); --list shows all", "is no preset (recipe); the command's --list shows all"),
        ("--export_fmt can be fp8", "the command's --export_fmt can be fp8"),
        ("the command's --dense", "the command's --dense"),
        ("torchrun --nproc_per_node 2, `llama-gguf-split --merge A`", None),
        ("a -- b", None),
    ],
)
def test_options_become_arguments(text, said):
    assert reworded(text, inspect.signature(parameters).parameters) == (said or text)


def test_every_option_of_the_command_is_known():
    options = {name for p in cli._command().params for name in (*p.opts, *p.secondary_opts) if "-" not in name[2:]}
    assert {option.removeprefix("--") for option in options} - {"version", "verbose"} <= wording.OPTIONS


def test_the_error_stays_the_one_that_it_is():
    """Whether all ranks have it decides which of them tells it."""
    error = RunError(Problem("--overwrite is set", "leave --dense out"), "no cure")
    error.is_agreed = True

    @in_own_words
    def fails(overwrite=False):
        raise error

    with pytest.raises(RunError) as caught:
        fails()
    assert caught.value is error
    assert error.is_agreed
    assert error.problems == (Problem("overwrite=True is set", "leave the command's --dense out"), Problem("no cure"))
    assert str(error) == "overwrite=True is set\n    -> leave the command's --dense out\nno cure"


def test_the_outermost_function_has_the_last_word():
    @in_own_words
    def inner():
        raise UserError("--dense is no number")

    @in_own_words
    def outer(dense=None):
        inner()

    with pytest.raises(UserError, match=r"^the command's --dense is no number"):
        inner()
    with pytest.raises(UserError, match=r"^dense is no number"):
        outer()


# --- the library -----------------------------------------------------------------------------------


def refused(function, *arguments, **options) -> str:
    with pytest.raises(UserError) as caught:
        function(*arguments, **options)
    return str(caught.value)


def test_what_is_refused_of_a_recipe(tiny):
    model = AutoModelForCausalLM.from_pretrained(tiny("llama"))
    assert "'nvfp5' is no preset (recipe)" in refused(hf_ptq.quantize, model, "nvfp5")
    assert "recipe mine.yaml: there is no such file" in refused(hf_ptq.quantize, model, "mine.yaml")
    said = refused(hf_ptq.quantize, model, "fp8", kv_cache_qformat="fp8_csat")
    assert said.startswith("kv_cache_qformat 'fp8_csat' is not known")


def test_warnings_are_of_the_line_that_calls(tiny):
    """Of quantize, that a pattern matches nothing; of calibrate, that an input was always zero."""
    rule = {"weight": "fp8", "input": "fp8"}
    recipe = {"rules": [{"pattern": "*.self_attn.*", **rule}, {"pattern": "nosuch", **rule}]}
    model = AutoModelForCausalLM.from_pretrained(tiny("llama"))
    ids = torch.tensor([[5, 6, 7]])
    with pytest.warns(UserWarning, match="nosuch") as caught:
        hf_ptq.quantize(model, recipe, lambda m: m(ids))
    assert {warning.filename for warning in caught} == {__file__}
    torch.nn.init.zeros_(model.get_submodule("model.layers.0.input_layernorm").weight)
    with pytest.warns(UserWarning, match="zero") as caught:
        hf_ptq.calibrate(model, lambda m: m(ids))
    assert {warning.filename for warning in caught} == {__file__}


def test_what_is_refused_of_an_export(tiny, tmp_path):
    model = hf_ptq.quantize(AutoModelForCausalLM.from_pretrained(tiny("llama")), "w4a16_nvfp4")
    hf_ptq.export(model, tiny("llama"), tmp_path / "out")
    said = refused(hf_ptq.export, model, tiny("llama"), tmp_path / "out")
    assert said == f"directory {tmp_path / 'out'} holds an earlier export\n    -> add overwrite=True to replace it"
    (tmp_path / "out" / "mine").touch()
    said = refused(hf_ptq.export, model, tiny("llama"), tmp_path / "out", overwrite=True)
    assert said.startswith("overwrite=True would delete files")


def test_what_is_refused_of_a_plan(tiny):
    said = refused(hf_ptq.decide_plan, tiny("qwen3_moe"), ONE, ep_degree=0, dense="shared")
    assert "ep_degree 0 is less than 1" in said
    assert "dense 'shared' is not known" in said
    assert "--" not in said

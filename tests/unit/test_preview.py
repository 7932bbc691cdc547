"""Previews: what is flagged, who fails, and that the model is left as it was found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tiny import byte_tokenizer
from transformers import AutoModelForCausalLM

from hf_ptq.errors import RunError
from hf_ptq.preview import Preview, preview
from hf_ptq.report import Report

CPU = torch.device("cpu")
ROW = torch.arange(3, 103)


def same(count: int) -> int:
    """What ranks that can all do the same agree on."""
    return count


@pytest.mark.parametrize(("agreed", "asked"), [(3, 6), (0, 6)])
def test_in_lockstep_all_generate_as_much_as_the_poorest_can(tiny, agreed, asked, monkeypatch):
    model, report = AutoModelForCausalLM.from_pretrained(tiny("llama")), Report(Console(quiet=True), verbose=False)
    generate = model.generate  # which needs a process group to be in step
    monkeypatch.setattr(model, "generate", lambda ids, synced_gpus, **options: generate(ids, **options))
    told = []
    done = preview(model, None, ROW, asked, report, device=CPU, agree=lambda count: told.append(count) or agreed)
    assert told == [asked]
    if agreed:
        assert done is not None
        assert len(done.tokens) == agreed
    else:
        assert done is None
        assert report.warnings == ["no preview: another rank can make none"]


def test_a_rank_that_can_make_none_says_so_to_the_others(tiny):
    model, report = AutoModelForCausalLM.from_pretrained(tiny("llama")), Report(Console(quiet=True), verbose=False)
    told = []
    assert preview(model, None, None, 6, report, device=CPU, agree=lambda count: told.append(count) or 0) is None
    assert told == [0]
    assert report.warnings == ["no preview: no tokenizer and no data"]


@pytest.mark.parametrize(
    ("tokens", "flaw"),
    [
        ((), "is empty"),
        ((5,), ""),
        ((5,) * 7, ""),
        ((5,) * 8, "is one token over and over"),
        ((9, *(5,) * 7), "is one token over and over"),
        ((5, 5, 5, 5, 5, 5, 5, 9), ""),
        ((5, 9, 5, 9, 5, 9, 5, 9), ""),
        (tuple(range(30)), ""),
    ],
)
def test_what_no_sound_model_says(tokens: tuple[int, ...], flaw: str) -> None:
    assert Preview("a prompt", "", tokens).flaw == flaw


@pytest.mark.parametrize("lockstep", [False, True])
def test_the_start_of_the_row_is_continued(
    tiny: Callable[[str], Path], lockstep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, report = AutoModelForCausalLM.from_pretrained(tiny("llama")), Report(Console(quiet=True), verbose=False)
    generate, asked = model.generate, []

    def spy(ids: torch.Tensor, synced_gpus: bool, **options: object) -> object:
        asked.append(synced_gpus)  # one process has nobody to be in step with
        return generate(ids, **options)

    monkeypatch.setattr(model, "generate", spy)
    expected = generate(ROW[None, :64], do_sample=False, max_new_tokens=6, attention_mask=torch.ones(1, 64))[0, 64:]
    done = preview(model, None, ROW, 6, report, device=CPU, agree=same if lockstep else None)
    assert done is not None
    assert done.tokens == tuple(expected.tolist())
    assert done.prompt == " ".join(map(str, range(3, 67)))
    assert done.continuation == " ".join(map(str, done.tokens))
    assert asked == [lockstep]
    assert report.warnings == []
    spelled = preview(model, byte_tokenizer(), ROW, 6, report, device=CPU)
    assert spelled is not None
    assert spelled.tokens == done.tokens
    assert spelled.continuation == byte_tokenizer().decode(list(done.tokens))


def test_a_failure_ends_a_run_in_lockstep_and_no_other(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that went on by itself would leave the others in a collective."""
    model, report = AutoModelForCausalLM.from_pretrained(tiny("llama")), Report(Console(quiet=True), verbose=False)

    def fail(*_: object, **__: object) -> None:
        raise ValueError("in the kernel")

    monkeypatch.setattr(model, "generate", fail)
    assert preview(model, None, ROW, 6, report, device=CPU) is None
    assert report.warnings == ["the preview failed (ValueError: in the kernel); the run goes on"]
    with pytest.raises(RunError) as caught:
        preview(model, None, ROW, 6, report, device=CPU, agree=same)
    (problem,) = caught.value.problems
    assert problem.what == "the preview failed (ValueError: in the kernel)"
    assert problem.cure == "--skip_generate leaves the previews out"
    assert len(report.warnings) == 1


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_model_computes_for_itself_is_put_back(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Rotary tables that follow the longest text seen: calibration must not depend on a preview."""
    model, report = AutoModelForCausalLM.from_pretrained(tiny("llama")), Report(Console(quiet=True), verbose=False)
    rotary = model.model.rotary_emb
    before, longest, generate = rotary.inv_freq.clone(), rotary.max_seq_len_cached, model.generate

    def grow(*arguments: object, **options: object) -> object:
        rotary.inv_freq *= 2
        rotary.max_seq_len_cached = 10**6
        if fails:
            raise ValueError
        return generate(*arguments, **options)

    monkeypatch.setattr(model, "generate", grow)
    assert (preview(model, None, ROW, 2, report, device=CPU) is None) == fails
    assert torch.equal(rotary.inv_freq, before)
    assert rotary.max_seq_len_cached == longest

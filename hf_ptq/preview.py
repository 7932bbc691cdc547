"""Previews: what the model says before and after quantization, as a first check by eye.

Greedy decoding of the beginning of the first calibration row, or of a built-in sentence where there is no data. The
quantized model computes as a server would: its weights are the decoded ones, its activations are rounded.

A preview is best effort: if it fails, the run goes on and says so. Not so in lockstep, where the ranks share the model
and each runs forwards until all have finished: a rank that went on by itself would leave the others in a collective.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_ptq.errors import Problem, RunError
from hf_ptq.report import Report

PROMPT_TOKENS = 64
REPEATS = 8  # so many tokens of one kind are a flaw
SENTENCE = "The quickest way to understand how a bicycle stays upright is to"


@dataclass(frozen=True)
class Preview:
    """A prompt and its greedy continuation, as text (token ids where there is no tokenizer)."""

    prompt: str
    continuation: str
    tokens: tuple[int, ...]  # of the continuation

    @property
    def flaw(self) -> str:
        """What no sound model says: nothing, or one token over and over; empty if it is neither."""
        if not self.tokens:
            return "is empty"
        is_long = len(self.tokens) >= REPEATS
        return "is one token over and over" if is_long and len(set(self.tokens[1:])) == 1 else ""


def preview(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    row: torch.Tensor | None,
    new_tokens: int,
    report: Report,
    *,
    device: torch.device,
    agree: Callable[[int], int] | None = None,
) -> Preview | None:
    """Generate `new_tokens` tokens after `row` (1-D int64 ids) or the built-in sentence; None if that failed.

    `agree`: in lockstep with all ranks; it makes the least of the numbers of tokens that the ranks can do, 0 for none.
    Then all generate so many or none of them, and RunError is raised if that fails.
    """
    prompt = _prompt(tokenizer, row)
    lockstep, can = agree is not None, prompt is not None and model.can_generate()
    prompt, new_tokens = _within_positions(model, prompt, new_tokens)
    if agree is not None:
        new_tokens = agree(new_tokens if can else 0)
    if prompt is None or not can or new_tokens == 0:
        reason = "the model does not generate" if prompt is not None and not can else "no tokenizer and no data"
        report.warn(f"no preview: {reason if not can else 'another rank can make none'}")
        return None
    ids = prompt[None].to(device)
    own = model.generation_config
    padding = own.pad_token_id if own is not None and own.pad_token_id is not None else 0
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=new_tokens,
        eos_token_id=own.eos_token_id if own is not None else None,
        pad_token_id=padding,
    )
    computed = _computed_state(model)
    try:
        with torch.no_grad():
            output = model.generate(  # type: ignore[operator]
                ids, attention_mask=torch.ones_like(ids), generation_config=config, synced_gpus=lockstep
            )
    except Exception as error:
        if lockstep:
            what = f"the preview failed ({type(error).__name__}: {error})"
            raise RunError(Problem(what, "--skip_generate leaves the previews out")) from error
        report.warn(f"the preview failed ({type(error).__name__}: {error}); the run goes on")
        return None
    finally:
        _restore(computed)
    tokens = output[0] if isinstance(output, torch.Tensor) else output.sequences[0]
    new = tokens[len(prompt) :]
    return Preview(_text(tokenizer, prompt), _text(tokenizer, new), tuple(new.tolist()))


def _computed_state(model: PreTrainedModel) -> list[tuple[torch.nn.Module, dict[str, Any]]]:
    """Modules that keep what they compute (rotary tables that grow with the longest text seen), and what they keep."""
    kept = []
    for module in model.modules():
        if module._non_persistent_buffers_set:
            numbers = {key: value for key, value in vars(module).items() if isinstance(value, (int, float))}
            buffers = {key: value.clone() for key, value in module._buffers.items() if value is not None}
            kept.append((module, {"numbers": numbers, "buffers": buffers}))
    return kept


def _restore(computed: list[tuple[torch.nn.Module, dict[str, Any]]]) -> None:
    """A preview leaves the model as it found it, so that calibration does not depend on it."""
    for module, state in computed:
        vars(module).update(state["numbers"])
        module._buffers.update(state["buffers"])


def _within_positions(
    model: PreTrainedModel, prompt: torch.Tensor | None, new_tokens: int
) -> tuple[torch.Tensor | None, int]:
    """Prompt and new tokens, cut to what the model has positions for."""
    limit = model.config.get_text_config().to_dict().get("max_position_embeddings")
    if prompt is not None and limit and len(prompt) + new_tokens > limit:
        prompt = prompt[: limit // 2]
        new_tokens = min(new_tokens, limit - len(prompt))
    return prompt, new_tokens


def _prompt(tokenizer: PreTrainedTokenizerBase | None, row: torch.Tensor | None) -> torch.Tensor | None:
    if row is not None:
        return row[:PROMPT_TOKENS]
    if tokenizer is None:
        return None
    ids = torch.tensor(tokenizer(SENTENCE)["input_ids"], dtype=torch.int64)
    return ids if len(ids) else None  # transformers makes an empty tokenizer where the files are missing


def _text(tokenizer: PreTrainedTokenizerBase | None, ids: torch.Tensor) -> str:
    return " ".join(map(str, ids.tolist())) if tokenizer is None else str(tokenizer.decode(ids.tolist()))

"""vLLM serves the demo model from what its CPU kernels can run, with the tokens of our fake-quantized model.

vLLM needs an environment of its own, whose Python HF_PTQ_VLLM_PYTHON names; see the README.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fake_quantized import Captured, greedy
from transformers import AutoTokenizer

PYTHON = os.environ.get("HF_PTQ_VLLM_PYTHON", "")
NEW_TOKENS = 8
# What follows is clear: the best token is ahead by half a logit and more, so that another kernel's rounding in bf16
# does not decide. With INT4 the alphabet goes wrong after m, in our model and in vLLM.
PROMPTS = ("1 2 3 4 5 6 7 8", "a b c d e f g h i")
SCRIPT = Path(__file__).resolve().parent.parent / "serving_vllm.py"
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}  # fmt: skip
RECIPE = 'rules:\n  - {{pattern: "*", {formats}}}\n  - {{import: default_disabled}}\nalgorithm: max\n'
# The layout, and the formats of weights and inputs. The demo's 576 inputs are no multiple of 128.
SERVED = {
    "modelopt FP8_PER_CHANNEL_PER_TOKEN": ("modelopt", "weight: fp8_per_channel, input: fp8_per_token"),
    "FP8_DYNAMIC": ("compressed-tensors", "weight: fp8_per_channel, input: fp8_per_token"),
    "W8A8": ("compressed-tensors", "weight: int8_per_channel, input: int8_per_token"),
    "W4A16": ("compressed-tensors", "weight: int4_block64"),
}

pytestmark = [pytest.mark.serving, pytest.mark.demo, pytest.mark.skipif(not PYTHON, reason="no HF_PTQ_VLLM_PYTHON")]


def served_tokens(export: Path, prompts: list[list[int]]) -> list[list[int]]:
    command = [PYTHON, str(SCRIPT), str(export), json.dumps(prompts), str(NEW_TOKENS)]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | ENVIRONMENT
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("served", list(SERVED))
def test_vllm_answers_as_our_model_does(
    served: str,
    demo_source: Path,
    quantize: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout, formats = SERVED[served]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(formats=formats))
    prompts = AutoTokenizer.from_pretrained(demo_source)(list(PROMPTS))["input_ids"]
    rows = [greedy(torch.tensor([prompt]), NEW_TOKENS) for prompt in prompts]
    ours = Captured(monkeypatch, lambda job: torch.cat([row(job) for row in rows]), lambda _: True)
    options = {"export_fmt": layout, "recipe": str(recipe), "kv_cache_qformat": "none", "skip_generate": False}
    export = quantize("demo", **options)
    assert served_tokens(export, prompts) == ours.value.tolist()

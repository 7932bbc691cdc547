"""Two GPUs over NCCL: every plan gives what one GPU gives."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("dist", "benchmark")]
from compare_exports import LARGEST, compare, read  # noqa: E402
from ranks import run_requests, torchrun  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
MOE_PLANS = {
    "ep": {},
    "ep_dense_sharded": {"dense": "fsdp"},
    "fsdp2": {"use_fsdp2": True},
    "replicated": {"ep_degree": 1},
}
DENSE_PLANS = {"replicated": {}, "fsdp2": {"use_fsdp2": True}}


@pytest.mark.parametrize("name", ["llama_tied", "qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe", "minimax_m2"])
def test_plans_on_two_gpus(name, tiny, token_rows, tmp_path, check_export):
    plans = DENSE_PLANS if name.startswith("llama") else MOE_PLANS
    base = {"model": str(tiny(name)), "datasets": [str(token_rows)], "device": "cuda", "durable": False}
    formats = ("nvfp4", "fp8")
    one = [{**base, "qformat": f, "kv_cache_qformat": "fp8", "export_path": tmp_path / f"one-{f}"} for f in formats]
    several = [
        {**base, **options, "qformat": f, "kv_cache_qformat": "fp8", "export_path": tmp_path / f"{plan}-{f}"}
        for plan, options in plans.items()
        for f in formats
    ]
    run_requests(0, one, tmp_path, CUDA_VISIBLE_DEVICES="0")
    run_requests(2, several, tmp_path)
    for plan in plans:
        for f in formats:
            check_export(tiny(name), tmp_path / f"{plan}-{f}")
            differing, largest = compare(read(tmp_path / f"one-{f}"), read(tmp_path / f"{plan}-{f}"))
            assert not differing, (plan, f)
            assert largest <= LARGEST, (plan, f)


def test_ten_runs_end_well(tiny, token_rows, tmp_path):
    command = ["-m", "hf_ptq", "--model", tiny("qwen3_moe"), "--dataset", token_rows, "--device", "cuda", "--overwrite"]
    for _ in range(10):
        done = torchrun(2, *command, "--skip_generate", "--no-durable", "--export_path", tmp_path / "out")
        assert done.returncode == 0, done.stderr

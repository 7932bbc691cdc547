"""Training through quantizers on two GPUs over NCCL, with SyncBatchNorm in train mode.

python -m pytest -s tests/gpu/test_qat_gpu.py prints a table for RESULTS.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

DIST = Path(__file__).parents[1] / "dist"
sys.path.insert(0, str(DIST))
from convert_bn_checks import check  # noqa: E402
from ranks import torchrun  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def test_synchronised_norms_train_and_come_back(tmp_path):
    done = torchrun(2, DIST / "convert_bn.py", tmp_path, "--train", "--device", "cuda", seconds=500)
    assert done.returncode == 0, done.stdout + done.stderr
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    table = check(tmp_path, 1e-5, "cuda")
    print(done.stdout)
    print("| order | norms' quantizers | restored on BatchNorm, one process: largest difference |\n| --- | --- | --- |")
    for order, norms, off in table:
        print(f"| {order} | {norms} | {off:.1e} |")

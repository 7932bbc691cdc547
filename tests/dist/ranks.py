"""Starting several ranks from a test, and comparing what they made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

WORKER = Path(__file__).with_name("worker.py")
SECONDS = 900


def environment() -> dict[str, str]:
    """Of a rank on the CPU: one thread, so that sums are made in one order, and no network.

    And no AMX: from 512 inputs on, the order in which oneDNN's bf16 products with it add depends on the number of rows.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("HF_PTQ_", "MODELOPT_", "TORCHELASTIC_"))}
    fixed = {"OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    return {**inherited, **fixed, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def torchrun(
    ranks: int, *words: str | Path, seconds: float = SECONDS, **variables: str
) -> subprocess.CompletedProcess[str]:
    """`torchrun` on one node, on a port of its own."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [*launcher, *map(str, words)]
    return subprocess.run(
        command, env={**environment(), **variables}, capture_output=True, text=True, timeout=seconds, check=False
    )


def run_requests(ranks: int, requests: Sequence[dict], directory: Path, **variables: str) -> None:
    """Carry out requests (keyword arguments of RunConfig) over `ranks` ranks; 0 means one process, no launcher."""
    file = directory / f"requests-{ranks}.json"
    file.write_text(json.dumps(requests, default=str), encoding="utf-8")
    if ranks:
        done = torchrun(ranks, WORKER, file, **variables)
    else:
        done = subprocess.run(
            [sys.executable, WORKER, file],
            env={**environment(), **variables},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr


def exported(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of an export, those of the quantizers' state too."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(directory.rglob("*.safetensors")):
        for name, tensor in load_file(file).items():
            assert name not in tensors, f"{name} is in two files"
            tensors[name] = tensor
    assert tensors, f"nothing in {directory}"
    return tensors


def differences(first: Path, second: Path) -> list[str]:
    """Names of the tensors that two exports do not have in common bit for bit."""
    one, other = exported(first), exported(second)
    common = one.keys() & other.keys()
    return sorted((one.keys() ^ other.keys()) | {name for name in common if not same_bits(one[name], other[name])})


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))

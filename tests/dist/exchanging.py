"""Two ranks run one layer's experts from their own tokens; each leaves what it got and what it sent as JSON.

    torchrun --nproc_per_node 2 exchanging.py DIRECTORY
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from transformers.distributed.expert_parallel import apply_expert_parallelism

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

from tiny import CONFIGS, FUSED_ON_THE_HUB, build

from hf_ptq.distributed.process_group import distributed_run
from hf_ptq.model import exchange
from hf_ptq.model.experts import takes_registry, use_our_experts

EXPERTS, K, HIDDEN = 8, 2, 64
# Case -> for each rank its number of tokens and the experts that it may choose.
CASES = {
    "all to all": ((7, range(8)), (12, range(8))),
    "rank 0 computes nothing": ((7, range(4, 8)), (12, range(4, 8))),
    "rank 1 has no token": ((7, range(8)), (0, range(8))),
    "nobody has a token": ((0, range(8)), (0, range(8))),
    "nothing leaves its rank": ((5, range(4)), (3, range(4, 8))),
}
# What becomes of a rank's choices of its own experts: they travel as all others, or are computed while those do.
WAYS = {"travels": 10**9, "stays": 0}


def experts_of(name: str, dtype: torch.dtype) -> Any:
    class_name, options = (CONFIGS | FUSED_ON_THE_HUB)[name]
    model = build(name, getattr(transformers, class_name)(**options), dtype)
    use_our_experts(model, "grouped_mm")
    return next(module for module in model.modules() if takes_registry(module))


def shared_out(experts: Any) -> Any:
    mine = torch.nn.ModuleDict({"experts": copy.deepcopy(experts)})
    plan = {name: "grouped_gemm" for name, _ in mine.named_parameters()} | {"experts": "ep_dispatch_experts"}
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("tp", "ep"))
    apply_expert_parallelism(mine, mesh["ep"], mesh["tp"], plan, ep_implementation=exchange.EXCHANGE)  # type: ignore[arg-type]
    return mine["experts"]


def inputs(rank: int, case: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    tokens, allowed = CASES[case][rank]
    hidden = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
    order = torch.rand(tokens, len(allowed), generator=generator).argsort(-1)[:, :K]
    return hidden, order + allowed.start, torch.rand(tokens, K, generator=generator)


@torch.no_grad()
def run(rank: int, whole: Any, mine: Any, case: str, weight_dtype: torch.dtype) -> dict[str, Any]:
    hidden, index, weights = inputs(rank, case, torch.bfloat16)
    real, calls = dist.all_to_all_single, []

    def recorded(output, rows, sizes_in=None, sizes_out=None, group=None, async_op=False):
        calls.append([[*rows.shape], rows.element_size(), sizes_in, sizes_out, async_op])
        return real(output, rows, sizes_in, sizes_out, group=group, async_op=async_op)

    dist.all_to_all_single = recorded
    got = mine(hidden, index, weights.to(weight_dtype))
    dist.all_to_all_single = real
    expected = whole(hidden, index, weights.to(weight_dtype)) if len(hidden) else torch.zeros_like(hidden)
    return {
        "equal": torch.equal(got, expected) and got.dtype == expected.dtype,
        "any": bool(got.any()),
        "index": index.tolist(),
        "calls": calls,
    }


def gradient(mine: Any) -> str:
    hidden, index, weights = inputs(0, "all to all", torch.bfloat16)
    try:
        mine(hidden.requires_grad_(), index, weights)
    except NotImplementedError as error:
        return str(error)
    return ""


def main() -> None:
    torch.set_num_threads(1)
    told: dict[str, Any] = {}
    with distributed_run("cpu") as state:
        for name in ("qwen3_moe", "gpt_oss"):
            whole = experts_of(name, torch.bfloat16)
            mine = shared_out(whole)
            for dtype, way, case in itertools.product((torch.bfloat16, torch.float32), WAYS, CASES):
                exchange.MANY_CHOICES = WAYS[way]
                told[f"{name}, {dtype}, {way}, {case}"] = run(state.rank, whole, mine, case, dtype)
        told["gradient"] = gradient(mine)
    (Path(sys.argv[1]) / f"rank-{state.rank}.json").write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    main()
    os._exit(0)

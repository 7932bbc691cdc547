"""A model laid over the ranks: placeholders on the meta device, before anything is read.

Expert parallelism and FSDP2 are transformers' own pieces (`apply_expert_parallelism`, which also installs our exchange
of tokens, and `apply_fully_sharded_data_parallelism`), applied to the meta model on meshes that are made here:
transformers makes none for one rank, and takes the accelerator's even where the run is on CPUs. Afterwards a parameter
that is shared out is a DTensor, cut along its first dimension: experts of a stack, or rows.

What of it this rank holds follows from the plan by arithmetic (`Plan.held_experts`, `Plan.held_rows`), and is held
against the DTensor. This file knows neither files nor formats.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.distributed.expert_parallel import apply_expert_parallelism
from transformers.distributed.fsdp import apply_fully_sharded_data_parallelism
from transformers.distributed.utils import TransformersDeviceMesh

from hf_ptq.distributed.plan import Facts, Plan, free_bytes
from hf_ptq.distributed.process_group import DistributedState
from hf_ptq.errors import Problem
from hf_ptq.model.build import MetaModel
from hf_ptq.model.exchange import EXCHANGE
from hf_ptq.model.experts import takes_registry
from hf_ptq.model.units import Unit

DISPATCH = "ep_dispatch_experts"
EXPERT_NUMBERS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


# --- facts for the plan --------------------------------------------------------------------------


def gather_facts(meta: MetaModel, units: Iterable[Unit], state: DistributedState) -> Facts:
    """What of the model the plan depends on; `free_bytes` is this rank's share of what is free where it runs."""
    model = meta.model
    tied = set(model.all_tied_weights_keys)
    sizes = {n: t.numel() * t.element_size() for n, t in model.state_dict().items() if n not in tied}
    experts = expert_parameters(model)
    numbers = [module.num_experts for module in _experts_modules(model).values()]
    dense_unit = expert_unit = 0
    for unit in units:
        inside = {p for name in unit.tensors if (p := meta.placements[name].parameter) in sizes}
        dense_unit = max(dense_unit, sum(sizes[p] for p in inside if p not in experts))
        expert_unit = max(expert_unit, sum(sizes[p] for p in inside if p in experts))
    expert_bytes = sum(sizes[p] for p in experts)
    sharers = state.launch.local_world_size if state.device.type == "cpu" else 1
    return Facts(
        dense_bytes=sum(sizes.values()) - expert_bytes,
        expert_bytes=expert_bytes,
        dense_unit_bytes=dense_unit,
        expert_unit_bytes=expert_unit,
        device=state.device.type if state.world_size > 1 else str(state.device),
        free_bytes=free_bytes(state.device) // sharers,
        world_size=state.world_size,
        num_experts=math.gcd(*numbers) if numbers else _number_in_config(model),
        expert_parallel_problem=_expert_parallel_problem(model),
        fsdp_problem=_fsdp_problem(model),
    )


def expert_parameters(model: nn.Module) -> set[str]:
    """Names of the stacked parameters of routed experts: [experts, ...]."""
    modules = _experts_modules(model)
    leaves = ("_proj", "_proj_bias")
    return {
        f"{name}.{leaf}" for name, module in modules.items() for leaf in module._parameters if leaf.endswith(leaves)
    }


def _experts_modules(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if takes_registry(module)}


def _number_in_config(model: PreTrainedModel) -> int:
    """Experts that are no module of the registry: what the configuration says."""
    settings = model.config.get_text_config().to_dict()
    return next((int(settings[key]) for key in EXPERT_NUMBERS if isinstance(settings.get(key), int)), 0)


def _expert_parallel_problem(model: PreTrainedModel) -> str:
    name = type(model).__name__
    if not _experts_modules(model):
        return f"the experts of {name} do not take transformers' experts registry, and cannot be sharded"
    if DISPATCH not in (model.ep_plan or {}).values():
        return f"transformers has no expert-parallel plan for {name}"
    return ""


def expert_parallel_problem(model: nn.Module) -> list[Problem]:
    """A problem where the experts of a model in memory are shared out by expert parallelism."""
    if not any(module._is_expert_parallel for module in _experts_modules(model).values()):
        return []
    what = "this model is expert-parallel; its weights are quantized by the command only"
    return [Problem(what, "lay it out with FSDP2 (decide_plan(..., use_fsdp2=True)), or run hf-ptq under torchrun")]


def _fsdp_problem(model: PreTrainedModel) -> str:
    name = type(model).__name__
    if not model.fsdp_plan:
        return f"transformers has no FSDP2 plan for {name}"
    mixed = [
        module_name
        for module_name, module in model.named_modules()
        if len({p.dtype for p in module.parameters(recurse=False)}) > 1
    ]
    if mixed:
        return f"{mixed[0]} of {name} holds parameters of several dtypes, which FSDP2 cannot shard together"
    return ""


# --- laying out ----------------------------------------------------------------------------------


def shard_model(meta: MetaModel, plan: Plan, state: DistributedState) -> dict[str, range]:
    """Put the plan's placeholders into the meta model; returns parameter -> what this rank holds of it, if not all."""
    model = meta.model
    if plan.shards_model:
        _place(model, plan, state.device.type)
    experts = expert_parameters(model)
    held: dict[str, range] = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            share = plan.held_experts if name in experts else plan.held_rows
            held[name] = share(parameter.shape[0], state.rank)
            rows = local_of(parameter).shape[0]
            assert rows == len(held[name]), f"{name}: {rows} of {parameter.shape[0]}, the plan says {held[name]}"
    return held


def _place(model: PreTrainedModel, plan: Plan, device_type: str) -> None:
    world, degree = plan.world_size, plan.ep_degree
    # The plans are resolved for at least two ranks: for one, transformers would leave FSDP2's empty.
    wanted = DistributedConfig(ep_size=degree, fsdp_size=max(world, 2))
    _, ep_plan, fsdp_plan = model._resolve_parallel_plans(wanted)
    meshes = TransformersDeviceMesh(
        init_device_mesh(device_type, (1, 1, world, 1), mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp")),
        init_device_mesh(
            device_type, (1, 1, world // degree, degree), mesh_dim_names=("pp", "dp_replicate", "efsdp", "ep")
        ),
    )
    if degree > 1:
        apply_expert_parallelism(
            model, meshes.get_mesh("ep"), meshes.get_mesh("tp"), ep_plan, ep_implementation=EXCHANGE
        )
    if plan.dense == "fsdp":
        model.config.distributed_config = wanted  # where transformers looks for it
        apply_fully_sharded_data_parallelism(model, meshes, fsdp_plan, ep_plan)
        vars(model.config).pop("distributed_config")


# --- shares --------------------------------------------------------------------------------------


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, in the model's own memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor; a collective where it is shared out."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def as_share_of(placeholder: torch.Tensor | None, local: torch.Tensor) -> torch.Tensor:
    """`local` as this rank's share of a parameter that is laid out like `placeholder`."""
    if not isinstance(placeholder, DTensor):
        return local
    mesh, placements = placeholder.device_mesh, placeholder.placements
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=placeholder.shape, stride=placeholder.stride()
    )


def reshard(model: nn.Module) -> None:
    """Give back what FSDP2 has gathered and kept: parameters are shares again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()

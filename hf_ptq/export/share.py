"""Who writes what: every tensor of the export belongs to one rank, settled from the plan before any weight is read.

Experts are written by a rank that holds them; where several groups hold the same, each writes its part. Everything else
every rank could write, since it is held by all, gathered, or copied from the source: it goes to the rank that has the
fewest bytes so far, in the order of the units, so that the ranks work side by side within each unit. All tensors of a
module (codes, scales) go the same way, and each rank has files of its own: on a network file system two nodes must not
write into one page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hf_ptq.checkpoint.shards import TensorPlan
from hf_ptq.distributed.plan import Plan
from hf_ptq.model.views import WeightView
from hf_ptq.quantization.assignment import Assignment


@dataclass(frozen=True)
class Share:
    """What one rank holds of the model and writes of the export.

    `owners`: name of each planned tensor -> the rank that writes it. `held`: parameter -> the part of its first
    dimension that is here, where that is not all.
    """

    rank: int
    plan: Plan
    owners: Mapping[str, int]
    held: Mapping[str, range] = field(default_factory=dict)

    def writes(self, name: str) -> bool:
        """Whether this rank writes the planned tensor `name`."""
        return self.owners[name] == self.rank

    def is_cut(self, view: WeightView) -> bool:
        """Whether a weight that is written as one is spread over the ranks, by rows or by experts."""
        return not view.is_apart and view.parameter in self.held

    def held_modules(self, view: WeightView) -> range:
        """The experts of a stack whose weights are here."""
        return self.held.get(view.parameter, range(len(view.modules)))

    def written_modules(self, view: WeightView) -> range:
        """The experts of a stack that this rank writes."""
        return self.plan.written_experts(len(view.modules), self.rank)


def share_out(
    planned: Sequence[TensorPlan], module_of: Mapping[str, str], assignment: Assignment, plan: Plan
) -> dict[str, int]:
    """Name of each planned tensor -> the rank that writes it. `module_of`: tensor -> the quantized module it is of."""
    by_expert = _owners_of_experts(assignment, plan)
    sizes: dict[str, int] = {}
    keys: dict[str, str] = {}
    for tensor in planned:
        keys[tensor.name] = key = module_of.get(tensor.name, tensor.name)
        sizes[key] = sizes.get(key, 0) + tensor.num_bytes
    loads = [0] * plan.world_size
    owners: dict[str, int] = {}
    for key, rank in by_expert.items():
        owners[key] = rank
        loads[rank] += sizes.get(key, 0)
    for key, size in sizes.items():
        if key not in owners:
            owners[key] = rank = loads.index(min(loads))
            loads[rank] += size
    return {name: owners[key] for name, key in keys.items()}


def _owners_of_experts(assignment: Assignment, plan: Plan) -> dict[str, int]:
    """Module of each quantized expert -> the rank that writes it."""
    owners: dict[str, int] = {}
    for weight in assignment.quantized:
        if weight.view.is_apart:
            for rank in range(plan.world_size):
                for expert in plan.written_experts(len(weight.view.modules), rank):
                    owners[weight.view.modules[expert]] = rank
    return owners

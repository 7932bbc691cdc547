"""Fused groups: linears that servers merge into one module, so that they must share scales.

A server multiplies one activation with one stacked weight: q/k/v, gate/up, the two low-rank projections of
multi-head latent attention, the input projections of linear attention. One global weight scale and one input scale
then serve all members. Groups are found by the leaf names that servers merge by (their loaders know nothing else);
this file knows no model and no tensor.
"""

from __future__ import annotations

from collections.abc import Iterable

# The server's name of the fused module -> the leaves of the checkpoint that it is made of, in order.
FUSED_GROUPS: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "w13": ("w1", "w3"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}


def fused_groups(modules: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Fused module name -> its members, for each group of which all members are among `modules` (hub names)."""
    present = dict.fromkeys(modules)  # in their order: a set's would differ from run to run, and so would messages
    parents = dict.fromkeys(name.rpartition(".")[0] for name in present)
    found = {}
    for parent in parents:
        prefix = f"{parent}." if parent else ""
        for fused, leaves in FUSED_GROUPS.items():
            members = tuple(prefix + leaf for leaf in leaves)
            if all(member in present for member in members):
                found[prefix + fused] = members
    return found

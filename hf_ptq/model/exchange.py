"""The exchange of tokens between the ranks that share the experts: each token travels once to each rank it needs.

A rank holds L experts, expert e is on rank e // L of the W of its group. With T tokens, k choices each, hidden size H:

    out    [S, H]   each token once for every rank that holds one of its choices, by rank, then by token
           [S, k]   its choices as the receiver numbers them, L where the choice is another rank's
    back   [T*k, H] the output of every choice, unweighted, by rank, then by token, then by choice

The sender puts the outputs back in order, weighs and sums them with the arithmetic of one process, so what comes out is
the same bit for bit; no weight travels. S <= T * min(k, W) where the exchange by (token, choice) of transformers sends
T*k rows, and the receiver's quantizers look at as many rows fewer. The one thing the host must know is the numbers of
rows, which the ranks tell each other first; a GPU sorts the choices while the host waits for them.

A rank with no token, or whose experts nobody chose, takes part all the same: four collectives a layer on every rank.
It is a registered implementation of transformers' expert parallelism. It does not know what an expert computes
(model/experts.py does), and is not differentiable: calibration and previews run without gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from hf_ptq.model.experts import choice_outputs, kernel_of, weighted_sum

EXCHANGE = "hf_ptq"  # the name it is registered under


class TokenExchange(EPImplementation):
    """The experts of one layer, reached from the tokens of all ranks of an expert-parallel group."""

    def __init__(self, experts: Any, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        assert tp_mesh.size() == 1, "no two ranks share a batch"
        self.experts, self.group, self.num_ranks = experts, ep_mesh.get_group(), ep_mesh.size()

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """What the experts of all ranks add to this rank's tokens: hidden_states [T, H], choices and weights [T, k]."""
        if torch.is_grad_enabled() and any(
            t.requires_grad for t in (hidden_states, top_k_weights, *self.experts.parameters())
        ):
            raise NotImplementedError("the exchange of tokens has no gradient: run it under torch.no_grad()")
        local = self.experts.num_experts
        needed, counts = count_rows(top_k_index, local, self.num_ranks)
        from_others = torch.empty_like(counts)
        dist.all_to_all_single(from_others, counts, group=self.group)
        told, is_told = _begin_reading(torch.stack([counts.T, from_others.T]))
        places = places_of_returned(top_k_index, local)
        if is_told is not None:
            is_told.synchronize()
        (tokens_out, choices_out), (tokens_in, choices_in) = told.tolist()

        tokens, choices = rows_to_send(top_k_index, needed, local, sum(tokens_out))
        choices = self._exchanged(choices, tokens_in, tokens_out)
        rows = self._exchanged(hidden_states.index_select(0, tokens), tokens_in, tokens_out)
        rows = self._computed(rows, choices, sum(choices_in))
        rows = self._exchanged(rows, choices_out, choices_in)
        return weighted_sum(rows, places, top_k_weights, hidden_states.dtype)

    def _computed(self, rows: torch.Tensor, choices: torch.Tensor, num_choices: int) -> torch.Tensor:
        """Outputs [num_choices, H] of this rank's experts."""
        if num_choices == 0:
            return rows.new_empty(0, rows.shape[1], dtype=self.experts.down_proj.dtype)
        out, places = choice_outputs(self.experts, rows, choices, kernel_of(self.experts), num_choices)
        return out.index_select(0, places)

    def _exchanged(self, rows: torch.Tensor, sizes_in: list[int], sizes_out: list[int]) -> torch.Tensor:
        """The rows for each rank (`sizes_out` of them) go, those from each rank (`sizes_in`) come."""
        came = rows.new_empty(sum(sizes_in), rows.shape[1])
        dist.all_to_all_single(came, rows, sizes_in, sizes_out, group=self.group)
        return came


EPImplementationInterface.register(EXCHANGE, TokenExchange)


def _begin_reading(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """The tensor on the host, and the event after which its numbers are there; None if they are."""
    if not tensor.is_cuda:
        return tensor, None
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return host, copied


# --- which row goes where ------------------------------------------------------------------------


def count_rows(index: torch.Tensor, local: int, num_ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which rank needs which token, bool [ranks, T]; how many tokens and choices each is sent, int64 [ranks, 2].

    `index`: global expert ids, int64 [T, k]; a rank holds `local` experts.
    """
    owner = index // local
    needed = torch.zeros(num_ranks, len(index), dtype=torch.bool, device=index.device)
    needed.scatter_(0, owner.T, True)
    choices = torch.zeros(num_ranks, dtype=torch.int64, device=index.device)
    flat = owner.reshape(-1)
    choices.scatter_add_(0, flat, torch.ones_like(flat))
    return needed, torch.stack([needed.sum(1), choices], 1)


def rows_to_send(
    index: torch.Tensor, needed: torch.Tensor, local: int, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The token of each row to send, int64 [S]; its choices at the receiver, int32 [S, k], `local` if not there.

    `num_rows`: S, how many of `needed` are True. (`nonzero` would have to ask the GPU.)
    """
    rank, token = torch.nonzero_static(needed, size=num_rows).unbind(1)
    choices = index.index_select(0, token) - (rank * local)[:, None]
    choices = torch.where((choices >= 0) & (choices < local), choices, local)
    return token, choices.to(torch.int32)


def places_of_returned(index: torch.Tensor, local: int) -> torch.Tensor:
    """Where among the returned outputs (by rank, token, choice) that of each (token, choice) is: int64 [T*k]."""
    order = torch.argsort((index // local).reshape(-1), stable=True)
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))

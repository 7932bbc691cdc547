"""The exchange of tokens between the ranks that share the experts: each token travels once to each rank it needs.

A rank holds L experts, expert e is on rank e // L of the W of its group. With T tokens, k choices each, hidden size H:

    out    [S, H]   each token once for every other rank that holds one of its choices, by rank, then by token
           [S, k]   its choices as the receiver numbers them, L where the choice is another rank's
    back   [C, H]   the output of every choice elsewhere, unweighted, by rank, then by token, then by choice

The sender puts the outputs in order, weighs and sums them with the arithmetic of one process, so what comes out is the
same bit for bit; no weight travels. S <= T * min(k, W - 1) where the exchange by (token, choice) of transformers sends
T*k rows, and the receiver's quantizers look at as many rows fewer. The one thing the host must know is the numbers of
rows, which the ranks tell each other first; a GPU sorts the choices while the host waits for them.

A rank's choices among its own experts stay where they are. They are computed last, while the outputs for the others,
by far the most that travels, are on the way. Where there are few choices (a step of decoding) a second round of
kernels would cost more than that saves: then a rank's own tokens go the way of all others, from itself to itself.

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
MANY_CHOICES = 8192  # of so many on, a rank's choices of its own experts do not travel
NONE = -1  # no rank


class TokenExchange(EPImplementation):
    """The experts of one layer, reached from the tokens of all ranks of an expert-parallel group."""

    def __init__(self, experts: Any, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        assert tp_mesh.size() == 1, "no two ranks share a batch"
        self.experts, self.group = experts, ep_mesh.get_group()
        self.rank, self.num_ranks = ep_mesh.get_local_rank(), ep_mesh.size()

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """What the experts of all ranks add to this rank's tokens: hidden_states [T, H], choices and weights [T, k]."""
        if torch.is_grad_enabled() and any(
            t.requires_grad for t in (hidden_states, top_k_weights, *self.experts.parameters())
        ):
            raise NotImplementedError("the exchange of tokens has no gradient: run it under torch.no_grad()")
        local = self.experts.num_experts
        owner = top_k_index // local
        kept = self.rank if top_k_index.numel() >= MANY_CHOICES else NONE
        needed, counts = count_rows(owner, self.num_ranks, kept)
        from_others = torch.empty_like(counts)
        dist.all_to_all_single(from_others, counts, group=self.group)
        told, is_told = _begin_reading(torch.stack([counts.T, from_others.T]))
        order = order_of_outputs(owner, kept)
        if is_told is not None:
            is_told.synchronize()
        (tokens_out, choices_out), (tokens_in, choices_in) = told.tolist()

        rank, token = torch.nonzero_static(needed, size=sum(tokens_out)).unbind(1)  # nonzero would ask the GPU
        choices = numbered_at(top_k_index.index_select(0, token), rank[:, None], local)
        choices = self._exchanged(choices, tokens_in, tokens_out)
        rows = self._exchanged(hidden_states.index_select(0, token), tokens_in, tokens_out)
        out, places = self._computed(rows, choices, sum(choices_in))
        out = out.index_select(0, places)

        outputs = out.new_empty(top_k_index.numel(), out.shape[1])
        num_kept = len(outputs) - sum(choices_out)
        coming = dist.all_to_all_single(
            outputs[num_kept:], out, choices_out, choices_in, group=self.group, async_op=True
        )
        places = self._compute_kept(hidden_states, top_k_index, outputs[:num_kept])
        assert coming is not None, "a collective in the background"
        coming.wait()
        del rows, out  # as large as `outputs`, which is about to be gathered
        return weighted_sum(outputs, places_of_outputs(order, places), top_k_weights, hidden_states.dtype)

    def _compute_kept(self, hidden_states: torch.Tensor, index: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
        """Fill `outputs` [C, H] with those of this rank's C choices of its own experts; where each is, int64 [C]."""
        choices = numbered_at(index, self.rank, self.experts.num_experts) if len(outputs) else index
        own, places = self._computed(hidden_states, choices, len(outputs))
        outputs.copy_(own)
        return places

    def _computed(
        self, rows: torch.Tensor, choices: torch.Tensor, num_choices: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs [num_choices, H] of this rank's experts, and where that of each choice is, int64 [num_choices]."""
        if num_choices == 0:
            empty = rows.new_empty(0, rows.shape[1], dtype=self.experts.down_proj.dtype)
            return empty, choices.new_empty(0, dtype=torch.int64)
        return choice_outputs(self.experts, rows, choices, kernel_of(self.experts), num_choices)

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


def count_rows(owner: torch.Tensor, num_ranks: int, kept: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which rank is sent which token, bool [ranks, T]; how many tokens and choices each is sent, int64 [ranks, 2].

    `owner`: the rank of each choice's expert, int64 [T, k]; nothing is sent for the choices of rank `kept`.
    """
    ranks = torch.arange(num_ranks, device=owner.device)[:, None]
    sent = (owner.reshape(-1) == ranks) & (ranks != kept)
    needed = sent.view(num_ranks, *owner.shape).any(2)
    return needed, torch.stack([needed.sum(1), sent.sum(1)], 1)


def numbered_at(index: torch.Tensor, rank: torch.Tensor | int, local: int) -> torch.Tensor:
    """Global expert ids as `rank` numbers its `local` experts, int32; `local` for those of other ranks."""
    index = index - rank * local
    return torch.where((index >= 0) & (index < local), index, local).to(torch.int32)


def order_of_outputs(owner: torch.Tensor, kept: int) -> torch.Tensor:
    """The (token, choice)s in the order of their outputs, those of rank `kept` first, then by rank: int64 [T*k]."""
    return torch.argsort(torch.where(owner == kept, NONE, owner).reshape(-1), stable=True)


def places_of_outputs(order: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Where the output of each (token, choice) is, int64 [T*k]; of the first ones of `order` at `first`."""
    rest = torch.arange(len(first), len(order), device=order.device)
    return torch.empty_like(order).scatter_(0, order, torch.cat([first, rest]))

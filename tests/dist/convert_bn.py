"""One rank of the SyncBatchNorm scenario: a ResNet-18 under DistributedDataParallel, quantized, trained and saved.

    torchrun --nproc_per_node 2 convert_bn.py DIRECTORY [--train] [--device cuda]

Four arrangements: convert and wrap first, then quantize; and the other way round; each with the norms' quantizers off
(as shipped) and on. Rank 0 leaves DIRECTORY/ORDER-NORMS.pt with weights, quantizers, and outputs in eval mode on
images that every process can draw. `--train`: norms in train mode, for GPUs only: SyncBatchNorm trains nowhere else.
Prints a row for each arrangement.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1] / "unit")]
from small_nets import INT8, INT8_WITH_NORMS, images, loop, resnet18

import hf_ptq

RECIPES = {"off": INT8, "on": INT8_WITH_NORMS}
ORDERS = ("convert first", "quantize first")
STEPS = 4


def wrapped(model: nn.Module, device: torch.device) -> nn.Module:
    """Converted and under DistributedDataParallel, which on CPUs refuses a model that is converted already."""
    convert, parallel = nn.SyncBatchNorm.convert_sync_batchnorm, nn.parallel.DistributedDataParallel
    return parallel(convert(model), device_ids=[device]) if device.type == "cuda" else convert(parallel(model))


def arranged(order: str, recipe: dict, device: torch.device) -> tuple[nn.Module, float]:
    """The quantized model, and how far conversion moved its outputs."""
    model, data = resnet18().to(device), loop(images(8, seed=10 + dist.get_rank()).to(device))
    probe = images().to(device)
    if order == "convert first":
        return hf_ptq.quantize(wrapped(model, device), recipe, data), 0.0
    hf_ptq.quantize(model, recipe, data)
    with torch.no_grad():
        before = model(probe)
        model = wrapped(model, device)
        return model, float((model(probe) - before).abs().max())


def train(model: nn.Module, device: torch.device, trains_norms: bool) -> float:
    """A few steps, each rank on images of its own; returns the last loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model.train()
    if not trains_norms:
        for module in model.modules():
            if isinstance(module, nn.SyncBatchNorm):
                module.eval()
    loss = torch.zeros(())
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(100 + step)
        labels = torch.randint(0, 10, (8,), generator=draw).to(device)
        x = images(8, seed=50 + 10 * step + dist.get_rank()).to(device)
        loss = nn.functional.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    return float(loss)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    with hf_ptq.distributed_run(options.device) as state:
        for order in ORDERS:
            for norms, recipe in RECIPES.items():
                start = time.perf_counter()
                model, moved = arranged(order, recipe, state.device)
                loss = train(model, state.device, options.train)
                with torch.no_grad():
                    outputs = model(images().to(state.device)).cpu()
                found = {
                    "weights": {name: tensor.cpu() for name, tensor in hf_ptq.model_state(model).items()},
                    "quantizers": hf_ptq.quantizer_state(model),
                    "summary": hf_ptq.summary(model),
                    "outputs": outputs,
                    "moved": moved,
                }
                if state.is_first:
                    torch.save(found, options.directory / f"{order}-{norms}.pt")
                    seconds = time.perf_counter() - start
                    print(f"{order:15} norms {norms:4} moved {moved:.1e} loss {loss:.4f} {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()

"""What has to hold of the files that convert_bn.py leaves, in a process without a group."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))
from small_nets import images, resnet18

import hf_ptq

ORDERS = ("convert first", "quantize first")


def check(directory: Path, tolerance: float, device: str = "cpu") -> list[tuple[str, str, float]]:
    """(order, norms, how far the restored model's outputs are off); raises AssertionError where something differs."""
    table = []
    for norms in ("off", "on"):
        found = {order: torch.load(directory / f"{order}-{norms}.pt", weights_only=True) for order in ORDERS}
        for order, saved in found.items():
            model = resnet18()
            model.load_state_dict(saved["weights"], strict=True)
            hf_ptq.restore_quantizers(model, saved["quantizers"])
            model.to(device)  # of the ranks: a sum in another order may round to the next code
            with torch.no_grad():
                off = float((model(images().to(device)).cpu() - saved["outputs"]).abs().max())
            assert off < tolerance, (order, norms, off)
            assert saved["moved"] < tolerance, (order, norms, saved["moved"])
            assert hf_ptq.summary(model) == saved["summary"]
            assert f"20 BatchNorm: input int8{' (off)' if norms == 'off' else ''}" in saved["summary"].splitlines()
            untrained = resnet18().state_dict()["head.weight"]
            assert not torch.equal(saved["weights"]["head.weight"], untrained), "it was trained"
            hf_ptq.disable(model, "*")
            with torch.no_grad():
                plain = model(images().to(device)).cpu()
            assert float((plain - saved["outputs"]).abs().max()) > 1e-4, "quantizers were at work"
            table.append((order, norms, off))
        one, other = found.values()
        assert one["quantizers"]["quantizers"] == other["quantizers"]["quantizers"]
        assert one["quantizers"]["ranges"].keys() == other["quantizers"]["ranges"].keys()
        assert one["weights"].keys() == other["weights"].keys() == resnet18().state_dict().keys()
    return table

"""Networks of the tests' own for the library: a ResNet-18, thin so that it is quick, and recipes for it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

INT8 = {
    "name": "int8",
    "rules": [{"pattern": "*", "weight": "int8_per_channel", "input": "int8"}, {"import": "default_disabled"}],
}
INT8_WITH_NORMS = {
    "name": "int8 with norms",
    "rules": [*INT8["rules"], {"pattern": "*", "parent_class": ["BatchNorm2d", "SyncBatchNorm"], "input": "int8"}],
}


class Block(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.down = None
        if stride > 1 or inputs != outputs:
            self.down = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + (x if self.down is None else self.down(x)))


class ResNet18(nn.Module):
    """Eighteen layers: a stem, four stages of two blocks, a head; with 20 convolutions and 20 batch norms."""

    def __init__(self, width: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        sizes = [width, width, 2 * width, 4 * width, 8 * width]
        blocks = [(sizes[i], sizes[i + 1], 1 if i == 0 else 2) for i in range(4)]
        self.stages = nn.Sequential(*(nn.Sequential(Block(a, b, s), Block(b, b, 1)) for a, b, s in blocks))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(8 * width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.pool(self.stages(self.stem(x))).flatten(1))


def resnet18() -> ResNet18:
    """Seeded, with statistics of its norms that are not those of a new one; in eval mode."""
    torch.manual_seed(0)
    model = ResNet18()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(std=0.1)
                module.running_var.uniform_(0.5, 1.5)
                module.weight.uniform_(0.5, 1.5)
                module.bias.normal_(std=0.1)
    return model.eval()


def images(number: int = 4, seed: int = 1) -> torch.Tensor:
    return torch.randn(number, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


def loop(*batches: torch.Tensor) -> Callable[[nn.Module], None]:
    """A forward loop over batches."""

    def run(model: nn.Module) -> None:
        for batch in batches:
            model(batch)

    return run

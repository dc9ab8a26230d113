"""CIFAR on the device: augmentation by indexing, and the nets of the papers in their CIFAR form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from . import data

_MEAN = (0.4914, 0.4822, 0.4465)
_SPREAD = (0.2470, 0.2435, 0.2616)
_PAD = 4


class Pictures:
    """All pictures on the device as uint8; a batch is cut out, mirrored and normalised there."""

    def __init__(
        self, root: Path, device: torch.device, classes: int = 10, limit: int | None = None, batches: int = 5
    ) -> None:
        arrays = {key: torch.from_numpy(value) for key, value in data.cifar(root, classes, batches).items()}
        if limit is not None:
            arrays = {key: value[:limit] for key, value in arrays.items()}
        self.x, self.y = (
            F.pad(arrays["x_train"], (0, 0, _PAD, _PAD, _PAD, _PAD)).to(device),
            arrays["y_train"].to(device),
        )
        self.x_test, self.y_test = arrays["x_test"].to(device), arrays["y_test"].to(device)
        self._mean = torch.tensor(_MEAN, device=device) * 255
        self._spread = torch.tensor(_SPREAD, device=device) * 255

    def __len__(self) -> int:
        return len(self.y)

    def batch(self, index: torch.Tensor, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Random crops, half of them mirrored, of the pictures with these numbers."""
        n, device = index.numel(), index.device
        corner = torch.randint(2 * _PAD + 1, (2, n, 1), device=device, generator=rng)
        mirrored = torch.rand(n, 1, device=device, generator=rng) < 0.5
        line = torch.arange(32, device=device)
        rows = corner[0] + line
        columns = corner[1] + torch.where(mirrored, 31 - line, line)
        return self._ready(self.x[index[:, None, None], rows[:, :, None], columns[:, None, :]]), self.y[index]

    def _ready(self, pictures: torch.Tensor) -> torch.Tensor:
        """(n, 3, 32, 32), channels last in memory."""
        return ((pictures.float() - self._mean) / self._spread).permute(0, 3, 1, 2)

    def test(self, size: int = 1000) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for x, y in zip(self.x_test.split(size), self.y_test.split(size)):
            yield self._ready(x), y


def _conv(inside: int, outside: int, stride: int = 1, kernel: int = 3) -> nn.Conv2d:
    return nn.Conv2d(inside, outside, kernel, stride, kernel // 2, bias=False)


class Block(nn.Module):
    """Starts as its shortcut: without that, rates of large batches throw ResNet-18 far off in the first steps."""

    starts_as_shortcut = True

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(inside, outside, stride), nn.BatchNorm2d(outside)
        self.conv2, self.bn2 = _conv(outside, outside), nn.BatchNorm2d(outside)
        if self.starts_as_shortcut:
            nn.init.zeros_(self.bn2.weight)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(_conv(inside, outside, stride, 1), nn.BatchNorm2d(outside))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + self.shortcut(x))


class PublishedBlock(Block):
    """As the papers have it: no norm starts at 0."""

    starts_as_shortcut = False


class SqueezeBlock(nn.Module):
    """A pre-activation block whose channels are weighed by two small layers (Hu et al., CVPR 2018)."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(inside), _conv(inside, outside, stride)
        self.bn2, self.conv2 = nn.BatchNorm2d(outside), _conv(outside, outside)
        self.narrow, self.widen = (
            nn.Conv2d(outside, max(1, outside // 16), 1),
            nn.Conv2d(max(1, outside // 16), outside, 1),
        )
        self.shortcut = _conv(inside, outside, stride, 1) if stride != 1 or inside != outside else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        active = F.relu(self.bn1(x))
        out = self.conv2(F.relu(self.bn2(self.conv1(active))))
        weights = torch.sigmoid(self.widen(F.relu(self.narrow(out.mean((2, 3), keepdim=True)))))
        return out * weights + (x if self.shortcut is None else self.shortcut(active))


class ResNet18(nn.Module):
    def __init__(self, classes: int = 10, width: int = 64, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.first, self.norm = _conv(3, width), nn.BatchNorm2d(width)
        layers, inside = list[nn.Module](), width
        for outside in (width, 2 * width, 4 * width, 8 * width):
            layers += [block(inside, outside, 1 if inside == outside else 2), block(outside, outside, 1)]
            inside = outside
        self.blocks = nn.Sequential(*layers)
        self.last: nn.Module = nn.Identity()
        self.head = nn.Linear(inside, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.last(self.blocks(F.relu(self.norm(self.first(x)))))
        logits: torch.Tensor = self.head(x.mean((2, 3)))
        return logits


class SeNet18(ResNet18):
    """The net of Accordion's study: pre-activation blocks, and no norm between the last sum and the head."""

    def __init__(self, classes: int = 10, width: int = 64) -> None:
        super().__init__(classes, width, SqueezeBlock)


class SeNet18Normed(SeNet18):
    """For short schedules: the last sum is normalised, as it grows until NaN; blocks start as their shortcuts."""

    def __init__(self, classes: int = 10, width: int = 64) -> None:
        super().__init__(classes, width)
        self.last = nn.Sequential(nn.BatchNorm2d(self.head.in_features), nn.ReLU())
        for block in self.blocks:
            assert isinstance(block, SqueezeBlock)
            nn.init.zeros_(block.conv2.weight)


class Vgg19(nn.Module):
    """VGG-19 with batch norm and one linear layer, as for CIFAR."""

    def __init__(self, classes: int = 10, width: int = 64) -> None:
        super().__init__()
        layers, inside = list[nn.Module](), 3
        for times, count in ((1, 2), (2, 2), (4, 4), (8, 4), (8, 4)):
            for _ in range(count):
                outside = times * width
                layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(inplace=True)]
                inside = outside
            layers.append(nn.MaxPool2d(2))
        self.features, self.head = nn.Sequential(*layers), nn.Linear(inside, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.features(x).flatten(1))
        return logits


class WorkerNorm(nn.BatchNorm2d):
    """Batch norm for a batch that holds the pictures of several workers: each is normalised by itself.

    Running statistics are those of worker 0, as DDP hands its buffers to all others.
    """

    workers = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(x)
        first, *others = x.chunk(self.workers)
        return torch.cat([super().forward(first), *(
            F.batch_norm(part, None, None, self.weight, self.bias, training=True, eps=self.eps) for part in others
        )])  # fmt: skip


def for_workers(net: nn.Module, workers: int) -> nn.Module:
    """The same net, whose batch norms see this many workers in a batch."""
    for module in net.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = WorkerNorm
            module.workers = workers  # type: ignore[assignment]
    return net


class Bottleneck(nn.Module):
    """ResNet-50's: 1 x 1, 3 x 3, 1 x 1."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = 4 * width
        self.conv1, self.bn1 = _conv(inside, width, 1, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = _conv(width, outside, 1, 1), nn.BatchNorm2d(outside)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(_conv(inside, outside, stride, 1), nn.BatchNorm2d(outside))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))
        return F.relu(self.bn3(self.conv3(out)) + self.shortcut(x))


class ResNet50(nn.Module):
    """For pictures of 32 x 32, as ResNet18 above: 23.5 million parameters with 10 classes."""

    def __init__(self, classes: int = 10, width: int = 64) -> None:
        super().__init__()
        self.first, self.norm = _conv(3, width), nn.BatchNorm2d(width)
        layers, inside = list[nn.Module](), width
        for number, count in enumerate((3, 4, 6, 3)):
            for place in range(count):
                layers.append(Bottleneck(inside, width << number, 2 if number and not place else 1))
                inside = 4 * (width << number)
        self.blocks, self.head = nn.Sequential(*layers), nn.Linear(inside, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.blocks(F.relu(self.norm(self.first(x)))).mean((2, 3)))
        return logits


def published_resnet18(classes: int = 10, width: int = 64) -> ResNet18:
    return ResNet18(classes, width, PublishedBlock)


NETS: dict[str, Callable[[int, int], nn.Module]] = {
    "resnet18": ResNet18, "resnet18-published": published_resnet18, "resnet50": ResNet50,
    "vgg19bn": Vgg19, "senet18": SeNet18, "senet18-normed": SeNet18Normed,
}  # fmt: skip

"""Residual nets and their results, for the tests of torchkiln.fuse."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchkiln


class Bottleneck(nn.Module):
    """A bottleneck block with the submodules and the forward of torchvision's ResNets."""

    def __init__(self, channels: int, middle: int, *, projects: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, middle, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(middle)
        self.conv2 = nn.Conv2d(middle, middle, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(middle)
        self.conv3 = nn.Conv2d(middle, channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if projects:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, channels, 1, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class Net(nn.Module):
    """A ResNet of three blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        blocks = (Bottleneck(16, 8), Bottleneck(16, 8), Bottleneck(16, 8, projects=True))
        self.layer = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.maxpool(self.relu(self.bn1(self.conv1(x)))))


class Plain(nn.Module):
    """Two chains of convolution, batch norm and relu; a max pool follows the second, as in VGG."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.bn1, self.bn2 = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.pool = nn.MaxPool2d(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.first(x)))
        return self.pool(F.relu(self.bn2(self.second(x))))


def example(device: torch.device, dtype: torch.dtype, channels: int = 3) -> Tensor:
    x = torch.randn(4, channels, 32, 32, device=device, dtype=dtype)
    return x.to(memory_format=torch.channels_last)


def fused(net: nn.Module, **options: Any) -> nn.Module:
    made = copy.deepcopy(net)
    torchkiln.fuse(made, **options)
    return made


def outcome(net: nn.Module, x: Tensor) -> list[Tensor]:
    """Results, gradients by ``backward()`` and buffers of a training step."""
    x = x.clone().requires_grad_()
    net.zero_grad()
    y = net(x)
    y.square().sum().backward()
    assert x.grad is not None
    gradients = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    return [y, x.grad, *gradients, *(b.clone() for b in net.buffers())]

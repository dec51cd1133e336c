"""Modules, in the manner of :mod:`torch.nn`."""

from torchkiln.nn.bias_act import ScaleBiasReLU

__all__ = ["ScaleBiasReLU"]

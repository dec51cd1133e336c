"""Ops on :class:`torch.distributed.tensor.DTensor`: the rules of this library and of others."""

from torchkiln.distributed.rules import register_rule

__all__ = ["register_rule"]

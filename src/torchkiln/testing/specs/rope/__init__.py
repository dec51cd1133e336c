"""The contracts of the rotary embedding: alone, and of a packed projection with norms."""

from torchkiln.testing.specs.rope.qkv import QKV_NORM_ROPE
from torchkiln.testing.specs.rope.rope import ROPE

__all__ = ["QKV_NORM_ROPE", "ROPE"]

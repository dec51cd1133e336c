"""The contracts of the rotary embedding, and of a packed projection and its cache."""

from torchkiln.testing.forms import with_forms
from torchkiln.testing.specs.rope import mask, qkv
from torchkiln.testing.specs.rope.rope import ROPE

QKV_NORM_ROPE = with_forms(qkv.QKV_NORM_ROPE, qkv.with_cache, mask.CACHE_MASK)

__all__ = ["QKV_NORM_ROPE", "ROPE"]

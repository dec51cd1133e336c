"""The cache of keys and values of attention."""

import torch
from torch import Tensor, nn

from torchkiln.typing import Device


class KVCache(nn.Module):
    """Keys and values of earlier tokens, in buffers of fixed address and size.

    Tokens are written in place, at positions that are read from a tensor on the device. No size
    changes and the host does not wait, so that a CUDA graph or a compiled step can be replayed for
    each token. Positions that have not been written are zeros. :class:`Attention` with a rotation
    writes in the pass that rotates, if the buffers have the dtype of the projection.

    Args:
        batch: number of sequences.
        max_length: the largest number of tokens of a sequence.
        num_kv_heads: heads of the keys, and of the values.
        head_dim: elements of a head.
        device: of the buffers.
        dtype: of the buffers.

    Shape:
        ``keys`` and ``values`` ``[batch, num_kv_heads, max_length, head_dim]``.
    """

    keys: Tensor
    values: Tensor

    def __init__(
        self,
        batch: int,
        max_length: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        device: Device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        shape = (batch, num_kv_heads, max_length, head_dim)
        for name in ("keys", "values"):
            buffer = torch.zeros(shape, device=device, dtype=dtype)
            self.register_buffer(name, buffer, persistent=False)

    @property
    def max_length(self) -> int:
        """The largest number of tokens of a sequence."""
        return self.keys.shape[-2]

    def extra_repr(self) -> str:
        """The sizes, for ``repr``."""
        batch, heads, length, head_dim = self.keys.shape
        sizes = f"{batch}, max_length={length}, num_kv_heads={heads}, head_dim={head_dim}"
        return f"{sizes}, dtype={self.keys.dtype}"

    def write(self, k: Tensor, v: Tensor, positions: Tensor | None = None) -> None:
        """Stores keys and values ``[batch, num_kv_heads, tokens, head_dim]``.

        Args:
            k: the keys; without a gradient.
            v: the values.
            positions: ``[tokens]`` or ``[batch, tokens]``, int64, on the device of the cache, from
                0 to ``max_length - 1``; None for 0, 1, 2, ...
        """
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise RuntimeError(
                "torchkiln.nn.KVCache: k: got a tensor that requires a gradient, expected none: "
                "decode under torch.no_grad()"
            )
        self.check_length(k.shape[-2])
        for buffer, new in ((self.keys, k), (self.values, v)):
            if positions is None:
                buffer[:, :, : new.shape[-2]].copy_(new)
            elif positions.dim() == 1:
                buffer.index_copy_(2, positions, new.to(buffer.dtype))
            else:
                places = positions[:, None, :, None].expand_as(new)
                buffer.scatter_(2, places, new.to(buffer.dtype))

    def mask(self, positions: Tensor) -> Tensor:
        """Numbers that hide the keys after each token: 0 up to the token's place, then ``-inf``.

        One kernel writes them; a bool mask takes more kernels, because attention converts it. The
        result has the dtype of the cache, or float32 for integers and float8.

        Args:
            positions: ``[tokens]`` or ``[batch, tokens]``, int64. A token before the first place,
                such as padding at -1, sees no key; a token after the last place sees all keys.

        Returns:
            ``[tokens, max_length]`` or ``[batch, 1, tokens, max_length]``.
        """
        # float8 and integers have no infinity.
        has_infinity = self.keys.is_floating_point() and self.keys.itemsize > 1
        dtype = self.keys.dtype if has_infinity else torch.float32
        found: Tensor = torch.ops.torchkiln._cache_mask.default(positions, self.max_length, dtype)
        return found

    def check_length(self, tokens: int) -> None:
        """Refuses more tokens than ``max_length``."""
        if tokens > self.max_length:
            raise ValueError(
                f"torchkiln.nn.KVCache: k: got {tokens} tokens, expected at most "
                f"{self.max_length}: make a longer cache"
            )

    def reset(self) -> None:
        """Fills the buffers with zeros."""
        self.keys.zero_()
        self.values.zero_()

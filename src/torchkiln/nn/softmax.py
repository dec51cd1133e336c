"""Modules of softmax and its logarithm."""

from torch import Tensor, nn

from torchkiln.ops.softmax import log_softmax, softmax


class Softmax(nn.Softmax):
    """``exp(x * scale) / sum(exp(x * scale))`` over ``dim``, without the masked elements.

    Args:
        dim: the dimension that is summed over.
        scale: a fixed factor.
        causal: whether elements ``[..., q, k]`` with ``k > q`` are masked.

    Shape:
        input and output of one shape; ``mask`` broadcasts to it.
    """

    dim: int

    def __init__(self, dim: int, *, scale: float = 1.0, causal: bool = False) -> None:
        super().__init__(dim)
        self.scale = scale
        self.causal = causal

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        """Applies the op to the elements of ``input`` where ``mask`` is True."""
        return softmax(input, self.dim, scale=self.scale, mask=mask, causal=self.causal)

    def extra_repr(self) -> str:
        """The settings, for ``repr``."""
        return f"dim={self.dim}, scale={self.scale}, causal={self.causal}"


class LogSoftmax(nn.LogSoftmax):
    """The logarithm of :class:`Softmax`, with the same arguments and shapes."""

    dim: int

    def __init__(self, dim: int, *, scale: float = 1.0, causal: bool = False) -> None:
        super().__init__(dim)
        self.scale = scale
        self.causal = causal

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        """Applies the op to the elements of ``input`` where ``mask`` is True."""
        return log_softmax(input, self.dim, scale=self.scale, mask=mask, causal=self.causal)

    def extra_repr(self) -> str:
        """The settings, for ``repr``."""
        return f"dim={self.dim}, scale={self.scale}, causal={self.causal}"

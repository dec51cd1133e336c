"""A linear layer whose weight is sparse."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from torchkiln.ops.spmm import csr_transpose, spmm_csr
from torchkiln.typing import Device


def _random_pattern(columns: int, rows: int, count: int) -> tuple[Tensor, Tensor]:
    """A random pattern with ``count`` entries per row, columns ascending.

    Draws up to 2**24 numbers at a time, which limits the memory.
    """
    together = max(1, 2**24 // max(columns, 1))
    drawn = [
        torch.rand(min(together, rows - row), columns).argsort(dim=1)[:, :count].sort(dim=1).values
        for row in range(0, rows, together)
    ]
    col = torch.cat(drawn).flatten() if drawn else torch.zeros(0)
    return torch.arange(rows + 1, dtype=torch.int32) * count, col.to(torch.int32)


class SparseLinear(nn.Module):
    """``x @ weight.T + bias`` with the entries of a sparse weight as the trainable parameter.

    The pattern is fixed: random with the same number of entries in each row, or that of a matrix
    given to :meth:`from_dense`.

    Args:
        in_features: columns of the weight.
        out_features: rows of the weight.
        density: the share of the weight that is stored, above 0 and up to 1.
        bias: whether there is a bias.
        device: of the parameters and of the pattern.
        dtype: of the parameters.

    Shape:
        input ``[..., in_features]``, output ``[..., out_features]``.
    """

    crow: Tensor
    col: Tensor
    transpose: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        density: float = 0.1,
        *,
        bias: bool = True,
        device: Device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 0 < density <= 1:
            raise ValueError(
                f"torchkiln.nn.SparseLinear: density: got {density}, expected a number above 0 "
                "and up to 1"
            )
        self.in_features = in_features
        self.out_features = out_features
        count = max(1, round(density * in_features)) if in_features else 0
        self._set_pattern(*_random_pattern(in_features, out_features, count), device)
        self.values = nn.Parameter(torch.empty(out_features * count, device=device, dtype=dtype))
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
        self.reset_parameters()

    def _set_pattern(self, crow: Tensor, col: Tensor, device: Device | None) -> None:
        """Registers the pattern as buffers. The transposed pattern is not in the state_dict."""
        self.register_buffer("crow", crow.to(device))
        self.register_buffer("col", col.to(device))
        packed = csr_transpose(self.crow, self.col, self.in_features)
        self.register_buffer("transpose", packed, persistent=False)
        self.register_load_state_dict_post_hook(_derive_transpose)  # type: ignore[no-untyped-call]

    def reset_parameters(self) -> None:
        """Uniform values in the range of a :class:`torch.nn.Linear` with as many inputs per row."""
        mean = self.values.numel() / max(self.out_features, 1)
        bound = 1 / math.sqrt(mean) if mean > 0 else 0.0
        nn.init.uniform_(self.values, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    @classmethod
    def from_dense(cls, weight: Tensor, bias: Tensor | None = None) -> SparseLinear:
        """A layer with the non-zero elements of ``weight [out_features, in_features]``."""
        rows, columns = weight.shape
        sparse = 1 / max(columns, 1)  # the smallest pattern, which is replaced below
        layer = cls(
            columns, rows, density=sparse, bias=False, device=weight.device, dtype=weight.dtype
        )
        row, col = weight.detach().nonzero(as_tuple=True)
        ends = torch.bincount(row, minlength=rows).cumsum(0)
        layer.crow = torch.cat([ends.new_zeros(1), ends]).to(torch.int32)
        layer.col = col.to(torch.int32)
        layer.transpose = csr_transpose(layer.crow, layer.col, columns)
        layer.values = nn.Parameter(weight.detach()[row, col])
        if bias is not None:
            layer.bias = nn.Parameter(bias.detach().clone())
        return layer

    def dense_weight(self) -> Tensor:
        """The weight as a matrix, with its gradient."""
        rows = torch.repeat_interleave(self.crow.diff().long(), output_size=self.col.numel())
        zeros = self.values.new_zeros(self.out_features, self.in_features)
        return zeros.index_put((rows, self.col.long()), self.values)

    def forward(self, x: Tensor) -> Tensor:
        """Applies the layer to ``x``."""
        rows = x.reshape(-1, x.shape[-1])
        product = spmm_csr(
            self.values,
            rows.t(),
            self.crow,
            self.col,
            shape=(self.out_features, self.in_features),
            transpose=self.transpose,
        )
        y = product.t().reshape(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        """Sizes and share of entries, for repr()."""
        entries = self.values.numel()
        share = entries / max(self.in_features * self.out_features, 1)
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"density={share:.3g}, bias={self.bias is not None}"
        )


def _derive_transpose(module: nn.Module, _: object) -> None:
    """Computes the transposed pattern after a state_dict was loaded."""
    if isinstance(module, SparseLinear):
        module.transpose = csr_transpose(module.crow, module.col, module.in_features)

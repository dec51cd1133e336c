"""The kernel as ``kernels`` loads it; python build_local.py makes the build."""

from pathlib import Path

import pytest
import torch
from kernels import get_local_kernel
from torch.nn import functional as F

BACKEND = "cuda" if torch.version.cuda else "cpu"
kernel = get_local_kernel(Path(__file__).parents[1], backend=BACKEND)


def reference(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return F.silu(a) * b


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(8,), (3, 14), (2, 3, 258), (0, 4)])
def test_values_and_gradients(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape, device=BACKEND, dtype=dtype, requires_grad=True)
    wide = x.detach().double().requires_grad_()
    y, expected = kernel.OPNAME(x), reference(wide)
    torch.testing.assert_close(y, expected.to(dtype))
    grad = torch.randn_like(y)
    y.backward(grad)
    expected.backward(grad.double())
    torch.testing.assert_close(x.grad, wide.grad.to(dtype))


def test_the_op_is_well_defined() -> None:
    x = torch.randn(3, 8, device=BACKEND, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(kernel.OPNAME, (x,))
    compiled = torch.compile(kernel.OPNAME, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), reference(x))
    with pytest.raises(RuntimeError, match="an even last size"):
        kernel.OPNAME(x[:, :5])


def test_the_layer() -> None:
    x = torch.randn(3, 8, device=BACKEND)
    torch.testing.assert_close(kernel.layers.TYPENAME.forward(None, x), reference(x))

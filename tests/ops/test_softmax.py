"""Softmax and its logarithm beyond the contract: masks, special values, long rows, layouts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from dtypes import every_dtype, name
from torch import Tensor

import torchkiln
from torchkiln.testing.compare import bits

OPS = ((torchkiln.softmax, torch.softmax), (torchkiln.log_softmax, torch.log_softmax))
INF = math.inf

every_op = pytest.mark.parametrize(("op", "torchs"), OPS, ids=["softmax", "log_softmax"])


def gradient(function: Callable[..., Tensor], x: Tensor, grad: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    (found,) = torch.autograd.grad(function(leaf), leaf, grad)
    return found


def tolerances(dtype: torch.dtype) -> dict[str, Any]:
    eps = max(torch.finfo(dtype).eps, 1e-7)
    return {"rtol": 4 * eps, "atol": 4 * eps, "equal_nan": True}


def require_same(
    op: Any, torchs: Any, x: Tensor, dim: int, kept: Tensor | None = None, **kwargs: Any
) -> None:
    """Values and gradients equal torch's on the masked float64 tensor; masked elements are 0."""

    def by_torch(wide: Tensor) -> Tensor:
        z = wide * kwargs.get("scale", 1.0)
        return torchs(z if kept is None else z.masked_fill(~kept, -INF), dim)

    found = op(x, dim, **kwargs)
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), by_torch(x.double()), **tolerances(x.dtype))
    grad = torch.randn(x.shape, device=x.device).to(x.dtype)
    grad_x = gradient(lambda t: op(t, dim, **kwargs), x, grad)
    # Backward reads the rounded output; a logarithm is as large as x.
    size = 8 * max(1.0, x.double().abs().nan_to_num(0, 0, 0).amax().item() if x.numel() else 1.0)
    limits = tolerances(x.dtype)
    limits["atol"] *= size * max(1.0, grad.double().abs().sum(dim).amax().item())
    torch.testing.assert_close(
        grad_x.double(), gradient(by_torch, x.double(), grad.double()), **limits
    )
    if kept is not None:
        assert (grad_x[~kept.expand(x.shape)] == 0).all()


@every_op
@every_dtype
@pytest.mark.parametrize("length", [1, 7, 64, 1025, 40001])
def test_special_values(
    device: torch.device, dtype: torch.dtype, length: int, op: Any, torchs: Any
) -> None:
    """Values and gradients are NaN or 0 exactly where torch's are."""
    rows = torch.randn(8, length, device=device).to(dtype)
    rows[0, length // 2] = INF
    rows[1, length // 2] = -INF
    rows[2, length // 2] = math.nan
    rows[3] = -INF
    rows[4, : (length + 1) // 2] = -INF
    rows[5] = INF
    rows[6, 0], rows[6, -1] = INF, -INF
    for x, dim in ((rows, 1), (rows.t().contiguous(), 0), (rows.t(), 0)):
        found, expected = op(x, dim), torchs(x.double(), dim)
        assert torch.equal(found.isnan(), expected.isnan())
        torch.testing.assert_close(found.double(), expected, **tolerances(dtype))
        grads = [
            gradient(lambda t, f=f, dim=dim: f(t, dim), x, torch.ones_like(x)) for f in (op, torchs)
        ]
        assert torch.equal(grads[0].isnan(), grads[1].isnan())


@every_op
@every_dtype
def test_large_offsets(device: torch.device, dtype: torch.dtype, op: Any, torchs: Any) -> None:
    """Offsets of all elements add no error: differences are exact in the dtype."""
    for offset in (1e4, -1e4, 6e4, -6e4):
        x = (offset + 64 * torch.randn(33, 300, device=device).clamp(-4, 4)).to(dtype)
        for dim in (0, 1):
            # The scale is a power of two; the scaled maximum is rounded.
            expected = torchs(x.double() / 64, dim)
            found = op(x, dim, scale=1 / 64)
            torch.testing.assert_close(found.double(), expected, **tolerances(dtype))


@every_op
@every_dtype
@pytest.mark.parametrize(
    ("rows", "length"),
    [(1, 5), (33, 2), (300, 24), (70000, 3), (77, 1519), (520, 2101), (9, 13001)],
)
def test_rows_whose_elements_are_not_adjacent(
    device: torch.device, dtype: torch.dtype, rows: int, length: int, op: Any, torchs: Any
) -> None:
    """Strided rows agree with float64, in tiles of several sizes, and longer than any tile."""
    across = torch.randn(length, rows, device=device).to(dtype).t()
    require_same(op, torchs, across, 1)
    require_same(op, torchs, across, 1, scale=0.5)
    along = torch.randn(rows, 2 * length, device=device).to(dtype)[:, ::2]
    require_same(op, torchs, along, 1)
    grad = torch.randn(length, rows, device=device).to(dtype).t()
    found, expected = (
        gradient(lambda t, f=f: f(t, 1), across, g)
        for f, g in ((op, grad), (op, grad.contiguous()))
    )
    torch.testing.assert_close(found, expected, **tolerances(dtype))


@every_op
@every_dtype
def test_short_rows(device: torch.device, dtype: torch.dtype, op: Any, torchs: Any) -> None:
    """Rows that share a warp agree with float64, as a whole tensor and as part of wider rows."""
    for length in range(1, 49):
        for rows in (5, 1030):
            wide = torch.randn(rows, length + 7, device=device).to(dtype)
            require_same(op, torchs, wide[:, :length].contiguous(), 1, scale=0.5)
            x, grad = wide[:, 3 : length + 3], wide.flip(0)[:, 2 : length + 2]
            require_same(op, torchs, x, 1)
            for strided in (grad, grad.t().contiguous().t()):
                found = gradient(lambda t: op(t, 1), x, strided)
                expected = gradient(lambda t: torchs(t, 1), x.double(), strided.double())
                limits = tolerances(dtype)
                limits["atol"] *= 64 * max(1.0, grad.double().abs().sum(1).amax().item())
                torch.testing.assert_close(found.double(), expected, **limits)


@every_op
@every_dtype
@pytest.mark.parametrize(
    ("rows", "length"),
    [(300007, 2), (300007, 3), (200003, 5), (90001, 11), (50021, 19), (20011, 33)],
)
def test_many_short_rows(
    device: torch.device, dtype: torch.dtype, op: Any, torchs: Any, rows: int, length: int
) -> None:
    """Threads that have several rows each; the last block has fewer."""
    require_same(op, torchs, torch.randn(rows, length, device=device).to(dtype), 1)


@pytest.mark.cuda
def test_explain_says_which_rows_are_copied() -> None:
    for rows, length, copies in ((9, 1024, False), (9, 1025, True), (512, 1025, False)):
        x = torch.randn(length, rows, device="cuda").t()
        notes = torchkiln.explain(torchkiln.softmax, x, 1).forward.notes
        assert any("copied" in note for note in notes) == copies


def test_half_precision_beyond_its_range(device: torch.device) -> None:
    """The scaled argument may exceed float16's range."""
    x = torch.tensor([[60000.0, 58976.0, -60000.0]], device=device, dtype=torch.float16)
    assert torchkiln.softmax(x, 1, scale=1000.0).tolist() == [[1.0, 0.0, 0.0]]
    found = torchkiln.log_softmax(x, 1, scale=0.5)
    assert found.tolist() == [[0.0, -512.0, -60000.0]]


@every_op
@every_dtype
@pytest.mark.parametrize("length", [3, 300, 1200, 5000, 33000])
def test_rows_far_below_zero(
    device: torch.device, dtype: torch.dtype, length: int, op: Any, torchs: Any
) -> None:
    """Elements down to the lowest number do not overflow, as each row is shifted by its largest."""
    lowest = -60000.0 if dtype == torch.float16 else torch.finfo(dtype).min
    for value in (-100.0, -1000.0, lowest):
        x = torch.full((2, length), value, device=device, dtype=dtype)
        x[1, : length - 1] = -torch.inf
        found = op(x, 1).double()
        torch.testing.assert_close(found, torchs(x.double(), 1), **tolerances(dtype))


@every_op
@pytest.mark.parametrize("length", [3, 31, 1024, 5001])
def test_fully_masked_rows(device: torch.device, length: int, op: Any, torchs: Any) -> None:
    """A fully masked row is NaN, as in torch, and its gradient is 0."""
    x = torch.randn(6, length, device=device)
    kept = torch.rand(6, length, device=device) > 0.3
    kept[2], kept[4] = False, False
    kept[:, 0] &= kept.any(1)
    require_same(op, torchs, x, 1, kept, mask=kept)
    assert op(x, 1, mask=kept)[2].isnan().all()
    nothing = torch.zeros((), dtype=torch.bool, device=device)
    assert op(x, 1, mask=nothing).isnan().all()
    assert (gradient(lambda t: op(t, 1, mask=nothing), x, torch.ones_like(x)) == 0).all()


@every_op
@every_dtype
@pytest.mark.parametrize("sizes", [(1, 1), (5, 5), (7, 3), (3, 7), (70, 300), (300, 70)], ids=str)
def test_causal(
    device: torch.device, dtype: torch.dtype, sizes: tuple[int, int], op: Any, torchs: Any
) -> None:
    """The causal mask begins at the top left for all sizes; with another mask both apply."""
    queries, keys = sizes
    x = torch.randn(2, 3, queries, keys, device=device).to(dtype)
    kept = torch.ones(queries, keys, dtype=torch.bool, device=device).tril()
    require_same(op, torchs, x, -1, kept, causal=True)
    require_same(op, torchs, x.transpose(0, 1), 3, kept, causal=True, scale=0.3)
    require_same(op, torchs, x, -1, kept, mask=kept)
    padding = torch.ones(2, 1, 1, keys, dtype=torch.bool, device=device)
    padding[1, ..., keys // 2 :] = keys == 1
    require_same(op, torchs, x, -1, kept & padding, causal=True, mask=padding)


def masks(shape: tuple[int, ...], device: torch.device) -> Iterator[Tensor]:
    """Masks of all shapes that broadcast to ``shape``, with several strides."""

    def kept(*sizes: int) -> Tensor:
        return torch.rand(sizes, device=device) > 0.3

    for ones in itertools.product((False, True), repeat=len(shape)):
        sizes = tuple(1 if one else n for one, n in zip(ones, shape, strict=True))
        yield kept(*sizes)
        yield kept(*sizes).expand(shape)
    yield kept(*shape[1:])
    yield kept(*shape[::-1]).permute(*range(len(shape) - 1, -1, -1))
    yield kept(*(2 * n for n in shape))[tuple(slice(1, None, 2) for _ in shape)]
    yield kept(shape[-1] + 5)[5:]


@every_op
def test_masks_of_every_kind(device: torch.device, op: Any, torchs: Any) -> None:
    """Masks with strides of 0, transposed or sliced agree with torch, for every dim of x."""
    for shape in ((3, 4, 5), (2, 3, 2, 70)):
        x = torch.randn(shape, device=device)
        for kept in masks(shape, device):
            before = bits(kept)
            for dim in range(len(shape)):
                require_same(op, torchs, x, dim, kept, mask=kept)
            assert torch.equal(bits(kept), before)


def test_mask_of_more_dimensions_than_kernels_know(device: torch.device) -> None:
    shape = (2,) * 11
    x = torch.randn(shape, device=device)
    kept = (torch.rand(shape, device=device) > 0.3).permute(0, *range(9, 0, -1), 10)
    require_same(torchkiln.softmax, torch.softmax, x, -1, kept, mask=kept)


@every_op
def test_every_dimension_of_every_layout(device: torch.device, op: Any, torchs: Any) -> None:
    for shape in ((3, 4, 5, 6), (2, 1, 33, 8)):
        x = torch.randn(shape, device=device)
        for order in itertools.permutations(range(4)):
            back = [order.index(d) for d in range(4)]
            moved = x.permute(order).contiguous().permute(back)
            wide = moved[..., :1].expand(shape)
            for dim in range(4):
                require_same(op, torchs, moved, dim)
                require_same(op, torchs, wide, dim)


@every_op
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name)
@pytest.mark.parametrize("length", [32767, 50257, 151936, 1 << 20, (1 << 20) - 3])
def test_long_rows(
    device: torch.device, dtype: torch.dtype, length: int, op: Any, torchs: Any
) -> None:
    x = (3 * torch.randn(2, length, device=device)).to(dtype)
    require_same(op, torchs, x, 1)
    require_same(op, torchs, x.t().contiguous(), 0)
    kept = torch.rand(length, device=device) > 0.5
    require_same(op, torchs, x, 1, kept, mask=kept)


@pytest.mark.cuda
@every_op
@every_dtype
@pytest.mark.parametrize("shape", [(40, 300001), (7, 1000003), (150, 270008)], ids=str)
def test_rows_that_no_cluster_holds(
    shape: tuple[int, int], dtype: torch.dtype, op: Any, torchs: Any
) -> None:
    """Rows too long for a cluster agree with float64 at any offset, and repeat in CUDA graphs."""
    device = torch.device("cuda", 0)
    rows, length = shape
    memory = (3 * torch.randn(rows, length + 3, device=device)).to(dtype)
    whole, sliced = memory[:, : length + 1].contiguous()[:, :length], memory[:, 3:]
    for x in (whole.contiguous(), whole, sliced):
        require_same(op, torchs, x, 1, scale=0.5)
    x = sliced.contiguous()
    x[1, length // 2], x[2, 5], x[3] = INF, math.nan, -INF
    grad = torch.randn_like(x)
    graph = torch.cuda.CUDAGraph()
    expected = op(x, 1), gradient(lambda t: op(t, 1), x, grad)
    assert expected[0][1:4].isnan().any(1).all()
    assert expected[0][[0, *range(4, rows)]].isfinite().all()
    torch.cuda.synchronize(device)
    with torch.cuda.graph(graph):
        captured = op(x, 1)
    stream = torch.cuda.Stream(device)
    for _ in range(5):
        graph.replay()
        with torch.cuda.stream(stream):
            beside = gradient(lambda t: op(t, 1), x, grad)
        torch.cuda.synchronize(device)
        assert torch.equal(bits(captured), bits(expected[0]))
        assert torch.equal(bits(beside), bits(expected[1]))


def test_mask_is_an_input_of_transforms(device: torch.device) -> None:
    """vmap over the mask and torch.func.grad of a masked call agree with separate calls."""
    x = torch.randn(5, 7, device=device)
    kept = torch.rand(3, 5, 7, device=device) > 0.3
    kept[..., 0] = True
    found = torch.func.vmap(lambda m: torchkiln.softmax(x, -1, mask=m, causal=True))(kept)
    for k in range(3):
        torch.testing.assert_close(found[k], torchkiln.softmax(x, -1, mask=kept[k], causal=True))
    along = torch.func.grad(lambda t: torchkiln.softmax(t, 1, mask=kept[0])[:, 0].sum())(x)
    expected = gradient(
        lambda t: torchkiln.softmax(t, 1, mask=kept[0])[:, 0], x, torch.ones(5, device=device)
    )
    torch.testing.assert_close(along, expected)


@pytest.mark.parametrize("op", [torchkiln.softmax, torchkiln.log_softmax])
def test_mask_is_an_input_of_a_compiled_function(device: torch.device, op: Any) -> None:
    torch.compiler.reset()
    function = torch.compile(
        lambda x, m: op(x, -1, scale=0.5, mask=m), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for rows in (4, 9):
        x = torch.randn(rows, 33, device=device)
        kept = torch.rand(rows, 33, device=device) > 0.4
        kept[:, 0] = True
        torch.testing.assert_close(function(x, kept), op(x, -1, scale=0.5, mask=kept))
        grad = torch.randn_like(x)
        torch.testing.assert_close(
            gradient(lambda t, m=kept: function(t, m), x, grad),
            gradient(lambda t, m=kept: op(t, -1, scale=0.5, mask=m), x, grad),
        )


@every_op
def test_second_gradients_of_masked_rows(device: torch.device, op: Any, torchs: Any) -> None:
    """Second derivatives agree with torch's ops in float64."""
    x = torch.randn(4, 9, device=device, dtype=torch.float64, requires_grad=True)
    kept = torch.rand(4, 9, device=device) > 0.4
    kept[:, 2] = True
    grad = torch.randn_like(x).requires_grad_()
    seconds = []
    for y in (op(x, 1, scale=0.7, mask=kept), torchs((x * 0.7).masked_fill(~kept, -INF), 1)):
        (first,) = torch.autograd.grad(y, x, grad, create_graph=True)
        seconds.append(torch.autograd.grad((first * x.detach().cos()).sum(), (x, grad)))
    for found, expected in zip(*seconds, strict=True):
        torch.testing.assert_close(found, expected)


def test_a_changed_output_is_noticed(device: torch.device) -> None:
    """Backward raises an error if the output has been changed in place."""
    x = torch.randn(3, 4, device=device, requires_grad=True)
    y = torchkiln.softmax(x, 1)
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@every_op
def test_wrong_types(op: Any, torchs: Any) -> None:
    prefix = rf"^torchkiln\.{torchs.__name__}: "
    x = torch.ones(2, 3)
    for dim, kind in (
        (None, "NoneType"),
        (1.0, "float"),
        (True, "bool"),
        (torch.tensor(0), "Tensor"),
    ):
        with pytest.raises(TypeError, match=prefix + f"dim: got {kind}, expected an int$"):
            op(x, dim)
    with pytest.raises(IndexError, match=prefix + "dim: got 9223372036854775807, expected"):
        op(x, 2**70)
    with pytest.raises(TypeError, match=prefix + "scale: got Tensor, expected a number$"):
        op(x, 0, scale=torch.tensor(1.0))
    with pytest.raises(TypeError, match=prefix + r"mask: got list, expected a torch\.Tensor$"):
        op(x, 0, mask=[True])
    with pytest.raises(TypeError, match=prefix + "causal: got int, expected a bool$"):
        op(x, 1, causal=1)
    with pytest.raises(TypeError, match=prefix + r"x: got list, expected a torch\.Tensor$"):
        op([1.0, 2.0], 0)


def test_modules_take_a_mask(device: torch.device) -> None:
    x = torch.randn(2, 5, 7, device=device)
    kept = torch.rand(5, 7, device=device) > 0.3
    kept[:, 0] = True
    for layer, op in ((torchkiln.nn.Softmax, OPS[0][0]), (torchkiln.nn.LogSoftmax, OPS[1][0])):
        assert torch.equal(layer(1)(x), op(x, 1))
        assert torch.equal(
            layer(-1, scale=0.5, causal=True)(x, kept),
            op(x, -1, scale=0.5, mask=kept, causal=True),
        )
        expected = f"{layer.__name__}(dim=-1, scale=0.5, causal=True)"
        assert repr(layer(-1, scale=0.5, causal=True)) == expected

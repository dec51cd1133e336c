"""Quantised tensors: bits, scales, rows and columns, special values, errors."""

from __future__ import annotations

import math

import pytest
import torch
from producers import DEVICES
from torch import Tensor
from torch.testing import assert_close

import torchkiln
from torchkiln.nn.quantize import WeightCache

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = (
    *((1,), (128,), (300,), (1, 1), (5, 128), (3, 130), (16, 256), (129, 257), (2, 7, 300)),
    *((0, 5), (5, 0), (0,), (2, 0, 3)),
)


def scale_for(most: Tensor) -> Tensor:
    """The smallest power of two by which ``most`` is at most 448 = 0.875 * 2**9."""
    mantissa, exponent = torch.frexp(most.double())
    power = (exponent - 9 + (mantissa > 0.875).int()).clamp(min=-126)
    return torch.where(most == 0, 1.0, torch.ldexp(torch.ones_like(mantissa), power)).float()


def expected_rows(x: Tensor, block: int = 128) -> tuple[Tensor, Tensor]:
    """Bytes and scales of all blocks of each row, with torch's conversion."""
    x = x.double()
    finite = torch.where(x.isfinite(), x.abs(), 0)
    pieces = finite.split(block, -1) if x.shape[-1] else ()
    most = [piece.amax(-1, keepdim=True) for piece in pieces]
    scale = scale_for(torch.cat(most, -1)) if most else x.new_zeros((*x.shape[:-1], 0)).float()
    return to_bytes(x, scale.repeat_interleave(block, -1)[..., : x.shape[-1]]), scale


def to_bytes(x: Tensor, scale: Tensor) -> Tensor:
    """The bytes of x divided by the scale; NaN and infinities become 0x7F."""
    scaled = (x / scale.double()).float()
    found = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(x.isfinite(), found, 0x7F)


def require_rows(found: torchkiln.Quantized, x: Tensor) -> None:
    """The data and the scales equal the expected ones bit by bit."""
    data, scale = found.data, found.scale
    expected, expected_scale = expected_rows(x)
    assert data.dtype == torch.float8_e4m3fn
    assert data.is_contiguous()
    assert_close(scale, expected_scale, rtol=0, atol=0)
    assert_close(data.view(torch.uint8), expected, rtol=0, atol=0)


def require_squares(found: torchkiln.Quantized, x: Tensor) -> None:
    """A matrix with one scale per 128 x 128 elements equals the expected one bit by bit."""
    data, scale = found.data.view(torch.uint8), found.scale
    if x.numel():
        finite = torch.where(x.isfinite(), x, 0)
        tiles = [[tile.abs().amax() for tile in row.split(128, 1)] for row in finite.split(128, 0)]
        assert_close(
            scale, scale_for(torch.stack([torch.stack(row) for row in tiles])), rtol=0, atol=0
        )
    each = scale.repeat_interleave(128, 0)[: x.shape[0]].repeat_interleave(128, 1)[:, : x.shape[1]]
    assert_close(data, to_bytes(x.double(), each), rtol=0, atol=0)
    blocks = -(-x.shape[1] // 128)
    if blocks:
        assert scale.stride() == (-(-blocks // 4) * 4, 1)  # the strides that torch multiplies
        padding = scale.as_strided((scale.shape[0], scale.stride(0)), scale.stride())[:, blocks:]
        assert_close(padding, torch.zeros_like(padding), rtol=0, atol=0)


def normal(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Numbers whose magnitude varies by row and by column."""
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    x = torch.randn(shape, generator=generator)
    if x.dim() > 1 and x.numel():
        x = x * torch.randn(x.shape[:-1], generator=generator).exp().unsqueeze(-1)
        x = x * torch.randn(x.shape[-1:], generator=generator).exp()
    return x.to(device, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_bits(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    x = normal(shape, dtype, device)
    columns = x.reshape(math.prod(shape[:-1]), shape[-1]).T
    require_rows(torchkiln.quantize(x), x)
    rows, transposed = torchkiln.quantize_both(x)
    require_rows(rows, x)
    require_rows(transposed, columns)
    rows, transposed = torchkiln.quantize_both(x, square=True)
    require_rows(rows, x)
    require_squares(transposed, columns)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (130, 257), (300, 40), (0, 3), (3, 0)])
def test_weight(shape: tuple[int, int], device: str) -> None:
    weight = normal(shape, torch.bfloat16, device)
    found = torchkiln.quantize_weight(weight)
    require_squares(torchkiln.Quantized(found.data, found.scale), weight)
    assert_close(found.transposed_scale, found.scale.T, rtol=0, atol=0)
    assert torch.equal(found.transposed.view(torch.uint8), found.data.view(torch.uint8).T)


@pytest.mark.parametrize("device", DEVICES)
def test_scales_are_laid_out_as_torch_multiplies_them(device: str) -> None:
    x = normal((2, 40, 300), torch.bfloat16, device)
    rows, transposed = torchkiln.quantize_both(x)
    assert rows.scale.flatten(0, 1).stride() == (1, 80)
    assert transposed.scale.stride() == (1, 300)
    weight = torchkiln.quantize_weight(x.flatten(0, 1))
    assert weight.scale.stride() == (4, 1)  # 3 blocks of 128 columns, rounded up to 4
    padding = weight.scale.as_strided((1, 4), (4, 1))[:, 3:]
    assert_close(padding, torch.zeros_like(padding))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_number_of_16_bits(dtype: torch.dtype, device: str) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16, device=device).view(dtype)
    require_rows(torchkiln.quantize(x.unsqueeze(1)), x.unsqueeze(1))  # one scale per number
    require_rows(torchkiln.quantize(x.view(512, 128)), x.view(512, 128))
    require_rows(torchkiln.quantize_both(x.view(512, 128))[1], x.view(512, 128).T)


@pytest.mark.parametrize("device", DEVICES)
def test_rounding_between_all_neighbours(device: str) -> None:
    byte = torch.arange(0x7E, dtype=torch.uint8, device=device)
    low = byte.view(torch.float8_e4m3fn).float()
    high = (byte + 1).view(torch.float8_e4m3fn).float()
    middle = (low + high) / 2
    below, above = (torch.nextafter(middle, end) for end in (low, high))
    for near in (low, middle, below, above, -middle, -below, -above):
        x = torch.cat([near, near.new_tensor([448.0, -448.0])]).unsqueeze(0)
        require_rows(torchkiln.quantize(x), x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_not_finite_is_visible_and_alone(bad: float, device: str) -> None:
    x = normal((130, 260), torch.float32, device)
    x[3, 5] = x[127, 128] = x[129, 259] = bad
    x[64, :128] = bad  # no finite number in this block
    for found, source in zip(torchkiln.quantize_both(x), (x, x.T), strict=True):
        require_rows(found, source)
        assert torch.equal(torchkiln.dequantize(found).isnan(), ~source.isfinite())
    squares = torchkiln.quantize_both(x, square=True)[1]
    require_squares(squares, x.T)
    weight = torchkiln.quantize_weight(x)
    assert torch.equal(torchkiln.dequantize(weight).isnan(), ~x.isfinite())


@pytest.mark.parametrize("device", DEVICES)
def test_magnitudes_at_both_ends_of_float32(device: str) -> None:
    edges = [0.0, 1e-45, 1.1e-38, 1.2e-38, 448.0, 448.00003, 3.4e38]
    x = torch.tensor(edges, device=device).repeat_interleave(128).view(len(edges), 128)
    x = x * torch.linspace(0.25, 1, 128, device=device)
    require_rows(torchkiln.quantize(x), x)
    scale = torchkiln.quantize(x).scale.flatten()
    assert scale[0] == 1
    assert (scale >= 2.0**-126).all()


@pytest.mark.parametrize("device", DEVICES)
def test_strides_of_rows(device: str) -> None:
    whole = normal((40, 700), torch.bfloat16, device)
    for x in (whole[:, 8:264], whole[:, 3:300], whole[::2], whole.T, whole[:1].expand(40, 700)):
        require_rows(torchkiln.quantize(x), x)
        require_rows(torchkiln.quantize_both(x)[1], x.T)
        require_squares(torchkiln.quantize_both(x, square=True)[1], x.T)


@pytest.mark.parametrize("device", DEVICES)
def test_turning_keeps_the_numbers(device: str) -> None:
    x = normal((2, 100, 270), torch.bfloat16, device)
    x = torch.where(x.abs() < x.abs().amax() * 2.0**-12, x.sign(), x)  # so that none underflow
    found = torchkiln.quantize(x)
    turned = torchkiln.transpose_quantized(found)
    before, after = (torchkiln.dequantize(one) for one in (found, turned))
    assert torch.equal(after, before.view(200, 270).T)
    require_rows(turned, before.view(200, 270).T)
    require_squares(torchkiln.transpose_quantized(found, square=True), before.view(200, 270).T)
    copied = torchkiln.Quantized(found.data, found.scale.contiguous())
    assert torch.equal(torchkiln.transpose_quantized(copied).scale, turned.scale)


@pytest.mark.parametrize("shared", [False, True])
def test_the_gradient_of_a_weight_reads_squares(*, shared: bool) -> None:
    """Features of very different size, where blocks of 1 x 128 and squares give other numbers."""
    apart = 2.0 ** -(torch.arange(384) % 20)
    x, grad = torch.randn(256, 384) * apart, torch.randn(256, 128)
    weight = torch.randn(128, 384, requires_grad=True)
    rows = torchkiln.quantize(x)
    y = torchkiln.linear_fp8(rows if shared else x, weight)
    (found,) = torch.autograd.grad(y, weight, grad)
    plain, square = (
        torchkiln.transpose_quantized(rows, s) if shared else torchkiln.quantize_both(x, s)[1]
        for s in (False, True)
    )
    passed = torchkiln.dequantize(torchkiln.quantize_both(grad)[1], torch.float64)
    products = [passed @ torchkiln.dequantize(q, torch.float64).T for q in (square, plain)]
    small = apart < 2.0**-17  # these are rounded again
    expected, other = (product[:, small] for product in products)
    error = (found[:, small].double() - expected).norm()
    assert error < 0.1 * (other - expected).norm()


def test_error_is_that_of_four_bits() -> None:
    x = normal((256, 512), torch.float32)
    error = (torchkiln.dequantize(torchkiln.quantize(x)) - x).abs()
    most = x.view(256, 4, 128).abs().amax(-1).repeat_interleave(128, -1)
    # Half a step: 2**-4 of the number, or 2**-10 of the scale, which is at most most/224.
    assert (error <= torch.maximum(x.abs() * 2.0**-4, most / 224 * 2.0**-10)).all()


def test_dtypes_of_dequantize() -> None:
    x = normal((7, 130), torch.float32)
    found = torchkiln.quantize(x)
    exact = torchkiln.dequantize(found, torch.float64)
    for dtype in (*DTYPES, torch.float64):
        assert_close(torchkiln.dequantize(found, dtype), exact.to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("power", [-126, 0, 119, 120])
def test_every_number_times_every_kind_of_scale(power: int) -> None:
    """A CPU has a kernel for all dtypes but float64, where torch multiplies."""
    data = torch.arange(256, dtype=torch.uint8).repeat(3, 1).view(torch.float8_e4m3fn)
    rows = torch.tensor([[power, 0], [-9, power], [3, 1]], dtype=torch.float64).exp2().float()
    for one in (
        torchkiln.Quantized(data, rows),
        torchkiln.Quantized(data, rows.T.contiguous().T),
        torchkiln.Quantized(data[None], rows[None]),
        torchkiln.Quantized(data.T.contiguous().T, rows[:1]),  # squares
    ):
        exact = torchkiln.dequantize(one, torch.float64)
        for dtype in DTYPES:
            found = torchkiln.dequantize(one, dtype)
            assert_close(found, exact.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_fake_and_meta_tensors_have_the_layout_of_real_ones() -> None:
    x = normal((3, 5, 300), torch.bfloat16)
    for op in (torch.ops.torchkiln.quantize, torch.ops.torchkiln.quantize_both):
        for real, meta in zip(op(x), op(x.to("meta")), strict=True):
            assert real.shape == meta.shape
            assert real.stride() == meta.stride()
            assert real.dtype == meta.dtype
    ops = torch.ops.torchkiln
    data, scale = ops.quantize(x)
    torch.library.opcheck(ops.quantize.default, (x,))
    for square in (False, True):
        torch.library.opcheck(ops.quantize_both.default, (x, square))
        for real, meta in zip(
            ops.quantize_both(x, square), ops.quantize_both(x.to("meta"), square), strict=True
        ):
            assert real.stride() == meta.stride()
    torch.library.opcheck(ops.quantize_weight.default, (x[0],))
    # Without the check of the schema, which multiplies arguments: torch has no E4M3 product.
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for other in (ops.transpose_quantized.default, ops.dequantize.default):
        torch.library.opcheck(other, (data, scale), test_utils=tests)
    torch.library.opcheck(ops.transpose_quantized.default, (data, scale, True), test_utils=tests)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("square", [False, True])
def test_compiled(*, square: bool, dynamic: bool) -> None:
    def both(x: Tensor) -> tuple[Tensor, ...]:
        rows, transposed = torchkiln.quantize_both(x.sin(), square)
        return rows.data, rows.scale, torchkiln.dequantize(transposed)

    compiled = torch.compile(both, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for rows in (3, 9):
        x = normal((rows, 200), torch.float32)
        for found, expected in zip(compiled(x), both(x), strict=True):
            assert torch.equal(found.float(), expected.float())
            assert found.stride() == expected.stride()


def test_results_have_no_gradient_but_a_source() -> None:
    x = normal((4, 130), torch.float32).requires_grad_()
    found = torchkiln.quantize(x)
    assert found.source is x
    assert not found.data.requires_grad
    assert not torch.ops.torchkiln.quantize(x)[0].requires_grad
    with torch.no_grad():
        assert torchkiln.quantize(x).source is None


def test_errors() -> None:
    x = normal((4, 130), torch.float32)
    found = torchkiln.quantize(x)
    with pytest.raises(RuntimeError, match="quantize: x: got dtype float64, expected one of"):
        torchkiln.quantize(x.double())
    with pytest.raises(RuntimeError, match="x: got a 0-dimensional tensor, expected at least 1"):
        torchkiln.quantize_both(x[0, 0])
    with pytest.raises(RuntimeError, match=r"weight: got shape \[130\], expected \[n, k\]"):
        torchkiln.quantize_weight(x[0])
    with pytest.raises(RuntimeError, match="data: got dtype float32, expected float8_e4m3fn"):
        torchkiln.dequantize(torchkiln.Quantized(x, found.scale))
    with pytest.raises(RuntimeError, match=r"scale: got shape \[4, 1\], expected \[4, 2\]"):
        torchkiln.transpose_quantized(torchkiln.Quantized(found.data, found.scale[:, :1]))
    with pytest.raises(NotImplementedError, match=r"quantize: got a transform of torch\.func"):
        torch.func.vmap(torch.ops.torchkiln.quantize)(x)


def test_cache_refuses_what_has_no_version() -> None:
    with torch.inference_mode():
        weight = torch.nn.Parameter(torch.ones(3, 4))
    assert WeightCache().of(weight) is None
    assert WeightCache().of(torch.ones(3, 4)) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_more_than_2_to_the_31_elements() -> None:
    rows, columns = 2**20 + 3, 2176
    x = torch.randn(1, columns, device="cuda", dtype=torch.bfloat16).expand(rows, columns)
    found = torchkiln.quantize(x)
    first = torchkiln.quantize(x[:1])
    assert (found.data.view(torch.uint8) == first.data.view(torch.uint8)).all()
    assert (found.scale == first.scale).all()
    turned = torchkiln.transpose_quantized(found)
    # The last three rows form a block.
    last = torchkiln.Quantized(turned.data[:, -3:], turned.scale[:, -1:])
    assert (torchkiln.dequantize(last) == torchkiln.dequantize(first).T).all()

"""conv_bn_act and its modules: errors from float64, renewed folds, and which kernels run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from convolutions import close, conv_bn_act, count, exact, layer, moved, notes
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import torchkiln
from torchkiln.ops import _folding
from torchkiln.ops._conv_routes import (
    ACTS,
    APART,
    CUDNN,
    PRODUCT,
    STEPS,
    Geometry,
    Route,
    by_product,
    choose,
)
from torchkiln.typing import Activation

LAST = torch.channels_last
RANKS: list[tuple[type[Any], type[Any], type[Any], tuple[int, ...]]] = [
    (torchkiln.nn.ConvBNAct1d, nn.Conv1d, nn.BatchNorm1d, (3, 8, 11)),
    (torchkiln.nn.ConvBNAct2d, nn.Conv2d, nn.BatchNorm2d, (3, 8, 9, 7)),
    (torchkiln.nn.ConvBNAct3d, nn.Conv3d, nn.BatchNorm3d, (2, 8, 5, 4, 6)),
]

pytestmark = pytest.mark.usefixtures("no_folds")


@pytest.mark.parametrize("memory", [torch.contiguous_format, LAST])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("act", ACTS)
@torch.no_grad()
def test_eval_is_the_formula(
    device: torch.device, act: Activation, dtype: torch.dtype, memory: Any, *, residual: bool
) -> None:
    for kernel in (1, 3):
        module = layer(device, dtype, act=act, kernel_size=kernel, padding=kernel // 2)
        x = torch.randn(2, 8, 6, 5, device=device, dtype=dtype).contiguous(memory_format=memory)
        added = None
        if residual:
            added = torch.randn(2, 16, 6, 5, device=device, dtype=dtype)
        found = module(x, added)
        assert found.dtype == dtype
        convolved = module.conv(x)  # as torch's float64 result has another layout on a GPU
        for other in (torch.contiguous_format, LAST):
            assert found.is_contiguous(memory_format=other) == convolved.is_contiguous(
                memory_format=other
            )
        close(found, exact(module, x, added))
        assert torch.equal(module(x, added), found)


GEOMETRIES: list[dict[str, Any]] = [
    {"stride": 2, "padding": 0},
    {"dilation": 2, "padding": 2},
    {"padding": "same"},
    {"padding": "valid"},
    {"padding": "same", "kernel_size": 2},
    {"groups": 4, "bias": True},
    {"groups": 8},
    {"padding_mode": "reflect"},
    {"padding_mode": "circular", "padding": 2},
    {"padding_mode": "replicate", "padding": "same", "kernel_size": 2},
    {"bias": True, "kernel_size": 1, "padding": 0},
]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("options", GEOMETRIES, ids=str)
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_geometries_in_both_modes(device: torch.device, rank: int, options: Any) -> None:
    cls, _, _, shape = RANKS[rank - 1]
    settings = {"kernel_size": 3, "padding": 1, "bias": False, **options}
    module = cls(8, 16, **settings)
    moved(module.bn)
    module.to(device)
    x = torch.randn(shape, device=device)
    for training in (True, False):
        module.train(training)
        reference = copy.deepcopy(module).double()
        expected = torch.relu(reference.bn(reference.conv(x.double())))
        close(module(x), expected)
        close(module.bn.running_var, reference.bn.running_var)
        with torch.no_grad():
            close(module.eval()(x), exact(module, x))
            residual = torch.randn_like(module(x))
            close(module(x, residual), exact(module, x, residual))


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_the_function_has_the_settings_of_torchs_convolution(device: torch.device) -> None:
    x = torch.randn(2, 6, 9, 9, device=device)
    weight = nn.Parameter(torch.randn(4, 3, 3, 2, device=device))
    vectors = [torch.rand(4, device=device) + 0.5 for _ in range(5)]
    for settings in (
        {"stride": (2, 1), "padding": (1, 0), "dilation": 1, "groups": 2},
        {"stride": [2], "padding": "valid", "groups": 2},
        {"padding": "same", "dilation": (2, 3), "groups": 2},
    ):
        options: Any = settings
        y = F.conv2d(x.double(), weight.double(), vectors[0].double(), **options)
        _, w, b, m, v = (t.double() for t in vectors)
        expected = F.silu(F.batch_norm(y, m, v, w, b, eps=0.1))
        close(conv_bn_act(x, weight, *vectors, act="silu", eps=0.1, **settings), expected)
        plain = conv_bn_act(x, weight.detach(), *vectors, act="silu", eps=0.1, **settings)
        close(plain, expected)
    assert count() == (device.type == "cpu")  # in groups with silu, a GPU has no fused kernel


def test_training_moves_the_statistics_and_has_torchs_gradients(device: torch.device) -> None:
    module = layer(device, torch.float64, bias=True).train()
    reference = copy.deepcopy(module)
    x, residual = (
        torch.randn(3, c, 6, 6, device=device, dtype=torch.float64, requires_grad=True)
        for c in (8, 16)
    )
    y = module(x, residual)
    expected = torch.relu(reference.bn(reference.conv(x)) + residual)
    torch.testing.assert_close(y, expected)
    found = torch.autograd.grad(y.square().sum(), [x, residual, *module.parameters()])
    wanted = torch.autograd.grad(expected.square().sum(), [x, residual, *reference.parameters()])
    torch.testing.assert_close(found, wanted, atol=1e-8, rtol=1e-7)
    torch.testing.assert_close(list(module.buffers()), list(reference.buffers()))


def test_gradients_in_eval_mode(device: torch.device) -> None:
    """Gradients and forward derivatives agree with torch in eval mode, for any wanted tensors."""
    module = layer(device, torch.float64, act="silu")
    x = torch.randn(2, 8, 5, 5, device=device, dtype=torch.float64)

    def torchs(x: Tensor) -> Tensor:
        return F.silu(module.bn(module.conv(x)))

    with torch.no_grad():
        module(x)
    parameters = list(module.parameters())
    found = torch.autograd.grad(module(x).square().sum(), parameters)
    torch.testing.assert_close(found, torch.autograd.grad(torchs(x).square().sum(), parameters))
    module.requires_grad_(False)
    leaf = x.clone().requires_grad_()
    assert torch.autograd.grad(module(leaf).sum(), leaf)[0].abs().sum() > 0
    tangents = [torch.func.jvp(f, (x,), (x,)) for f in (module, torchs)]
    torch.testing.assert_close(*tangents)
    torch.testing.assert_close(torch.func.vmap(module)(x[None]), torchs(x)[None])
    assert not count()


Fold, Form, Parts = _folding.Fold, _folding.Form, _folding.Parts
GEOMETRY = Geometry((1, 1), (0, 0), (1, 1), 1)
STRIDED, PADDED = GEOMETRY._replace(stride=(2, 2)), GEOMETRY._replace(padding=(1, 1))
CALLS: list[tuple[str, int, Geometry, str, torch.dtype, Route]] = [
    ("relu", 3, GEOMETRY, "", torch.bfloat16, CUDNN),
    ("relu", 3, GEOMETRY, "residual", torch.bfloat16, CUDNN),
    ("relu", 3, GEOMETRY, "planes", torch.bfloat16, APART),
    ("relu", 3, GEOMETRY, "planes", torch.float32, CUDNN),
    ("relu", 1, GEOMETRY, "", torch.float32, CUDNN),
    ("relu", 1, STRIDED, "", torch.bfloat16, CUDNN),
    ("relu", 3, GEOMETRY, "12", torch.bfloat16, CUDNN),
    ("relu", 3, GEOMETRY, "12 residual", torch.bfloat16, APART),
    ("relu", 3, GEOMETRY, "12 residual", torch.float32, CUDNN),
    ("relu", 3, GEOMETRY, "10", torch.bfloat16, APART),
    ("relu", 3, GEOMETRY._replace(groups=2), "", torch.bfloat16, CUDNN),
    ("relu", 3, GEOMETRY._replace(groups=8), "", torch.bfloat16, APART),
    ("relu", 3, GEOMETRY._replace(padding="same"), "", torch.bfloat16, APART),
    ("relu", 3, GEOMETRY, "", torch.float64, APART),
    ("silu", 3, GEOMETRY, "", torch.bfloat16, APART),
    ("silu", 1, GEOMETRY, "", torch.bfloat16, PRODUCT),
    ("silu", 1, GEOMETRY, "residual", torch.bfloat16, APART),
    ("none", 1, GEOMETRY, "residual", torch.float16, PRODUCT),
    ("none", 1, STRIDED, "", torch.bfloat16, APART),
    ("none", 1, PADDED, "", torch.bfloat16, APART),
    ("none", 1, GEOMETRY, "planes", torch.bfloat16, APART),
    ("none", 1, GEOMETRY, "", torch.float32, APART),
]


@pytest.mark.parametrize(("act", "size", "geometry", "more", "dtype", "route"), CALLS)
def test_the_rule(
    act: Activation,
    size: int,
    geometry: Geometry,
    more: str,
    dtype: torch.dtype,
    route: Route,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class OnGpu(Tensor):
        is_cuda = True

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    x = torch.randn(2, 8, 6, 6, dtype=dtype)
    x = x if more == "planes" else x.contiguous(memory_format=LAST)
    channels = next((int(word) for word in more.split() if word.isdigit()), 8)
    weight = torch.randn(channels, 8 // geometry.groups, size, size, dtype=dtype)
    residual = "residual" in more
    found, why = choose(x.as_subclass(OnGpu), weight, geometry, act, has_residual=residual)
    assert found is route, why
    assert choose(x, weight, geometry, act, has_residual=residual)[0] is STEPS


@torch.no_grad()
def test_the_product_is_the_convolution(device: torch.device) -> None:
    """The product agrees with the convolution on every device, though only GPUs choose it."""
    x = torch.randn(2, 8, 6, 5, device=device).contiguous(memory_format=LAST)
    module = layer(device, kernel_size=1, padding=0, act="none")
    parts = Parts(module.conv.weight, None, *list(module.bn.state_dict().values())[:4])
    fold = Fold(None, parts, Form(module.bn.eps, torch.float32, LAST))
    expected = exact(module, x)
    residual = torch.randn_like(expected, dtype=torch.float32)
    close(by_product(x, fold, None, GEOMETRY, "none"), expected)
    close(by_product(x, fold, residual, GEOMETRY, "none"), expected + residual)


@pytest.mark.cuda
@torch.no_grad()
def test_cudnn_that_refuses_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    device, asked = torch.device("cuda:0"), []

    def refuse(*_: Any) -> Tensor:
        asked.append(1)
        raise RuntimeError("no engine")

    monkeypatch.setattr(torch, "cudnn_convolution_relu", refuse)
    module, x = layer(device), torch.randn(2, 8, 5, 5, device=device)
    for _ in range(2):
        close(module(x), exact(module, x))
    assert len(asked) == 1
    assert notes(module, x)[0].endswith("cuDNN refused the fused call: no engine")


@pytest.mark.cuda
@torch.no_grad()
def test_odd_channels_nan_and_streams() -> None:
    device = torch.device("cuda:0")
    for channels, out in ((3, 64), (17, 5), (1, 1)):
        module = torchkiln.nn.ConvBNAct2d(channels, out, 3, padding=1)
        moved(module.bn)
        module.to(device, torch.bfloat16).eval()
        x = torch.randn(2, channels, 9, 9, device=device, dtype=torch.bfloat16)
        for each in (x, x.contiguous(memory_format=LAST)):
            close(module(each), exact(module, each))
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                other = module(each)
            stream.synchronize()
            assert torch.equal(other, module(each))
    x[0, 0, 4, 4] = float("nan")
    assert module(x).isnan().any()


@pytest.mark.cuda
@torch.no_grad()
def test_a_captured_graph_reads_the_parameters() -> None:
    device = torch.device("cuda:0")
    module, x = layer(device), torch.randn(2, 8, 5, 5, device=device)
    module(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = module(x)
    module.conv.weight.mul_(2)
    graph.replay()
    close(y, exact(module, x))


@pytest.mark.parametrize("enabled", [False, True])
@torch.no_grad()
def test_autocast(device: torch.device, *, enabled: bool) -> None:
    module, x = layer(device), torch.randn(2, 8, 5, 5, device=device)
    with torch.autocast(device.type, torch.bfloat16, enabled=enabled):
        found = module(x)
        residual = torch.randn_like(found)
        added = module(x, residual)
        wide = module(x, residual.double())  # runs as three steps
    assert found.dtype == (torch.bfloat16 if enabled else torch.float32)
    close(found, exact(module, x))
    close(added, exact(module, x, residual))
    close(wide, exact(module, x, residual), found.dtype)


@pytest.mark.parametrize("training", [False, True])
def test_compiled_without_a_break(device: torch.device, *, training: bool) -> None:
    module, x = layer(device).train(training), torch.randn(2, 8, 5, 5, device=device)
    expected = copy.deepcopy(module)(x)
    torch.compiler.reset()
    compiled: Any = torch.compile(module, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), expected.detach())
        assert not count()
        if not training:
            module(x)
            module.conv.weight.mul_(2)
            close(compiled(x), exact(module, x))


def test_exported() -> None:
    module, x = layer(torch.device("cpu")), torch.randn(2, 8, 5, 5)
    program = torch.export.export(module, (x,))
    close(program.module()(x), exact(module, x).detach())
    assert any("bn_act" in str(node.target) for node in program.graph.nodes)


@torch.no_grad()
def test_a_step_of_other_parameters_keeps_the_fold(device: torch.device) -> None:
    module, x = layer(device), torch.randn(2, 8, 5, 5, device=device)
    module(x)
    other = nn.Parameter(torch.ones(3, device=device))
    other.grad = torch.ones_like(other)
    torch.optim.SGD([other], 0.1).step()
    assert count() == 1
    torch.optim.SGD([other, module.bn.weight], 0.1).step()
    assert not count()


def test_a_compiled_optimizer() -> None:
    """Steps of a compiled optimizer compile once and renew the fold."""
    module, x = layer(torch.device("cpu")), torch.randn(1, 8, 5, 5)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD(module.parameters(), 0.5)
    torch.compiler.reset()
    step: Any = torch.compile(optimizer.step, backend="aot_eager")
    for _ in range(3):
        with torch.no_grad():
            close(module(x), exact(module, x))
            assert count() == 1
        with torch._dynamo.config.patch(error_on_recompile=True):
            step()


@torch.no_grad()
def test_made_from_modules(device: torch.device) -> None:
    x = torch.randn(2, 8, 5, 5, device=device)
    conv, bn = nn.Conv2d(8, 6, 3), moved(nn.BatchNorm2d(6))
    module: Any = torchkiln.nn.ConvBNAct2d.from_modules(conv, bn, act="tanh").to(device).eval()
    assert module.conv is conv
    assert list(module.state_dict())[:3] == ["conv.weight", "conv.bias", "bn.weight"]
    close(module(x), exact(module, x))
    vars(conv).update(stride=[2, 2], padding=1)  # torch accepts a list and a number
    close(module(x), exact(module, x))
    transposed: Any = torchkiln.nn.ConvBNAct2d.from_modules(
        nn.ConvTranspose2d(8, 6, 3, stride=2), moved(nn.BatchNorm2d(6))
    )
    transposed.to(device).eval()
    close(transposed(x), exact(transposed, x))
    sync: Any = torchkiln.nn.ConvBNAct2d.from_modules(conv, nn.SyncBatchNorm(6)).to(device).eval()
    close(sync(x), exact(sync, x))
    with pytest.raises(
        TypeError, match=r"ConvBNAct2d.from_modules: bn: got ReLU, expected a batch"
    ):
        torchkiln.nn.ConvBNAct2d.from_modules(conv, nn.ReLU())  # type: ignore[arg-type]


@torch.no_grad()
def test_hooks_and_parametrizations_run(device: torch.device) -> None:
    x = torch.randn(2, 8, 5, 5, device=device)
    for name in ("conv", "bn"):
        seen: list[int] = []
        module = layer(device)
        module.get_submodule(name).register_forward_hook(lambda *_, seen=seen: seen.append(1))
        close(module(x), exact(module, x))
        assert seen
        assert not count()
    module = layer(device)
    nn.utils.parametrizations.weight_norm(module.conv)
    close(module(x), exact(module, x))
    module = layer(device)
    module.conv.forward = lambda x: F.conv2d(x, module.conv.weight * 0, padding=1)
    close(module(x), torch.relu(module.bn(torch.zeros(2, 16, 5, 5, device=device))))


def test_momentum_none_and_no_statistics(device: torch.device) -> None:
    conv, bn = nn.Conv2d(8, 6, 3), nn.BatchNorm2d(6, momentum=None)
    module: Any = torchkiln.nn.ConvBNAct2d.from_modules(conv, bn).to(device)
    reference = copy.deepcopy(module)
    for _ in range(3):
        x = torch.randn(2, 8, 5, 5, device=device)
        close(module(x), torch.relu(reference.bn(reference.conv(x))))
    close(module.bn.running_mean, reference.bn.running_mean)
    bare: Any = torchkiln.nn.ConvBNAct2d.from_modules(
        conv, nn.BatchNorm2d(6, track_running_stats=False)
    )
    bare.to(device).eval()
    with torch.no_grad():
        close(bare(x), exact(bare, x))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"act": "elu"}, r"act: got 'elu', expected one of none, square"),
    ({"x": torch.randn(8, 5)}, r"x: got shape \[8, 5\], expected \[batch, channels, \.\.\.\]"),
    ({"x": torch.randn(2, 8, 5)}, r"conv_weight: got shape \[4, 8, 3, 3\], expected 3 dimensions"),
    ({"bn_weight": torch.ones(5)}, r"bn_weight: got shape \[5\], expected \[4\]"),
    ({"running_mean": None}, r"running_mean: got None, expected a tensor in eval mode"),
    ({"running_var": None, "training": True}, r"running_var: got None, expected a tensor, as"),
    ({"residual": torch.randn(2, 4, 5, 5)}, r"residual: got shape \[2, 4, 5, 5\], expected \[2, 4"),
    ({"residual": torch.randn(2, 4, 3, 3).double()}, r"residual: got dtype float64, expected"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=lambda v: next(iter(v), ""))
@torch.no_grad()
def test_refused_calls(change: dict[str, Any], message: str) -> None:
    call: dict[str, Any] = {
        "x": torch.randn(2, 8, 5, 5),
        "conv_weight": nn.Parameter(torch.randn(4, 8, 3, 3)),
        "running_mean": torch.zeros(4),
        "running_var": torch.ones(4),
    }
    conv_bn_act(**call)
    with pytest.raises(ValueError, match=rf"torchkiln\.conv_bn_act: {message}"):
        conv_bn_act(**{**call, **change})


@torch.no_grad()
def test_tensors_that_are_not_folded() -> None:
    """Results of meta, fake and subclass tensors have torch's shapes and classes."""
    meta = layer(torch.device("cpu")).to("meta")
    assert meta(torch.empty(2, 8, 5, 5, device="meta")).shape == (2, 16, 5, 5)
    module = layer(torch.device("cpu"))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        found = module(mode.from_tensor(torch.randn(2, 8, 5, 5)))
    assert found.shape == (2, 16, 5, 5)
    assert not count()


@torch.no_grad()
def test_torch_refuses_wrong_convolutions() -> None:
    weight, statistics = nn.Parameter(torch.randn(4, 8, 3, 3)), (torch.zeros(4), torch.ones(4))
    for x in (torch.randn(2, 7, 5, 5), torch.randn(2, 8, 5, 5).double()):
        with pytest.raises(RuntimeError):
            conv_bn_act(x, weight, None, None, None, *statistics)
    empty = conv_bn_act(torch.randn(0, 8, 5, 5), weight, None, None, None, *statistics)
    assert empty.shape == (0, 4, 3, 3)

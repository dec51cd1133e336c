"""mlp and gated_mlp beyond the contract: memory, subsets of gradients, graphs, modules."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import torchkiln
from torchkiln.typing import Saved

OPS: dict[str, Callable[..., Tensor]] = {"mlp": torchkiln.mlp, "gated_mlp": torchkiln.gated_mlp}
both = pytest.mark.parametrize("name", OPS)
each_save = pytest.mark.parametrize("save", ["preact", "none"])


def tensors(name: str, device: torch.device, rows: int = 9) -> list[Tensor]:
    """x, weights and biases, which require gradients."""
    hidden = 7
    width = 2 * hidden if name == "gated_mlp" else hidden
    sizes: list[tuple[int, ...]] = [(rows, 5), (width, 5), (6, hidden), (width,), (6,)]
    return [torch.randn(size, device=device).double().requires_grad_() for size in sizes]


def expected(name: str, *args: Tensor) -> Tensor:
    """The op with its default activation, in torch's ops."""
    x, up, down, up_bias, down_bias = args
    z = F.linear(x, up, up_bias)
    if name == "mlp":
        return F.linear(F.gelu(z), down, down_bias)
    gate, value = z.chunk(2, -1)
    return F.linear(F.silu(gate) * value, down, down_bias)


@both
@each_save
def test_any_subset_of_gradients(device: torch.device, name: str, save: str) -> None:
    """For every subset of wanted gradients, they equal torch's."""
    given = tensors(name, device)
    grad = torch.randn(9, 6, device=device).double()
    truth = torch.autograd.grad(expected(name, *given), given, grad)
    for count in range(1, 6):
        for wanted in itertools.combinations(range(5), count):
            leaves = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(given)]
            inputs = [leaves[i] for i in wanted]
            found = torch.autograd.grad(OPS[name](*leaves, save=save), inputs, grad)
            for i, gradient in zip(wanted, found, strict=True):
                torch.testing.assert_close(gradient, truth[i])
    out = OPS[name](*given, save=save)
    for i, leaf in enumerate(given):
        (one,) = torch.autograd.grad(out, leaf, grad, retain_graph=True)
        torch.testing.assert_close(one, truth[i])


@each_save
def test_gradients_of_many_elements(device: torch.device, save: Saved) -> None:
    """Gradients of large layers equal torch's; a GPU computes act and its slope in one pass."""
    x, up, down = (torch.randn(s, device=device).double() for s in ((4100, 24), (80, 24), (6, 80)))
    grad = torch.randn(4100, 6, device=device).double()
    leaves = [t.requires_grad_() for t in (x, up, down)]
    truth = torch.autograd.grad(F.linear(F.gelu(F.linear(x, up)), down), leaves, grad)
    found = torch.autograd.grad(torchkiln.mlp(*leaves, act="gelu", save=save), leaves, grad)
    torch.testing.assert_close(found, truth)


@both
def test_what_is_kept(device: torch.device, name: str) -> None:
    """The argument of the activation is the only hidden tensor saved; none with save="none"."""
    given = tensors(name, device)
    sizes = {t.shape for t in given}
    for save, count in (("preact", 1), ("none", 0)):
        kept: list[torch.Size] = []

        def pack(tensor: Tensor, into: list[torch.Size] = kept) -> Tensor:
            into.append(tensor.shape)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            OPS[name](*given, save=save)
        assert len([shape for shape in kept if shape not in sizes]) == count


@both
@each_save
def test_tensors_of_hooks_are_not_overwritten(device: torch.device, name: str, save: str) -> None:
    """Backward does not overwrite a saved tensor that a hook has packed."""
    given = tensors(name, device)
    held: list[tuple[Tensor, Tensor]] = []

    def pack(tensor: Tensor) -> Tensor:
        held.append((tensor, tensor.detach().clone()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = OPS[name](*given, save=save)
    out.sum().backward()
    assert held
    for tensor, before in held:
        assert torch.equal(tensor, before)


@both
@each_save
def test_a_graph_that_is_used_again(device: torch.device, name: str, save: Saved) -> None:
    """Three backwards through a graph are equal; the last one may overwrite saved tensors."""
    given = tensors(name, device)
    out = OPS[name](*given, save=save)
    grad = torch.randn_like(out)
    passes = [torch.autograd.grad(out, given, grad, retain_graph=i < 2) for i in range(3)]
    for again in passes[1:]:
        for one, other in zip(passes[0], again, strict=True):
            assert torch.equal(one, other)


@pytest.mark.cuda
@each_save
def test_gradients_take_the_place_of_the_hidden_layer(save: Saved) -> None:
    """Gradients use the memory of the hidden layer: no second tensor of its size is allocated."""
    rows, dim, hidden = 4096, 64, 512
    x, up, down = (
        torch.randn(size, device="cuda").bfloat16().requires_grad_()
        for size in ((rows, dim), (2 * hidden, dim), (dim, hidden))
    )
    grad = torch.randn(rows, dim, device="cuda").bfloat16()
    # The first call allocates cuBLAS's workspace.
    torch.autograd.grad(torchkiln.gated_mlp(x, up, down, save=save), (x, up, down), grad)
    out = torchkiln.gated_mlp(x, up, down, save=save)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(out, (x, up, down), grad)
    layer = rows * hidden * 2  # bytes
    more = torch.cuda.max_memory_allocated() - before
    assert more < (1.5 if save == "preact" else 3.5) * layer


@pytest.mark.cuda
@each_save
@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_gate_in_the_epilogue(dtype: torch.dtype, act: str, save: str) -> None:
    """Sizes for which an H100 fuses the gate: two full rounds of tiles, cut in rows and columns."""
    rows, dim, hidden, outputs = 4200, 1024, 1920, 2048
    sizes = [(rows, dim), (2 * hidden, dim), (outputs, hidden), (2 * hidden,), (outputs,)]
    given = [(torch.randn(size, device="cuda") / size[-1] ** 0.25).to(dtype) for size in sizes]
    given[0] = torch.randn(rows, dim + 8, device="cuda").to(dtype)[:, :dim]
    leaves = [tensor.requires_grad_() for tensor in given]
    grad = torch.randn(rows, outputs, device="cuda").to(dtype)
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    }

    def by_torch(*args: Tensor) -> Tensor:
        x, up, down, up_bias, down_bias = args
        gates, ups = F.linear(x, up, up_bias).chunk(2, -1)
        return F.linear(functions[act](gates) * ups, down, down_bias)

    def results(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
        return [out, *torch.autograd.grad(out, inputs, grad.to(out.dtype))]

    gated_mlp: Any = torchkiln.gated_mlp
    found = results(gated_mlp(*leaves, act=act, save=save), leaves)
    theirs = results(by_torch(*leaves), leaves)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    truth = results(by_torch(*wide), wide)
    for ours, other, right in zip(found, theirs, truth, strict=True):
        assert (ours.double() - right).norm() <= 1.1 * (other.double() - right).norm()
    again = results(gated_mlp(*leaves, act=act, save=save), leaves)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
    with torch.no_grad():
        assert torch.equal(gated_mlp(*leaves, act=act, save=save), found[0])
    if torch.cuda.get_device_capability() == (9, 0):
        told = torchkiln.explain(gated_mlp, *leaves, act=act, save=save)
        assert "product and gate by sm90" in told.forward.notes
        assert told.backward is not None
        assert "product and gate by sm90" in told.backward.notes


@pytest.mark.cuda
def test_a_gate_beside_weights_without_gradients() -> None:
    """Without gradients of weights, backward needs no hidden layer, only its gradient."""
    rows, dim, hidden = 4224, 512, 2048
    x = torch.randn(rows, dim, device="cuda").bfloat16().requires_grad_()
    up, down = (
        (torch.randn(size, device="cuda") / size[-1] ** 0.5).bfloat16()
        for size in ((2 * hidden, dim), (dim, hidden))
    )
    grad = torch.randn(rows, dim, device="cuda").bfloat16()
    (found,) = torch.autograd.grad(torchkiln.gated_mlp(x, up, down), x, grad)
    weights = [up.clone().requires_grad_(), down.clone().requires_grad_()]
    both = torch.autograd.grad(torchkiln.gated_mlp(x, *weights), [x, *weights], grad)
    truth_of = x.detach().double().requires_grad_()
    gates, ups = F.linear(truth_of, up.double()).chunk(2, -1)
    out = F.linear(F.silu(gates) * ups, down.double())
    (truth,) = torch.autograd.grad(out, truth_of, grad.double())
    for one in (found, both[0]):
        assert (one.double() - truth).norm() <= 0.01 * truth.norm()


@pytest.mark.parametrize("act", ["relu", "none", "square", "tanh"])
@each_save
def test_activations_with_other_derivatives(device: torch.device, act: str, save: str) -> None:
    """Activations whose derivative reads the output, the argument or nothing agree with torch."""
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "relu": torch.relu,
        "none": lambda z: z,
        "square": torch.square,
        "tanh": torch.tanh,
    }
    given = tensors("mlp", device)
    found = OPS["mlp"](*given, act=act, save=save)
    x, up, down, up_bias, down_bias = given
    truth = F.linear(functions[act](F.linear(x, up, up_bias)), down, down_bias)
    torch.testing.assert_close(found, truth)
    grad = torch.randn_like(found)
    for one, other in zip(
        torch.autograd.grad(found, given, grad),
        torch.autograd.grad(truth, given, grad),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@both
@each_save
def test_expanded_gradients(device: torch.device, name: str, save: str) -> None:
    """Incoming gradients with strides of 0, as of sum(), give torch's gradients."""
    given = tensors(name, device)
    found = torch.autograd.grad(OPS[name](*given, save=save).sum(), given)
    truth = torch.autograd.grad(expected(name, *given).sum(), given)
    for one, other in zip(found, truth, strict=True):
        torch.testing.assert_close(one, other)


@both
@each_save
def test_second_gradients(device: torch.device, name: str, save: str) -> None:
    given = tensors(name, device, rows=3)
    assert torch.autograd.gradgradcheck(lambda *args: OPS[name](*args, save=save), given)


@both
def test_saving_nothing_costs_a_product(name: str) -> None:
    """Forward has 2 products, backward 4; with save="none" 5, as the hidden layer is recomputed."""
    given = tensors(name, torch.device("cpu"))
    x, up, down = given[:3]
    first, second = 2 * x.shape[0] * up.numel(), 2 * x.shape[0] * down.numel()
    for save, more in (("preact", 0), ("none", first)):
        with FlopCounterMode(display=False) as counter:
            OPS[name](*given, save=save).sum().backward()
        assert counter.get_total_flops() == 3 * (first + second) + more
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            OPS[name](*given, save=save)
        assert counter.get_total_flops() == first + second


@both
def test_a_compiled_step(name: str) -> None:
    """Gradients through torch.compile equal torch's."""
    given = tensors(name, torch.device("cpu"))
    torch.compiler.reset()
    compiled = torch.compile(OPS[name], fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(*given).square().sum(), given)
    truth = torch.autograd.grad(expected(name, *given).square().sum(), given)
    for one, other in zip(found, truth, strict=True):
        torch.testing.assert_close(one, other)


def test_modules(device: torch.device) -> None:
    """Modules load the state_dicts of torch's layers."""
    x = torch.randn(2, 3, 8, device=device)
    ours = torchkiln.nn.MLP(8, device=device)
    assert [tuple(p.shape) for p in ours.parameters()] == [(32, 8), (32,), (8, 32), (8,)]
    torchs = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)).to(device)
    names = {"0": "up", "2": "down"}
    ours.load_state_dict({names[k[0]] + k[1:]: v for k, v in torchs.state_dict().items()})
    torch.testing.assert_close(ours(x), torchs(x))
    gated = torchkiln.nn.GatedMLP(8, 12, 5, device=device)
    gate, up = (nn.Linear(8, 12, bias=False).to(device) for _ in range(2))
    gated.gate_up.weight.data.copy_(torch.cat([gate.weight, up.weight]))
    torch.testing.assert_close(gated(x), F.linear(F.silu(gate(x)) * up(x), gated.down.weight))
    assert repr(gated).startswith("GatedMLP(\n  act='silu', save='preact'\n  (gate_up): Linear(")


@pytest.mark.parametrize(
    ("make", "given", "words"),
    [
        (torchkiln.nn.MLP, {"act": "swish"}, r"nn\.MLP: act: got 'swish', expected one of none"),
        (torchkiln.nn.MLP, {"save": "fp8"}, r"nn\.MLP: save: got 'fp8', expected one of preact"),
        (torchkiln.nn.GatedMLP, {"act": "relu"}, r"nn\.GatedMLP: act: got 'relu', expected one of"),
    ],
)
def test_modules_refuse_other_options(
    make: Callable[..., nn.Module], given: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        make(8, 8, **given)

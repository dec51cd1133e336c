"""torchkiln.jit.elementwise: formulas, their derivatives, and the ops created from them."""

from __future__ import annotations

import gc
import itertools
import re
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from torchkiln import jit
from torchkiln.jit import elementwise_op
from torchkiln.jit.call.layout import broadcast, divisor, layout, merge_dimensions
from torchkiln.jit.compile import toolkit
from torchkiln.jit.formula.expression import (
    Call,
    Name,
    Node,
    compute,
    cuda_of,
    magnitude,
    parse,
    slope,
)
from torchkiln.jit.formula.functions import FUNCTIONS, NAMED
from torchkiln.jit.formula_kernel import FormulaKernel
from torchkiln.testing import Case
from torchkiln.testing.fuzz import Plan, check_call, plans

FUSED = jit.elementwise("relu(x * scale + bias)", "x, bias, scale=0.5", name="fused")
SPEC = FUSED.spec()
NUMERIC = sorted(name for name, f in FUNCTIONS.items() if not f.condition and name != "where")
POSITIVE = {"sqrt", "rsqrt", "log", "log1p", "pow", "div"}


@pytest.mark.contract([SPEC])
def test_contract(contract_case: Case) -> None:
    contract_case.run()


@settings(max_examples=25, derandomize=True, database=None, deadline=None)
@given(plans(SPEC))
def test_any_call(plan: Plan) -> None:
    check_call(SPEC, plan, torch.device("cpu"))


def node_of(name: str) -> Call:
    """A call of the function with as many of x, y, z as it has arguments."""
    return Call(name, tuple(Name(letter) for letter in "xyz"[: FUNCTIONS[name].arity]))


@pytest.mark.parametrize("name", NUMERIC)
def test_derivatives_equal_torchs(name: str) -> None:
    low = 0.1 if name in POSITIVE else -2.0
    equals = torch.cartesian_prod(*[torch.tensor([0.5, 1, 1.5], dtype=torch.float64)] * 3)
    values = {
        letter: torch.cat([torch.empty(500).double().uniform_(low, 2), equal]).requires_grad_()
        for letter, equal in zip("xyz"[: FUNCTIONS[name].arity], equals.T, strict=False)
    }
    result = compute(node_of(name), values, torch.float64, "cpu")
    expected = torch.autograd.grad(
        result.sum(), list(values.values()), allow_unused=True, materialize_grads=True
    )
    size = compute(magnitude(node_of(name)), values, torch.float64, "cpu")
    assert bool((size >= result.abs() * (1 - 1e-12)).all())
    for letter, gradient in zip(values, expected, strict=True):
        found = compute(slope(node_of(name), letter), values, torch.float64, "cpu")
        torch.testing.assert_close(found.expand(527), gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "quick_gelu", "silu"])
def test_derivatives_are_0_and_1_far_from_zero(name: str) -> None:
    """Derivatives are exactly 0 or 1 where the square or the cube of x overflows."""
    x = torch.tensor([1e10, 1e13, 1e20, 3e38])
    for values, expected in ((x, 1.0), (-x, 0.0)):
        found = compute(slope(node_of(name), "x"), {"x": values}, torch.float32, "cpu")
        assert found.tolist() == [expected] * len(x)


@pytest.mark.parametrize("text", ["x ** 3 - 2 / (1 + exp(-y))", "x if x > y else sin(x * y)"])
def test_chain_rule(text: str) -> None:
    op = jit.elementwise(text)
    x, y = (torch.randn(20, dtype=torch.float64, requires_grad=True) for _ in "xy")
    assert torch.autograd.gradcheck(op, (x, y))
    node = parse(text)
    result = compute(node, {"x": x, "y": y}, torch.float64, "cpu")
    torch.testing.assert_close(op(x, y), result)
    for tensor, gradient in zip("xy", torch.autograd.grad(result.sum(), (x, y)), strict=True):
        found = compute(slope(node, tensor), {"x": x, "y": y}, torch.float64, "cpu")
        torch.testing.assert_close(found, gradient)


@pytest.mark.parametrize(
    ("expression", "arguments", "message"),
    [
        ("relu(x", "", r"elementwise: expression: got 'relu\(x', expected a Python expression"),
        (
            "rleu(x)",
            "",
            r"got function 'rleu' .*; did you mean relu\?\n  abs, clamp, .*\n  maximum, ",
        ),
        ("exp(x, y)", "", "got 2 arguments of exp .*, expected 1"),
        ("max(x, y, z)", "", "got 3 arguments of max .*, expected 2"),
        ("x[0]", "", r"got 'x\[0\]' in"),
        ("x < y", "", "expected a number"),
        ("torch.relu(x)", "", r"got 'torch.relu\(x\)' .* by its name alone:\n  abs, "),
        ("relu(x < y)", "", "got argument 1 of relu in .*, expected a number, not a comparison"),
        ("where(x, y, y)", "", "got argument 1 of where in .*, expected a comparison"),
        ("x", "x, x", r"got 'x, x' \(two arguments have the name x\), expected"),
        ("x * scale", "x", "arguments: got 'x', expected scale among them"),
        ("x * 2", "x: float", "expected at least one tensor"),
        ("x * 2", "*x", "expected names such as"),
        ("", "x", "got expression '' and functor '', expected one of them"),
        ("grad * x", "", r"arguments: got 'grad, x' \(kernels use the name grad themselves\)"),
        ("result0 * x", "x, result0", r"\(kernels use the name result0 themselves\)"),
        ("\u00e9 * 2", "", r"arguments: got '\u00e9' \(\u00e9 is no name that torch's schemas and"),
        ("NoneType * 2", "", "NoneType is no name that torch's schemas and C"),
        ("x * y", "x, y=1e999", "the default of y is inf, not finite"),
        ("x * y", f"x, y=1{'0' * 400}", "too large .*, expected names such as"),
        (f"x * 1{'0' * 400}", "", "expression: got an integer of 401 digits, expected at most"),
        (f"x * -1{'0' * 400}", "", "expression: got an integer of 401 digits, expected at most"),
        ("x" + " + x" * 3000, "", "expression: got a formula of more than 100 levels, expected"),
        ("sin(" * 150 + "x" + ")" * 150, "", "got a formula of more than 100 levels, expected"),
        ("x" + " + x" * 120, "", "got a formula of more than 100 levels, expected"),
    ],
)
def test_wrong_formulas(expression: str, arguments: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jit.elementwise(expression, arguments)


@pytest.mark.parametrize(
    "formula", ["x" + " + x" * 98, "x" + " * x" * 98, "sin(" * 98 + "x" + ")" * 98]
)
def test_the_deepest_formulas(formula: str) -> None:
    """First and second derivatives of the longest formulas do not overflow Python's stack."""
    x = torch.ones(1, dtype=torch.float64, requires_grad=True)
    (slope_of_x,) = torch.autograd.grad(jit.elementwise(formula)(x), x, create_graph=True)
    if slope_of_x.requires_grad:
        slope_of_x.backward()
        assert x.grad is not None


def test_one_op_from_many_threads() -> None:
    """32 threads create and call the same ops, of several formulas, concurrently."""
    start, failures = threading.Barrier(32), []

    def call(thread: int) -> None:
        start.wait()
        for i in range(320):
            number = 1 + i // 10
            try:
                result = jit.elementwise(f"x * {number} + 0.25")(torch.ones(2))
                assert result.tolist() == [number + 0.25] * 2
            except Exception as error:
                failures.append((thread, i, error))

    threads = [threading.Thread(target=call, args=(i,)) for i in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, (len(failures), failures[0])


def test_replaced_ops_are_freed() -> None:
    first = weakref.ref(jit.elementwise("x + 0.5", name="changing"))
    before = len(elementwise_op._made)
    for i in range(20):
        jit.elementwise(f"x + {i}", name="changing")
    assert len(elementwise_op._made) == before
    gc.collect()
    assert first() is None


def test_wrong_gradients() -> None:
    with pytest.raises(ValueError, match=r"gradient: got \['y'\], expected one for each \['x'\]"):
        jit.elementwise("x * 2", gradient={"y": "grad"})
    with pytest.raises(ValueError, match="gradient: got 'z', expected grad and"):
        jit.elementwise("x * 2", gradient={"x": "grad * z"})
    with pytest.raises(ValueError, match="elementwise: gradient: got function 'rleu'"):
        jit.elementwise("x * 2", gradient={"x": "rleu(grad)"})


def test_pythons_max_and_min() -> None:
    op = jit.elementwise("min(max(x, lo), hi)", "x, lo: float, hi: float")
    x = torch.tensor([-2.0, 0.5, 3.0], requires_grad=True)
    y = op(x, -1.0, 1.0)
    assert y.tolist() == [-1.0, 0.5, 1.0]
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0.0, 1.0, 0.0]
    assert parse("max(x, y)") == parse("maximum(x, y)")


def test_the_page_lists_all_functions() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "jit.md"
    listed = re.search(r"```text\n(abs, [^`]*)```", page.read_text(encoding="utf-8"))
    assert listed is not None
    assert tuple(listed[1].replace(",", "").split()) == NAMED


def test_representation_and_wrong_arguments() -> None:
    op = jit.elementwise("clamp(x, lo, hi)", "x, lo: float, hi=1.0", name="clamped")
    assert repr(op).startswith("<torchkiln.jit op torchkiln_jit::clamped(Tensor x, float lo")
    x = torch.ones(3)
    with pytest.raises(TypeError, match=r"clamped: got arguments 2 by position, low, expected at"):
        op(x, 0.0, low=1.0)
    with pytest.raises(TypeError, match="got arguments 4 by position, expected at most x, lo, hi"):
        op(x, 0.0, 1.0, 2.0)


def test_a_replaced_op_raises() -> None:
    first = jit.elementwise("x * 2", name="of_two")
    second = jit.elementwise("x * 3", name="of_two")
    with pytest.raises(RuntimeError, match="of_two: a later op of the same name replaced"):
        first(torch.ones(1))
    assert second(torch.ones(1)).item() == 3
    assert jit.elementwise("x * 2", name="of_two")(torch.ones(1)).item() == 2


def test_wrong_names_and_types() -> None:
    with pytest.raises(ValueError, match="name: got 'two words', expected a Python identifier"):
        jit.elementwise("x * 2", name="two words")
    for name in ("class", "None", "\u00e9", "__init__", "name"):
        with pytest.raises(ValueError, match=f"name: got '{name}', expected a Python identifier"):
            jit.elementwise("x * 2", name=name)
    with pytest.raises(ValueError, match="the type of y is flaot, not float or Tensor"):
        jit.elementwise("x * y", "x, y: flaot")
    assert jit.elementwise("x * y", "x: Tensor, y: float")(torch.ones(1), 2.0).item() == 2


def test_the_same_formula_is_the_same_op() -> None:
    first = jit.elementwise("x * 2 + y")
    assert jit.elementwise("x * 2 + y") is first
    renamed = jit.elementwise("x * 2 + y", name="mine")
    again = jit.elementwise("x * 3 + y", name="mine")  # as if a notebook's cell was changed
    assert renamed is not again
    x = torch.ones(2)
    assert torch.ops.torchkiln_jit.mine(x, x).tolist() == [4, 4]


def test_functor_with_a_reference(tmp_path: Path) -> None:
    (tmp_path / "mine.h").write_text(
        "struct Cube { template <class C> __device__ C operator()(C x, C by) const"
        " { return x * x * x * by; } };\n"
    )
    op = jit.elementwise(
        functor="Cube",
        source=tmp_path / "mine.h",
        arguments="x, by: float",
        reference=lambda x, by: x**3 * by,
    )
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    (gradient,) = torch.autograd.grad(op(x, 2.0).sum(), x)
    assert gradient.tolist() == [6.0, 24.0]
    with pytest.raises(FileNotFoundError, match=r"source: got nowhere\.h"):
        jit.elementwise(functor="A", source="nowhere.h", arguments="x", reference=torch.relu)
    with pytest.raises(ValueError, match="functor: got 'Cube' alone, expected also source, arg"):
        jit.elementwise(functor="Cube")
    if has_nvrtc():
        module = op._kernel_forward.module([torch.float32] * 2, 4, ["vector", "vector"])
        assert module.binary("sm_90a").code.startswith(b"\x7fELF")


def test_a_functor_that_was_saved_is_a_new_op(tmp_path: Path) -> None:
    file = tmp_path / "mine.h"

    def made(text: str) -> jit.Elementwise:
        file.write_text(text)
        return jit.elementwise(functor="F", source=file, arguments="x", reference=torch.relu)

    first = made("struct F {};")
    assert made("struct F {};") is first
    second = made("struct F { int changed; };")
    assert second is not first
    assert first.name != second.name  # both can still be called
    assert first(torch.ones(2)).tolist() == second(torch.ones(2)).tolist() == [1, 1]


def has_nvrtc() -> bool:
    """Whether NVRTC is installed, so that kernels can be compiled."""
    try:
        toolkit.find()
    except RuntimeError:
        return False
    return True


@pytest.mark.skipif(not has_nvrtc(), reason="no NVRTC")
@pytest.mark.parametrize("name", NUMERIC)
def test_functions_compile(name: str) -> None:
    letters = "xyz"[: FUNCTIONS[name].arity]
    results: dict[str, Node] = {"result0_": node_of(name)}
    results |= {f"result{i + 1}_": slope(node_of(name), x) for i, x in enumerate(letters)}
    kernel = FormulaKernel(letters, [], cuda_of(results))
    for dtype in (torch.float64, torch.bfloat16):
        dtypes = [dtype] * (len(results) + len(letters))
        kernel.module(dtypes, 16 // dtype.itemsize, ["vector"] * len(dtypes))


@pytest.mark.skipif(not has_nvrtc(), reason="no NVRTC")
def test_infinite_constants_compile() -> None:
    body = cuda_of({"result0_": parse("clamp(x, -1e999, 1e999)")})
    assert "0xff800000" in body
    assert "0x7f800000" in body
    FormulaKernel(["x"], [], body).module([torch.float64] * 2, 2, ["vector"] * 2)


def test_division_by_multiplication() -> None:
    numbers = (0, 1, 2, 6, 7, 1000, 2**16, 2**31 - 1)
    for size, n in itertools.product((1, 2, 3, 7, 10, 641, 2**20 + 7, 2**31 - 1), numbers):
        multiplier, shift = divisor(size)
        assert multiplier < 2**32
        assert (n if size < 2 else ((n * multiplier) >> 32) >> shift) == n // size


@pytest.mark.parametrize(
    ("x", "lanes", "reaches"),
    [
        (torch.empty(8, 16), 4, ("vector", "vector")),
        (torch.empty(16).expand(8, 16), 4, ("vector", "vector")),
        (torch.empty(8, 1).expand(8, 16), 4, ("vector", "one")),
        (torch.empty(16, 8).t(), 1, ("any", "any")),
        (torch.empty(129)[1:].view(8, 16), 1, ("any", "any")),
        (torch.empty(8, 17)[:, :16], 1, ("any", "any")),
        (torch.empty(()).expand(8, 16), 4, ("vector", "one")),
    ],
)
def test_layouts(x: Tensor, lanes: int, reaches: tuple[str, ...]) -> None:
    found = layout((8, 16), (torch.empty(8, 16), x))
    assert found is not None
    assert (found.lanes, found.reaches) == (lanes, reaches)


@pytest.mark.parametrize(
    "shapes",
    [((2, 3), (2, 3)), ((3,), (2, 1), ()), ((0, 1), (5,)), ((1,), (1, 1)), ((2,), (1, 4, 1))],
)
def test_broadcast(shapes: tuple[tuple[int, ...], ...]) -> None:
    assert broadcast(shapes) == tuple(torch.broadcast_shapes(*shapes))
    with pytest.raises(RuntimeError, match="got 4 and 3 in dimension -2"):
        broadcast([(4, 1), (3, 2)])


def test_a_first_call_imports_no_more_of_torch() -> None:
    code = (
        "import sys, torch; from torchkiln import jit; known = set(sys.modules)\n"
        "jit.elementwise('x * 2 + y')(torch.ones(2, 3), torch.ones(3))\n"
        "assert 'sympy' in known or 'sympy' not in sys.modules, 'half a second'\n"
        "assert len(sys.modules) - len(known) < 30, sorted(set(sys.modules) - known)"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_dimensions_are_merge_dimensions() -> None:
    assert merge_dimensions((4, 1, 6), [[6, 6, 1], [6, 9, 1]]) == ([24], [[1], [1]])
    assert merge_dimensions((4, 6), [[6, 1], [0, 1]]) == ([6, 4], [[1, 6], [1, 0]])


@pytest.mark.cuda
@pytest.mark.parametrize("name", NUMERIC)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_functions_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    letters = "xyz"[: FUNCTIONS[name].arity]
    call = {"add": "x + y", "sub": "x - y", "mul": "x * y", "div": "x / y", "neg": "-x"}
    op = jit.elementwise(call.get(name, f"{name}({', '.join(letters)})"))
    low = 0.1 if name in POSITIVE else -2.0
    inputs = [
        torch.empty(33, 65, device="cuda", dtype=dtype).uniform_(low, 2).requires_grad_()
        for _ in letters
    ]
    cpu = [x.detach().cpu().requires_grad_() for x in inputs]
    found, expected = op(*inputs), op(*cpu)
    torch.testing.assert_close(found.cpu(), expected)
    grads = torch.autograd.grad(found.sum(), inputs)
    for one, other in zip(grads, torch.autograd.grad(expected.sum(), cpu), strict=True):
        torch.testing.assert_close(one.cpu(), other)


def test_a_given_gradient_on_the_cpu_and_in_transforms() -> None:
    """Gradients are those of the given formulas, also of second order and in transforms."""
    rounded = jit.elementwise(
        "floor(x * steps + 0.5) / steps + y",
        "x, y, steps=4.0",
        gradient={"x": "grad * (1 + 0 * x)", "y": "grad * y"},
    )
    x = torch.tensor([[0.3], [-0.7]], dtype=torch.float64, requires_grad=True)
    y = torch.tensor([2.0, 3.0, 5.0], dtype=torch.float64, requires_grad=True)
    grad = torch.arange(6, dtype=torch.float64).reshape(2, 3)
    found = torch.autograd.grad(rounded(x, y), (x, y), grad, create_graph=True)
    assert torch.equal(found[0], grad.sum(1, keepdim=True))
    assert torch.equal(found[1], grad.sum(0) * y)
    assert torch.equal(torch.autograd.grad(found[1].sum(), y)[0], grad.sum(0))
    ones = torch.ones_like(x)
    tangent = torch.func.jvp(lambda x: rounded(x, y.detach(), 2.0), (x.detach(),), (ones,))[1]
    assert torch.equal(tangent, torch.ones(2, 3, dtype=torch.float64))
    half = torch.tensor([1.25], dtype=torch.bfloat16, requires_grad=True)
    rounded(half, half.detach()).backward()
    assert half.grad is not None
    assert half.grad.dtype == torch.bfloat16
    assert half.grad.item() == 1

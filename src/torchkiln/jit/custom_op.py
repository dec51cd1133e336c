"""Torch ops that are made at run time, with schema, Meta, gradients, vmap and spec."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from torchkiln.ops import _messages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torchkiln.testing import OpSpec


def _is_transforming() -> bool:
    """Whether a torch.func transform is active, which ops of torch.library support only in part."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _is_batched(tensor: Tensor) -> bool:
    """Whether a tensor is a batch of gradients, as torch.autograd.functional passes them."""
    functorch = torch._C._functorch
    found: bool = functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor)
    return found


AUTOGRAD_KEYS = ("AutogradOther", "AutogradCPU", "AutogradCUDA", "ADInplaceOrView")


def _force_recording() -> Any:
    """A guard under which autograd records, also inside a kernel that a compiled graph calls."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for name in AUTOGRAD_KEYS:
        excluded = excluded.remove(getattr(torch._C.DispatchKey, name))
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


_made: dict[str, Op] = {}
MAKING = threading.RLock()
"""Held while an op is looked up and made. Otherwise, if two threads make the same op, the second
would destroy the op of the first."""


class Op:
    """A torch op that is called like a function; see :func:`op`.

    Graphs of torch.compile and torch.export contain the op as one node. On the CPU it runs the
    reference. Second derivatives come from the reference on every device.
    """

    def __init__(
        self,
        schema: str,
        kernel: Callable[..., Any],
        reference: Callable[..., Any],
        *,
        gradient: Callable[..., Sequence[Tensor | None]] | None = None,
        meta: Callable[..., Any] | None = None,
        check: Callable[..., None] | None = None,
    ) -> None:
        self.name, _, rest = schema.partition("(")
        self.name = self.name.strip()
        namespace, _, self.short_name = self.name.partition("::")
        if not namespace or not self.short_name.isidentifier() or "->" not in rest:
            raise ValueError(
                f"torchkiln.jit.op: schema: got {schema!r}, expected a schema such as"
                ' "mine::name(Tensor x, float lo=0.0) -> Tensor"'
            )
        try:
            self.schema = torch._C.parse_schema(schema)
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise ValueError(
                f"torchkiln.jit.op: schema: got {schema!r} ({reason}), expected names and types"
                " that torch's schemas have"
            ) from None
        self.reference = reference
        self._kernel, self._gradient, self._check = kernel, gradient, check
        self._arguments = [argument.name for argument in self.schema.arguments]
        kinds = [str(argument.type) for argument in self.schema.arguments]
        self.positions = tuple(i for i, kind in enumerate(kinds) if kind == "Tensor")
        """The positions of the tensors among the arguments."""
        parameters = rest.rpartition("->")[0].strip().removesuffix(")")
        self._is_replaced = False
        with MAKING:
            self._register(namespace, rest, parameters, meta or reference)
        self.__name__ = self.short_name

    def _register(
        self, namespace: str, rest: str, parameters: str, meta: Callable[..., Any]
    ) -> None:
        """Defines the op and its backward in torch, in place of an earlier op of the same name."""
        helper = f"{self.short_name}_backward"
        tags = (torch.Tag.pt2_compliant_tag,)
        self._library = library = torch.library.Library(namespace, "FRAGMENT")
        if former := _made.pop(self.name, None):  # for example a notebook cell that runs again
            former._library._destroy()
            former._is_replaced = True
        _made[self.name] = self
        _messages.MADE.update((self.name, f"{namespace}::{helper}"))
        library.define(f"{self.short_name}({rest}", tags=tags)
        library.define(
            f"{helper}(Tensor[] grads, bool[] wanted, {parameters}) -> Tensor[]", tags=tags
        )
        for key, forward in (("CPU", self._on_cpu), ("CUDA", self._on_cuda)):
            library.impl(self.short_name, forward, key)
        library.impl(helper, self._backward_by_torch, "CPU")
        library.impl(helper, self._backward_on_cuda, "CUDA")
        register = torch.library
        register.register_fake(self.name, self._checked(meta), lib=library)
        register.register_fake(f"{namespace}::{helper}", self._backward_meta, lib=library)
        register.register_autograd(self.name, self._backward, setup_context=self._save, lib=library)
        packets = getattr(torch.ops, namespace)
        self.overload = getattr(packets, self.short_name).default
        self._helper = getattr(packets, helper).default
        self.helpers = (helper,)

    def __repr__(self) -> str:
        return f"<torchkiln.jit op {self.schema}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the op; under torch.func transforms and forward mode calls the reference."""
        if self._is_replaced:
            raise RuntimeError(
                f"torchkiln.jit.{self.short_name}: a later op of the same name replaced this one;"
                " call the later op, or give each op its own name"
            )
        if is_compiling():
            return self.overload(*args, **kwargs)
        if len(args) > len(self._arguments) or any(k not in self._arguments for k in kwargs):
            got = ", ".join([f"{len(args)} by position", *kwargs])
            raise TypeError(
                f"torchkiln.jit.{self.short_name}: got arguments {got}, expected at most"
                f" {', '.join(self._arguments)}"
            )
        transformed = _is_transforming() or forward_ad._current_level >= 0
        if self._check is not None or transformed:
            given = self._bind(args, kwargs)
            if self._check is not None:
                self._check(*given)
            if transformed:
                return self.reference(*given)
        return self.overload(*args, **kwargs)

    def _bind(self, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> list[Any]:
        """All arguments in order, with the defaults that torch leaves out of calls."""
        given = dict(zip(self._arguments, args, strict=False)) | (kwargs or {})
        return [
            given.get(a.name, a.default_value if a.has_default_value() else None)
            for a in self.schema.arguments
        ]

    def _checked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            given = self._bind(args)
            if self._check is not None:
                self._check(*given)
            return function(*given)

        return run

    def _on_cpu(self, *args: Any) -> Any:
        return self._checked(self.reference)(*args)

    def _on_cuda(self, *args: Any) -> Any:
        return self._checked(self._kernel)(*args)

    def _tensors(self, args: Sequence[Any]) -> list[Tensor]:
        return [args[i] for i in self.positions]

    def _backward_meta(
        self, _grads: Sequence[Tensor], wanted: Sequence[bool], *args: Any
    ) -> list[Tensor]:
        pairs = zip(self._tensors(args), wanted, strict=True)
        return [t.new_empty(t.shape if want else (0,)) for t, want in pairs]

    def _backward_on_cuda(
        self, grads: Sequence[Tensor], wanted: Sequence[bool], *args: Any
    ) -> list[Tensor]:
        if self._gradient is None:
            return self._backward_by_torch(grads, wanted, *args)
        found = list(self._gradient(*grads, *self._bind(args)))
        tensors = self._tensors(args)
        if len(found) != len(tensors):
            raise RuntimeError(
                f"torchkiln.jit.{self.short_name}: gradient: got {len(found)} results, expected"
                f" {len(tensors)}, one for each tensor"
            )
        return [
            t.new_empty(0) if not want else g if g is not None else t.new_zeros(t.shape)
            for g, want, t in zip(found, wanted, tensors, strict=True)
        ]

    def _backward_by_torch(
        self, grads: Sequence[Tensor], wanted: Sequence[bool], *args: Any
    ) -> list[Tensor]:
        found = self._differentiate(grads, wanted, args, again=False)
        pairs = zip(found, self._tensors(args), strict=True)
        return [
            (t.new_empty(0) if g is None else g.to(memory_format=torch.contiguous_format).clone())
            for g, t in pairs
        ]

    def _differentiate(
        self, grads: Sequence[Tensor], wanted: Sequence[bool], args: Sequence[Any], again: bool
    ) -> list[Tensor | None]:
        """The gradients of the reference by autograd.

        Args:
            grads: the gradient of each result.
            wanted: for each tensor whether to compute the gradient.
            args: the arguments of the op.
            again: whether the gradients must be differentiable.
        """
        given = self._bind(args)
        with torch.enable_grad(), _force_recording():
            leaves = []
            for i, want in zip(self.positions, wanted, strict=True):
                if not again:
                    given[i] = given[i].detach().requires_grad_(want)
                elif want:
                    given[i] = given[i].view_as(given[i])
                leaves += [given[i]] if want else []
            result = self.reference(*given)
            results = result if isinstance(result, (tuple, list)) else (result,)
            kept = [(r, g) for r, g in zip(results, grads, strict=True) if r.requires_grad]
            found: Sequence[Tensor | None] = torch.autograd.grad(
                [r for r, _ in kept], leaves, [g for _, g in kept], again, again, allow_unused=True
            )
        rest = iter(
            torch.zeros_like(leaf) if g is None else g
            for leaf, g in zip(leaves, found, strict=True)
        )
        return [next(rest) if want else None for want in wanted]

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        del output
        ctx.save_for_backward(*self._tensors(inputs))
        ctx.others = [None if i in self.positions else a for i, a in enumerate(inputs)]

    def _backward(self, ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        args = list(ctx.others)
        for i, tensor in zip(self.positions, ctx.saved_tensors, strict=True):
            args[i] = tensor
        wanted = [ctx.needs_input_grad[i] for i in self.positions]
        flat = list(grads[0]) if len(grads) == 1 and isinstance(grads[0], (list, tuple)) else grads
        recorded = torch.is_grad_enabled() and any(
            t.requires_grad for t in (*flat, *ctx.saved_tensors)
        )
        if recorded or _is_transforming() or any(map(_is_batched, flat)):
            found = self._differentiate(flat, wanted, args, again=True)
        else:
            found = self._helper(list(flat), wanted, *args)
        result: list[Tensor | None] = [None] * len(args)
        for i, want, grad in zip(self.positions, wanted, found, strict=True):
            result[i] = grad if want else None
        return tuple(result)

    def spec(self, **fields: Any) -> OpSpec:
        """The op's spec, for ``torchkiln.testing`` and the benchmark.

        Args:
            fields: fields of :class:`torchkiln.testing.OpSpec` that do not follow from the op:
                at least ``inputs``, ``invalid``, ``magnitude`` and ``bench``.
        """
        from torchkiln.jit.spec import opaque_spec  # noqa: PLC0415  calls need no test suite

        own: dict[str, Any] = {
            "name": self.short_name,
            "op": self,
            "overload": self.overload,
            "reference": self.reference,
            "composite": self.reference,
            "differentiable": self.positions,
            "helpers": self.helpers,
        }
        return opaque_spec(**{**own, **fields})


def op(
    schema: str,
    kernel: Callable[..., Any],
    *,
    reference: Callable[..., Any],
    gradient: Callable[..., Sequence[Tensor | None]] | None = None,
    meta: Callable[..., Any] | None = None,
    check: Callable[..., None] | None = None,
) -> Op:
    """Makes a torch op from a function that launches kernels.

    Args:
        schema: the op's name and types: ``"mine::name(Tensor x, float lo=0.0) -> Tensor"``. The op
            is also ``torch.ops.mine.name``.
        kernel: gets the arguments, with tensors on a GPU, and returns new tensors.
        reference: the same function in plain torch. It runs on the CPU, and autograd differentiates
            it where ``gradient`` does not apply.
        gradient: ``gradient(*grads, *arguments)``, called with tensors on a GPU: returns the
            gradient of each tensor argument, None for zeros.
        meta: returns the results for tensors without data; by default ``reference`` does.
        check: gets all arguments before the launch and raises for invalid ones.
    """
    return Op(schema, kernel, reference, gradient=gradient, meta=meta, check=check)

"""Expressions of elementwise functions and means in a normal form.

An expression is a sum of products of atoms. An atom is a leaf, a function of an expression, a mean
over an axis, or a sum that has a power. Two expressions that differ in the order of sums and
products, in the place of factors, or in the spelling of a function are equal. Axes have labels, so
that an expression does not depend on the layout of tensors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

Atom = tuple[object, ...]
"""``("leaf", name, axes)``, ``(function, key)``, ``("mean", axis, key)`` or ``("sum", key)``."""

Product = tuple[tuple[Atom, float], ...]
"""Atoms with their powers, in order."""

Key = tuple[tuple[Product, float], ...]
"""Products with their coefficients, in order."""

DIGITS = 7
"""Significant digits of constants: models write sqrt(2 / pi) with 7 to 16 of them."""

MOST_PRODUCTS = 64
"""Largest number of products of an expression; a longer one is no formula of an op."""

LARGEST_POWER = 6
"""Largest power of a sum that is multiplied out."""


class NoFormulaError(Exception):
    """Raised for a call that computes no formula; the message is the reason."""


@functools.lru_cache(maxsize=4096)
def order(part: object) -> str:
    """The sort key of products and atoms."""
    return repr(part)


@functools.total_ordering
class Expression:
    """A sum of products. Immutable; equal if the normal forms are equal."""

    def __init__(self, products: dict[Product, float]) -> None:
        if len(products) > MOST_PRODUCTS:
            raise NoFormulaError("its formula is too long")
        self.products = {p: c for p, c in products.items() if c != 0}

    @functools.cached_property
    def key(self) -> Key:
        """The normal form, which equal expressions share."""
        pairs = ((p, float(f"{c:.{DIGITS - 1}e}")) for p, c in self.products.items())
        return tuple(sorted(pairs, key=lambda pair: order(pair[0])))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Expression) and self.key == other.key

    def __lt__(self, other: Expression) -> bool:
        return repr(self.key) < repr(other.key)

    def __hash__(self) -> int:
        return hash(self.key)

    def __add__(self, other: Expression) -> Expression:
        products = dict(self.products)
        for product, coefficient in other.products.items():
            products[product] = products.get(product, 0.0) + coefficient
        return Expression({p: c for p, c in products.items() if not is_rest(p, c, self, other)})

    def __sub__(self, other: Expression) -> Expression:
        return self + other.scaled(-1.0)

    def __mul__(self, other: Expression) -> Expression:
        total = Expression({})
        for one, a in self.products.items():
            for two, b in other.products.items():
                total += multiplied(one, two).scaled(a * b)
        return total

    def scaled(self, factor: float) -> Expression:
        """The expression times a number."""
        return Expression({p: c * factor for p, c in self.products.items()})

    @property
    def constant(self) -> float | None:
        """The value of a constant expression; None if the expression depends on a leaf."""
        if not self.products:
            return 0.0
        return self.products.get(()) if len(self.products) == 1 else None

    @property
    def leading(self) -> float:
        """The coefficient of the first product that is no number."""
        names = [product for product in self.products if product] or [()]
        return self.products[min(names, key=order)]


def is_rest(product: Product, value: float, *summands: Expression) -> bool:
    """Whether a sum of coefficients is 0 up to rounding."""
    largest = max(abs(s.products.get(product, 0.0)) for s in summands)
    return abs(value) <= 1e-12 * largest


def number(value: float) -> Expression:
    """The expression of a constant."""
    return Expression({(): float(value)})


def leaf(name: str, axes: tuple[str, ...]) -> Expression:
    """The expression of an input, with the labels of its axes."""
    return Expression({((("leaf", name, axes), 1.0),): 1.0})


def single(atom: Atom, power: float = 1.0) -> Expression:
    """The expression of one atom with a power."""
    return Expression({((atom, power),): 1.0})


def multiplied(one: Product, two: Product) -> Expression:
    """The product of two products; sums whose powers become whole numbers are multiplied out."""
    powers = dict(one)
    for atom, exponent in two:
        if powers.get(atom, 0.0) * exponent < 0 and atom[0] in ("leaf", "relu", "mean"):
            raise NoFormulaError("it divides what may be 0 by itself")
        powers[atom] = powers.get(atom, 0.0) + exponent
    whole = Expression({(): 1.0})
    kept: dict[Atom, float] = {}
    for atom, exponent in powers.items():
        is_sum = atom[0] == "sum" and float(exponent).is_integer() and exponent > 0
        if is_sum:
            whole *= power(Expression(dict(atom[1])), exponent)  # type: ignore[call-overload]
        elif exponent:
            kept[atom] = exponent
    product = tuple(sorted(kept.items(), key=lambda pair: order(pair[0])))
    if whole.constant == 1.0:
        return Expression({product: 1.0})
    return Expression({product: 1.0}) * whole


def power(base: Expression, exponent: float) -> Expression:
    """``base ** exponent`` where both are defined."""
    constant = base.constant
    is_whole = float(exponent).is_integer()
    if constant is not None:
        if (constant < 0 and not is_whole) or (constant == 0 and exponent <= 0):
            raise NoFormulaError("it takes a root of a negative number")
        return number(constant**exponent)
    if is_whole and 0 <= exponent <= LARGEST_POWER:
        result = number(1.0)
        for _ in range(int(exponent)):
            result *= base
        return result
    if len(base.products) == 1:
        ((product, coefficient),) = base.products.items()
        if is_whole or (coefficient > 0 and all(is_positive(*factor) for factor in product)):
            powers = tuple((atom, p * exponent) for atom, p in product)
            return multiplied(powers, ()).scaled(coefficient**exponent)
    leading = base.leading if is_whole else abs(base.leading)
    inner = base.scaled(1 / leading)
    logistic = inverse_sigmoid(inner) if is_whole else None
    if logistic is not None:
        return power(sigmoid(logistic), -exponent).scaled(leading**exponent)
    return single(("sum", inner.key), exponent).scaled(leading**exponent)


def is_positive(atom: Atom, exponent: float) -> bool:
    """Whether an atom with its power is never negative, so that powers may be multiplied."""
    if atom[0] == "mean":
        key: Key = atom[2]  # type: ignore[assignment]
        return len(key) == 1 and key[0][1] > 0 and all(p % 2 == 0 for _, p in key[0][0])
    return atom[0] in ("exp", "sigmoid", "relu") or not float(exponent).is_integer()


def inverse_sigmoid(base: Expression) -> Expression | None:
    """The ``x`` of ``1 + exp(-x)``; None for any other expression."""
    if len(base.products) != 2 or base.products.get(()) != 1.0:
        return None
    (((product, coefficient)),) = ((p, c) for p, c in base.products.items() if p)
    if len(product) != 1 or product[0][0][0] != "exp" or coefficient != 1.0:
        return None
    return Expression(dict(product[0][0][1])).scaled(-product[0][1])  # type: ignore[call-overload]


def sigmoid(x: Expression) -> Expression:
    """The sigmoid; its argument gets a positive first coefficient by s(-x) = 1 - s(x)."""
    if x.constant is not None:
        return number(1 / (1 + math.exp(-x.constant)))
    if x.leading < 0:
        return number(1.0) - sigmoid(x.scaled(-1.0))
    return single(("sigmoid", x.key))


def tanh(x: Expression) -> Expression:
    """``tanh(x) = 2 s(2 x) - 1`` with the sigmoid s."""
    return sigmoid(x.scaled(2.0)).scaled(2.0) - number(1.0)


def erf(x: Expression) -> Expression:
    """The error function, which is odd: its argument gets a positive first coefficient."""
    if x.leading < 0:
        return erf(x.scaled(-1.0)).scaled(-1.0)
    return single(("erf", x.key))


def relu(x: Expression) -> Expression:
    """The positive part, with the positive factor of the argument moved outside."""
    size = abs(x.leading)
    return single(("relu", x.scaled(1 / size).key)).scaled(size)


def exp(x: Expression) -> Expression:
    """The exponential function of an expression."""
    return single(("exp", x.key))


def gelu(x: Expression, approximate: str = "none") -> Expression:
    """The gelu with erf, or with tanh, which is written as a sigmoid."""
    if approximate == "tanh":
        inner = x + power(x, 3).scaled(0.044715)
        return x * sigmoid(inner.scaled(2 * math.sqrt(2 / math.pi)))
    return (x + x * erf(x.scaled(math.sqrt(0.5)))).scaled(0.5)


FUNCTIONS: dict[str, Callable[..., Expression]] = {
    "neg": lambda x: x.scaled(-1.0),
    "sqrt": lambda x: power(x, 0.5),
    "rsqrt": lambda x: power(x, -0.5),
    "reciprocal": lambda x: power(x, -1.0),
    "square": lambda x: power(x, 2.0),
    "exp": exp,
    "sigmoid": sigmoid,
    "tanh": tanh,
    "erf": erf,
    "erfc": lambda x: number(1.0) - erf(x),
    "special_erfc": lambda x: number(1.0) - erf(x),
    "relu": relu,
    "relu2": lambda x: power(relu(x), 2.0),
    "quick_gelu": lambda x: x * sigmoid(x.scaled(1.702)),
    "silu": lambda x: x * sigmoid(x),
    "gelu": gelu,
}
"""The functions of one expression, by the names of torch's ops."""


@functools.lru_cache(maxsize=4096)
def axes_of(part: object) -> frozenset[str]:
    """The labels of the axes that an atom, a product or a key depends on."""
    if not isinstance(part, tuple) or not part:
        return frozenset()
    if part[0] == "leaf":
        return frozenset(part[2])
    found = frozenset[str]().union(*(axes_of(child) for child in part))
    if part[0] != "mean":
        return found
    axis, parent = str(part[1]), str(part[1]).rpartition("/")[0]
    groups = {f"{axis[:-1]}0"} if parent in found else set()
    return found - {axis, parent} | groups


def mean(x: Expression, axis: str) -> Expression:
    """The mean over an axis, with factors that do not depend on the axis outside of the mean."""
    total = Expression({})
    for product, coefficient in x.products.items():
        inside = tuple(factor for factor in product if depends(factor[0], axis))
        outside = tuple(factor for factor in product if factor not in inside)
        part = Expression({outside: coefficient})
        if inside:
            part *= single(("mean", axis, Expression({inside: 1.0}).key))
        total += part
    return total


def depends(atom: Atom, axis: str) -> bool:
    """Whether an atom depends on an axis, or on the axis from which it was split."""
    axes = axes_of(atom)
    if any(other.startswith(f"{axis}/") for other in axes):
        raise NoFormulaError("it takes a mean over parts of an axis")
    return axis in axes or axis.rpartition("/")[0] in axes - {""}

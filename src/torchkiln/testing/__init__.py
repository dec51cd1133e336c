"""The contract of an op, as data and as generated checks.

An :class:`OpSpec` is the contract of one op of any package. :func:`cases` makes named cases from
specs, :func:`run_contract` runs all checks of one spec, and the plug-in
``torchkiln.testing.plugin`` makes one pytest test per case::

    @pytest.mark.contract([MY_SPEC])
    def test_contract(contract_case):
        contract_case.run()
"""

from typing import TYPE_CHECKING, Any

from torchkiln.testing.case import Case, cases
from torchkiln.testing.check import Check, ExcludedError, UnavailableError
from torchkiln.testing.compare import depth, steps
from torchkiln.testing.data import normal
from torchkiln.testing.derive import layer
from torchkiln.testing.refusals import GoodCall, Refusals
from torchkiln.testing.result import Outcome, run_contract
from torchkiln.testing.sample import Invalid, Sample, Traffic
from torchkiln.testing.shapes import alike
from torchkiln.testing.spec import CUSTOM_OP_EXCLUDED, OpSpec, SpecError
from torchkiln.testing.specs import SPECS
from torchkiln.testing.validation import validate

if TYPE_CHECKING:
    from torchkiln.testing.fuzz import Plan, check_call, plans

__all__ = [
    "CUSTOM_OP_EXCLUDED",
    "SPECS",
    "Case",
    "Check",
    "ExcludedError",
    "GoodCall",
    "Invalid",
    "OpSpec",
    "Outcome",
    "Plan",
    "Refusals",
    "Sample",
    "SpecError",
    "Traffic",
    "UnavailableError",
    "alike",
    "cases",
    "check_call",
    "depth",
    "layer",
    "normal",
    "plans",
    "run_contract",
    "steps",
    "validate",
]


def __getattr__(name: str) -> Any:
    """Imports hypothesis only for the names that need it."""
    if name not in ("Plan", "check_call", "plans"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torchkiln.testing import fuzz  # noqa: PLC0415

    return getattr(fuzz, name)

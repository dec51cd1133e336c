"""The contract of an op, as data and as generated checks.

An :class:`OpSpec` says what an op promises; :func:`cases` turns specs into named checks, for the
ops of this package and for those of any other::

    @pytest.mark.parametrize("case", cases([MY_SPEC], torch.device("cpu")), ids=str)
    def test_contract(case):
        case.run()
"""

from torchkiln.testing.case import Case, cases
from torchkiln.testing.check import Check, UnavailableError
from torchkiln.testing.spec import Invalid, OpSpec, Sample, Traffic
from torchkiln.testing.specs import SPECS

__all__ = [
    "SPECS",
    "Case",
    "Check",
    "Invalid",
    "OpSpec",
    "Sample",
    "Traffic",
    "UnavailableError",
    "cases",
]

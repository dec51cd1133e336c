"""What the contract of OPNAME, which tests/contract/test_contract.py runs, leaves open."""

from __future__ import annotations

import inspect

import torch

import torchkiln


def test_the_defaults_are_those_of_the_schema() -> None:
    parameters = inspect.signature(torchkiln.OPNAME).parameters.values()
    known = [p.default if p.default is not p.empty else None for p in parameters]
    schema = torch.ops.torchkiln.OPNAME.default._schema
    assert known == [argument.default_value for argument in schema.arguments]

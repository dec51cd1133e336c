from __future__ import annotations

import pytest

from PACKAGE import _C

pytest_plugins = ["torchkiln.testing.plugin"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip CUDA tests if the package was built without CUDA kernels."""
    for item in items:
        if item.get_closest_marker("cuda") and not _C.has_cuda:
            item.add_marker(pytest.mark.skip(reason="the package was built without CUDA kernels"))

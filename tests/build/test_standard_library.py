"""Definitions with which our libraries run on a libstdc++ older than the compiler's."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "cpp" / "cpu" / "libstdcxx_compat.cpp"
SYMBOL = "_ZSt28__throw_bad_array_new_lengthv"
# Code that needs the function, and others of the same member of libstdc++.a.
USES = """
#include <string>
#include <vector>
std::vector<int> of(std::size_t n) { return std::vector<int>(n); }
std::string end_of(const std::string& text) { return text.substr(3); }
void* needs() { extern void torchkiln_needs() __asm__("%s"); return (void*)&torchkiln_needs; }
"""


@pytest.mark.parametrize("how", ["-static-libstdc++", "-shared-libgcc"])
def test_a_library_links(how: str, tmp_path: Path) -> None:
    """It links with a static libstdc++, which also defines the function, and with a shared one."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    using, library = tmp_path / "using.cpp", tmp_path / "library.so"
    using.write_text(USES % SYMBOL)
    command = (compiler, "-O2", "-fPIC", "-shared", how, *map(str, (using, SOURCE)))
    done = subprocess.run(
        (*command, "-o", str(library)), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    listed = subprocess.run(("nm", "-D", str(library)), capture_output=True, text=True, check=True)
    assert SYMBOL not in listed.stdout  # not imported, not exported

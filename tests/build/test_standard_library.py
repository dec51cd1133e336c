"""Definitions that let our libraries run beside an older libstdc++ than that of the compiler."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "cpp" / "cpu" / "libstdcxx_compat.cpp"
SYMBOL = "_ZSt28__throw_bad_array_new_lengthv"
# Needs the function, and others that are in one member of libstdc++.a with it.
USES = """
#include <string>
#include <vector>
std::vector<int> of(std::size_t n) { return std::vector<int>(n); }
std::string end_of(const std::string& text) { return text.substr(3); }
void* needs() { extern void torchkiln_needs() __asm__("%s"); return (void*)&torchkiln_needs; }
"""


@pytest.mark.parametrize("how", ["-static-libstdc++", "-shared-libgcc"])
def test_a_library_links(how: str, tmp_path: Path) -> None:
    """With a static libstdc++, which defines the function, too, and with the shared one."""
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
    assert SYMBOL not in listed.stdout  # neither needed nor shown

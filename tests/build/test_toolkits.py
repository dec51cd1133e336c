"""Selection of nvcc in a build from source, and the errors that docs/building.md lists."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from sandbox import CUDA, PARTS, ROOT, Ground, gpu_is_visible, real_toolkit

ON = "-DTORCHKILN_CUDA=ON"
PIP = f"-m pip install 'cuda-toolkit[nvcc,nvvm,crt,cccl]=={CUDA}.*'"
NEEDED = f"needed nvcc {CUDA}, the CUDA version of torch 2.13.0; found:"


@pytest.fixture
def ground(tmp_path: Path) -> Ground:
    """A new sandbox for each test, whose path contains a space."""
    folder = tmp_path / "a place"
    folder.mkdir()
    return Ground(folder)


needs_no_gpu = pytest.mark.skipif(gpu_is_visible(), reason="this machine shows a GPU")


def test_on_the_path(ground: Ground) -> None:
    ground.torch()
    nvcc = ground.nvcc(ground.bin / "nvcc")
    assert ground.configure(ON).says(f"-- nvcc {CUDA}: {nvcc}")


@pytest.mark.parametrize("variable", ["CUDAToolkit_ROOT", "CUDA_HOME", "CUDA_PATH", "-D"])
def test_named_by_a_variable(ground: Ground, variable: str) -> None:
    ground.torch()
    nvcc = ground.nvcc(ground.folder / "toolkit/bin/nvcc")
    ground.nvcc(ground.bin / "nvcc")
    options = [ON]
    if variable == "-D":
        options.append(f"-DCUDAToolkit_ROOT={nvcc.parents[1]}")
    else:
        ground.variables[variable] = str(nvcc.parents[1])
    assert ground.configure(*options).says(f"-- nvcc {CUDA}: {nvcc}")


@pytest.mark.parametrize("named", ["CUDACXX", "a name on the path", "CMAKE_CUDA_COMPILER"])
def test_named_compiler(ground: Ground, named: str) -> None:
    ground.torch()
    nvcc = ground.nvcc(ground.bin / "other-nvcc")
    ground.nvcc(ground.bin / "nvcc")
    options = [ON]
    if named == "CMAKE_CUDA_COMPILER":
        options.append(f"-DCMAKE_CUDA_COMPILER={nvcc}")
    else:
        ground.variables["CUDACXX"] = nvcc.name if named == "a name on the path" else str(nvcc)
    assert ground.configure(*options).says(f"-- nvcc {CUDA}: {nvcc}")


def test_conda_prefix(ground: Ground) -> None:
    """A toolkit of Conda, with lib instead of lib64 and without pip's records, is used as it is."""
    ground.torch()
    for name in ("bin/nvcc.profile", "targets/x86_64-linux/include/cuda.h"):
        ground.write(ground.prefix / name)
    nvcc = ground.nvcc(ground.prefix / "bin/nvcc")
    assert ground.configure(ON).says(f"-- nvcc {CUDA}: {nvcc}")
    assert not (ground.build / "cuda-toolkit").exists()


def test_several(ground: Ground) -> None:
    ground.torch()
    old = ground.nvcc(ground.bin / "nvcc", "12.8")
    older = ground.nvcc(ground.folder / "older/bin/nvcc", "12.6")
    ground.variables |= {"CUDA_HOME": str(older.parents[1]), "CUDA_PATH": "/nowhere"}
    nvcc = ground.registry()
    outcome = ground.configure(ON)
    assert outcome.says(f"-- nvcc {CUDA}: {nvcc}", "-- Not taken:", f"nvcc 12.8: {old}")
    assert outcome.says(f"nvcc 12.6: {older}", "no bin/nvcc in CUDA_PATH=/nowhere: unset it")


def test_registry_toolkit_beside_torch(ground: Ground) -> None:
    """The toolkit is assembled in the build folder, so site-packages may be read-only."""
    ground.torch()
    nvcc = ground.registry()
    before = ground.files()
    for folder in ground.prefix.rglob("*"):
        if folder.is_dir():
            folder.chmod(0o555)
    try:
        assert ground.configure(ON).says(f"-- nvcc {CUDA}: {nvcc}")
    finally:
        for folder in ground.prefix.rglob("*"):
            if folder.is_dir():
                folder.chmod(0o755)
    assert ground.files() == before
    shadow = ground.build / "cuda-toolkit"
    assert (shadow / "bin/nvcc").readlink() == nvcc
    for name in ("include/cuda.h", "nvvm/bin/cicc", "lib64/libcudart.so", "lib/libcudart.so.13"):
        assert (shadow / name).is_file(), name


@pytest.mark.parametrize("part", PARTS)
def test_incomplete_registry_toolkit(ground: Ground, part: str) -> None:
    ground.torch()
    nvcc = ground.registry(**{part: None})
    outcome = ground.configure(ON)
    assert not outcome.ended_well
    assert outcome.says(NEEDED, f"nvcc {CUDA} with no {part}: {nvcc}", PIP)


def test_unmatched_registry_toolkit(ground: Ground) -> None:
    ground.torch()
    nvcc = ground.registry(nvidia_nvvm="14.5.37")
    outcome = ground.configure(ON)
    assert not outcome.ended_well
    assert outcome.says(NEEDED, f"nvcc {CUDA} with nvidia_nvvm-14.5.37: {nvcc}", PIP)


def test_none(ground: Ground) -> None:
    ground.torch()
    outcome = ground.configure(ON)
    assert not outcome.ended_well
    assert outcome.says(NEEDED, f"{ground.python} {PIP}", "-C torchkiln.cuda=off (CPU only)")


def test_another_version(ground: Ground) -> None:
    ground.torch()
    nvcc = ground.nvcc(ground.bin / "nvcc", "12.8")
    outcome = ground.configure(ON)
    assert not outcome.ended_well
    assert outcome.says(NEEDED, f"nvcc 12.8: {nvcc}", PIP, "-C torchkiln.allow-cuda-mismatch=on")


def test_another_version_that_is_accepted(ground: Ground) -> None:
    ground.torch()
    nvcc = ground.nvcc(ground.bin / "nvcc", "12.8")
    outcome = ground.configure(ON, "-DTORCHKILN_ALLOW_CUDA_MISMATCH=ON")
    assert outcome.says(f"nvcc 12.8 ({nvcc}) for a torch with CUDA {CUDA}", f"-- nvcc 12.8: {nvcc}")


@pytest.mark.parametrize("variable", ["CUDAToolkit_ROOT", "CUDA_HOME", "CUDA_PATH"])
def test_wrong_variable(ground: Ground, variable: str) -> None:
    ground.torch()
    ground.variables[variable] = "/nowhere"
    outcome = ground.configure(ON)
    assert not outcome.ended_well
    assert outcome.says(NEEDED, f"no bin/nvcc in {variable}=/nowhere: unset it", PIP)


def test_wrong_compiler(ground: Ground) -> None:
    ground.torch()
    ground.nvcc(ground.bin / "nvcc")
    ground.variables["CUDACXX"] = "/nowhere/nvcc"
    outcome = ground.configure(ON)
    assert not outcome.ended_well
    assert outcome.says(NEEDED, "no such program: /nowhere/nvcc (named by CUDACXX: unset it)", PIP)


def test_compiler_that_does_not_run(ground: Ground) -> None:
    ground.torch()
    nvcc = ground.program(ground.bin / "nvcc", "exit 127")
    outcome = ground.configure(ON)
    assert not outcome.ended_well
    assert outcome.says(NEEDED, f"one that does not run: {nvcc}", PIP)


def test_cxx_too_new_for_nvcc(ground: Ground) -> None:
    ground.torch()
    nvcc = ground.nvcc(ground.folder / "toolkit/bin/nvcc")
    ground.variables["CUDA_HOME"] = str(nvcc.parents[1])
    header = nvcc.parents[1] / "include/crt/host_config.h"
    ground.write(header, "#if defined(__GNUC__)\n#if __GNUC__ > 7\n#error\n#endif\n#endif\n")
    outcome = ground.configure(ON)
    assert not outcome.ended_well
    assert outcome.says("torchkiln: found g++", f"at most 7, the newest that {nvcc}", "CXX=g++-7")


@pytest.mark.parametrize(
    ("architectures", "said"),
    [
        ("90;77", "found '77' in TORCHKILN_CUDA_ARCHITECTURES, needed native, all, or a list of"),
        pytest.param("native", "=native, but no GPU is visible", marks=needs_no_gpu),
    ],
)
def test_wrong_architecture(ground: Ground, architectures: str, said: str) -> None:
    ground.torch()
    ground.nvcc(ground.bin / "nvcc")
    outcome = ground.configure(ON, f"-DTORCHKILN_CUDA_ARCHITECTURES={architectures}")
    assert not outcome.ended_well
    assert outcome.says(said, "-C torchkiln.cuda-architectures='80;90'")


@pytest.mark.parametrize(
    ("macros", "built"),
    [
        ("", "baseline"),
        ("AVX2 FMA F16C", "baseline"),
        ("AVX2 FMA F16C BMI2", "avx2"),
        ("AVX2 FMA F16C BMI2 AVX512F AVX512BW AVX512VL AVX512DQ", "avx512"),
    ],
)
def test_instructions_of_this_processor(ground: Ground, macros: str, built: str) -> None:
    """The build selects the widest set of instructions that the compiler reports in full."""
    ground.torch()
    defined = " ".join(f"'#define __{macro}__ 1'" for macro in macros.split())
    real = shutil.which("g++")
    script = (
        f'case "$*" in *-march=native*) printf "%s\\n" {defined} ;; *) exec {real} "$@" ;; esac'
    )
    compiler = ground.program(ground.bin / "some-g++", script)
    cpu = ("-DTORCHKILN_CUDA=OFF", f"-DCMAKE_CXX_COMPILER={compiler}")
    assert ground.configure(*cpu).says(f"torchkiln: CPU kernels for: {built} --")
    every = ground.configure(*cpu, "-DTORCHKILN_CPU_INSTRUCTIONS=all")
    assert every.says("torchkiln: CPU kernels for: baseline;avx2;avx512 --")
    wrong = ground.configure(*cpu, "-DTORCHKILN_CPU_INSTRUCTIONS=avx2")
    assert not wrong.ended_well
    assert wrong.says("found 'avx2' in TORCHKILN_CPU_INSTRUCTIONS, needed native or all")


def test_gpu_but_no_compiler(ground: Ground) -> None:
    ground.torch()
    ground.gpu()
    outcome = ground.configure()
    assert outcome.ended_well
    assert outcome.says("building for the CPU only. For the GPU, needed nvcc", PIP)


@needs_no_gpu
def test_neither_gpu_nor_compiler(ground: Ground) -> None:
    ground.torch()
    outcome = ground.configure()
    assert outcome.ended_well
    assert outcome.says("Kernels for the CPU only: no GPU is visible", "-C torchkiln.cuda=on")


def test_torch_without_cuda(ground: Ground) -> None:
    ground.torch(cuda=None)
    ground.nvcc(ground.bin / "nvcc")
    ground.gpu()
    outcome = ground.configure()
    assert outcome.ended_well
    assert outcome.says("Kernels for the CPU only: torch 2.13.0 has no CUDA")
    outcome = ground.configure(ON)
    assert not outcome.ended_well
    assert outcome.says("needed one with CUDA for TORCHKILN_CUDA=ON", "-C torchkiln.cuda=off")


def test_cuda_switched_off_or_misspelt(ground: Ground) -> None:
    ground.torch()
    outcome = ground.configure("-DTORCHKILN_CUDA=off")
    assert outcome.ended_well
    assert outcome.says("Kernels for the CPU only: TORCHKILN_CUDA=off")
    outcome = ground.configure("-DTORCHKILN_CUDA=yes")
    assert not outcome.ended_well
    assert outcome.says("found TORCHKILN_CUDA=yes, needed AUTO, ON or OFF")


def test_no_torch(ground: Ground) -> None:
    outcome = ground.configure()
    assert not outcome.ended_well
    assert outcome.says(f"found no torch in {ground.python}", "-m pip install 'torch>=2.11'")


@pytest.mark.parametrize("content", [None, "__version__ =", "cuda = None"])
def test_damaged_torch(ground: Ground, content: str | None) -> None:
    version = ground.torch() / "version.py"
    version.unlink()
    if content:
        version.write_text(content)
    outcome = ground.configure()
    assert not outcome.ended_well
    assert outcome.says("is damaged: ", "-m pip install --force-reinstall torch")
    assert "Traceback" not in outcome.text


def test_torch_without_headers(ground: Ground) -> None:
    shutil.rmtree(ground.torch() / "include")
    outcome = ground.configure()
    assert not outcome.ended_well
    assert outcome.says("found a torch without its headers", "pip install --force-reinstall torch")


def test_torch_too_old(ground: Ground) -> None:
    ground.torch(version="2.10.1")
    outcome = ground.configure()
    assert not outcome.ended_well
    assert outcome.says("found torch 2.10.1 (", "needed 2.11 or newer", "pip install --upgrade")


def test_cxx_too_old(ground: Ground) -> None:
    ground.torch()
    cxx = ground.program(ground.bin / "old", 'exec g++ -U__GNUC__ -D__GNUC__=8 "$@"')
    ground.variables["CXX"] = str(cxx)
    outcome = ground.configure()
    assert not outcome.ended_well
    assert outcome.says("torchkiln: found g++ 8.", "needed 9 or newer", "CXX=g++-9")


def test_cmake_too_old(ground: Ground) -> None:
    """The error comes before CMake's own, and names a command that installs a newer CMake."""
    sources = ground.folder / "sources"
    top = (ROOT / "CMakeLists.txt").read_text().partition("project(")[0]
    ground.write(sources / "CMakeLists.txt", "set(CMAKE_VERSION 3.25.1)\n" + top)
    outcome = ground.configure(sources=sources)
    assert not outcome.ended_well
    assert outcome.says("found CMake 3.25.1 (", "needed 3.28 or newer", "pip install 'cmake>=3.28'")


def test_no_network(ground: Ground) -> None:
    """Configuring works without a network interface; other tests only have refusing proxies."""
    ground.torch(cuda=None)
    isolated = subprocess.run(["unshare", "-rn", "true"], capture_output=True, check=False)
    if isolated.returncode == 0:
        script = f'exec unshare -rn {shutil.which("cmake")} "$@"'
        outcome = ground.configure(cmake=str(ground.program(ground.bin / "alone", script)))
        assert outcome.ended_well, outcome.text
    files = [*ROOT.glob("*/CMakeLists.txt"), ROOT / "CMakeLists.txt", *ROOT.glob("cpp/cmake/*")]
    assert len(files) > 9
    found = {
        path.name: re.findall(r"FetchContent|ExternalProject|DOWNLOAD|curl|urllib|\bgit\b", text)
        for path in files
        if path.is_file()
        for text in [path.read_text()]
    }
    assert {name: words for name, words in found.items() if words} == {}


def _links(root: Path, toolkit: Path, *names: str) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for name in names:
        (root / name).symlink_to(toolkit / name)


@pytest.mark.skipif(real_toolkit() is None, reason="there is no nvcc")
@pytest.mark.parametrize("kind", ["link", "registry"])
def test_toolkit_that_compiles(ground: Ground, kind: str) -> None:
    """CMake's own test of the compiler passes, too."""
    toolkit = real_toolkit()
    assert toolkit is not None
    ground.torch(cuda=toolkit.version)
    if kind == "registry":
        root = ground.site / "nvidia" / f"cu{toolkit.version.partition('.')[0]}"
        _links(root, toolkit.root, "bin", "include", "lib", "nvvm")
        for part in PARTS:
            (ground.site / f"{part}-{toolkit.version}.1.dist-info").mkdir()
        ground.variables["CUDACXX"] = str(root / "bin/nvcc")
    elif not (toolkit.root / "lib64").exists():
        pytest.skip("the only nvcc is that of the registry, which no link can be made to")
    else:
        (ground.bin / "nvcc").symlink_to(toolkit.root / "bin/nvcc")
    outcome = ground.configure(ON, "-DTORCHKILN_CUDA_ARCHITECTURES=90")
    assert outcome.ended_well, outcome.text
    assert outcome.says("The CUDA compiler identification is NVIDIA", "for 90: ")
    assert (ground.build / "build.ninja").exists()

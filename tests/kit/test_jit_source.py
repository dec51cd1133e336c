"""torchkiln.jit without a compiler: signatures, arguments, includes, the cache."""

from __future__ import annotations

import ctypes
import hashlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from processes import forked

from torchkiln import jit
from torchkiln.jit.call.packing import pack
from torchkiln.jit.call.signature import Signature, kernels_of
from torchkiln.jit.compile import cache
from torchkiln.jit.compile.cache import Binary
from torchkiln.jit.compile.includes import scan

SOURCE = """
// __global__ void not_this(int a);
/* __global__ void nor_this(int a) {} */
extern "C" __global__ void plain(const float* __restrict__ x, float y[], const int64_t n) {}
namespace mine::inner {
struct Shape { int rows; };
template <typename T, int kLanes = 4>
__global__ void __launch_bounds__(256, (1 + 1)) scaled(T const* x, unsigned long long n,
                                                       float by = 1.0f, Shape shape = {}) {
  if (n > 0) { const char* text = "}"; }
}
}  // namespace mine::inner
__device__ void helper() {}
template __global__ void mine::inner::scaled<float, 4>(float const* x, unsigned long long n);
template <> __global__ void mine::inner::scaled<double>(double const* x, unsigned long long n) {}
__global__ void bits(unsigned char* a, unsigned n, bool on, __half* h, std::int32_t k);
static __global__ void bits(unsigned char* a, unsigned n, bool on, __half* h, std::int32_t k) {}
"""


def test_signatures() -> None:
    found = kernels_of(SOURCE)
    assert [str(signature) for signature in found.values()] == [
        "plain(float* x, float* y, int64_t n)",
        "mine::inner::scaled(T* x, unsigned long long n, float by, Shape shape)",
        "bits(unsigned char* a, unsigned int n, bool on, __half* h, int32_t k)",
    ]
    assert found["mine::inner::scaled"].template == ("T", "kLanes")
    dtypes = [parameter.dtype for parameter in found["bits"].parameters]
    expected = [torch.uint8, torch.uint32, torch.bool, torch.float16, torch.int32]
    assert dtypes == expected


@pytest.mark.parametrize("text", ["__global__", "__global__ (", "__global__ void", "template <"])
def test_an_unfinished_line_is_left_to_the_compiler(text: str) -> None:
    assert list(kernels_of(f"__global__ void whole() {{}}\n{text}")) == ["whole"]


def test_instance_of_a_template() -> None:
    signature = kernels_of(SOURCE)["mine::inner::scaled"].instance(("__nv_bfloat16", "8"))
    assert signature.name == "mine::inner::scaled<__nv_bfloat16, 8>"
    assert signature.parameters[0].dtype == torch.bfloat16
    assert signature.parameters[3].dtype is None


def signature(parameters: str) -> Signature:
    """The parsed signature of a kernel with these parameters."""
    return kernels_of(f"__global__ void k({parameters}) {{}}")["k"]


@pytest.mark.parametrize(
    ("parameters", "given", "error", "message"),
    [
        ("float* x, int n", (torch.ones(2),), TypeError, r"got 1 argument, expected 2: k\(float"),
        ("float* x", ([1.0],), TypeError, r"x: got list, expected a torch\.Tensor for float\* x"),
        ("float* x", (torch.ones(2).half(),), TypeError, "x: got dtype float16, expected float32"),
        ("int n", (2.0,), TypeError, "n: got float, expected an int for int n"),
        ("int n", (2**31,), OverflowError, "n: got 2147483648, expected -2147483648 to"),
        ("unsigned n", (-1,), OverflowError, "n: got -1, expected 0 to 4294967295"),
        ("float a", ("1",), TypeError, "a: got str, expected a number for float a"),
        ("Shape s", (3,), TypeError, "s: got int, expected the bytes of a Shape"),
    ],
)
def test_wrong_arguments(
    parameters: str, given: tuple[object, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        pack("k", signature(parameters), given)


def test_packed_arguments() -> None:
    x = torch.ones(3, dtype=torch.bfloat16)
    parameters = "const __nv_bfloat16* x, void* any, float* none, long long n, double d, bool on"
    packed = pack("k", signature(parameters), (x, x, None, -(2**40), 0.1, True))
    assert [p.value for p in packed] == [x.data_ptr(), x.data_ptr(), None, -(2**40), 0.1, True]
    half, narrow, shape = pack(
        "k", signature("half h, nv_bfloat16 b, Shape s"), (1.5, 1.5, b"abcd")
    )
    assert half.value == torch.tensor(1.5).half().view(torch.int16).item()
    assert bytes(narrow) == bytes(torch.tensor([1.5]).bfloat16().view(torch.uint8).tolist())
    assert ctypes.sizeof(shape) == 4


def test_included_files(tmp_path: Path) -> None:
    (tmp_path / "a.h").write_text('#include "sub/b.h"\n#include <cuda_fp16.h>\n')
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.h").write_text('# include "c.h"\n')
    (tmp_path / "sub" / "c.h").write_text('#include "../a.h"\n')
    found = scan('#include "a.h"\n// #include "d.h"\n', str(tmp_path / "my.cu"))
    assert found.is_complete
    assert {path.name for path in found.files} == {"a.h", "b.h", "c.h"}
    assert found.names == {"a.h", "sub/b.h", "cuda_fp16.h", "c.h", "../a.h"}
    found = scan("#define NAME <a.h>\n#include NAME\n", str(tmp_path / "my.cu"))
    assert not found.is_complete


@pytest.mark.parametrize(
    ("options", "is_complete"),
    [
        (("--use_fast_math", "--ptxas-options=-O3", "-DHAS=1", "-I", "/nowhere"), True),
        (("--use-pch=all.pch",), False),
        (("--options-file=more",), False),
        (("-DEXISTS=__has_include",), False),
        (("--no-source-include",), False),
    ],
)
def test_options_that_read_files(options: tuple[str, ...], is_complete: bool) -> None:
    assert scan("", "my.cu", options=options).is_complete == is_complete


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the cache, which does not exist yet."""
    monkeypatch.setenv("TORCHKILN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "jit"


def test_cache(folder: Path) -> None:
    name = cache.key("source", ["option"])
    assert name == cache.key("source", ["option"]) != cache.key("source", ["other"])
    assert cache.read(name) is None
    binary = Binary(b"\0code\n", {"k<float>": "_Z1k"})
    cache.write(name, binary)
    assert cache.read(name) == binary
    (file,) = (path for path in folder.rglob("*") if path.is_file())
    file.write_bytes(file.read_bytes()[:-1])  # the last byte is missing, as with a full disk
    assert cache.read(name) is None
    cache.write(name, binary)
    assert cache.read(name) == binary


WRITE_AND_READ = """
import sys
from torchkiln.jit.compile import cache
binary = cache.Binary(b"x" * 100_000, {"k": "k"})
for _ in range(50):
    cache.write(sys.argv[1], binary)
    assert cache.read(sys.argv[1]) == binary
"""


def test_many_processes_read_whole_files(folder: Path) -> None:
    """Three processes that write and read one entry concurrently get complete data."""
    name = cache.key("shared")
    with ThreadPoolExecutor(3) as pool:
        done = list(pool.map(lambda _: forked(WRITE_AND_READ, name), range(3)))
    assert [one.returncode for one in done] == [0, 0, 0], done[0].stderr
    assert not list(folder.rglob("unfinished-*"))


def test_temporary_files_of_killed_processes_are_removed(folder: Path) -> None:
    name = cache.key("a")
    old, new = folder / name[:2] / "unfinished-old", folder / name[:2] / "unfinished-new"
    old.parent.mkdir(parents=True)
    for path in (old, new):
        path.touch()
    os.utime(old, times=(0, time.time() - 2 * cache.STALE_SECONDS))
    cache.write(name, Binary(b"", {}))
    assert new.exists()
    assert not old.exists()


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHKILN_CACHE", str(tmp_path / "file"))
    words = "cache folder: .* cannot be used .*Set TORCHKILN_CACHE"
    with pytest.warns(UserWarning, match=words):
        cache.write("abcd", Binary(b"", {}))
    cache.write("abcd", Binary(b"", {}))  # without a second warning
    assert cache.read("abcd") is None


def test_folders_are_private(folder: Path) -> None:
    before = os.umask(0)
    try:
        cache.write(cache.key("a"), Binary(b"code", {}))
    finally:
        os.umask(before)
    made = [folder.parent, *folder.parent.rglob("*")]
    assert {path.stat().st_mode & 0o777 for path in made if path.is_dir()} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in made if path.is_file()} == {0o600}


@pytest.mark.parametrize("foreign", ["mode", "owner"])
@pytest.mark.parametrize("level", ["folder", "file"])
def test_what_others_can_change_is_not_used(
    folder: Path, foreign: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = cache.key("a")
    cache.write(name, Binary(b"code", {}))
    path = folder if level == "folder" else folder / name[:2] / name[2:]
    if foreign == "mode":
        path.chmod(0o777)
    elif os.geteuid() == 0:
        os.chown(path, 54321, 54321)
    elif level == "file":
        pytest.skip("needs root, to give a file away")
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 54321)
    assert cache.read(name) is None
    if level == "file":  # a broken file is replaced
        cache.write(name, Binary(b"code", {}))
        assert cache.read(name) == Binary(b"code", {})
        return
    words = "other users can write to it" if foreign == "mode" else "it belongs to user"
    with pytest.warns(UserWarning, match=rf"cache folder: .*jit cannot be used \({words}"):
        cache.write(name, Binary(b"new", {}))
    assert (folder / name[:2] / name[2:]).read_bytes().endswith(b"code")
    source = folder.parent / "a.cpp"
    source.touch()
    with pytest.raises(RuntimeError, match=rf"extension: cache folder: got .*jit \({words}"):
        jit.extension([source])


def test_an_entry_under_another_name_is_not_used(folder: Path) -> None:
    names = [cache.key("a"), cache.key("b")]
    for name in names:
        cache.write(name, Binary(name.encode(), {}))
    paths = [folder / name[:2] / name[2:] for name in names]
    paths[0].replace(paths[1])
    assert cache.read(names[1]) is None


@pytest.mark.parametrize("payload", [b"", b"no JSON\ncode", b"[1]\ncode", b"3\ncode"])
def test_an_entry_with_a_right_digest_and_no_names(folder: Path, payload: bytes) -> None:
    name = cache.key("a")
    cache.write(name, Binary(b"code", {}))
    path = folder / name[:2] / name[2:]
    path.write_bytes(hashlib.sha256(name.encode() + payload).digest() + payload)
    assert cache.read(name) is None
    cache.write(name, Binary(b"code", {}))
    assert cache.read(name) == Binary(b"code", {})


def test_without_a_home_folder(tmp_path: Path) -> None:
    """The cache works without HOME and an entry in passwd, as in docker run --user 12345."""
    code = (
        "import os, pwd, sys, warnings\n"
        "for name in {*os.environ} - {'PATH', 'LD_LIBRARY_PATH'}: del os.environ[name]\n"
        "def getpwuid(_): raise KeyError\n"
        "pwd.getpwuid = getpwuid\n"
        "from torchkiln import jit\n"
        "from torchkiln.jit.compile import cache\n"
        "from torchkiln.doctor.environment import Environment\n"
        "Environment.here()\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always')\n"
        "    assert cache.read('abcd') is None\n"
        "    cache.write('abcd', cache.Binary(b'', {}))\n"
        "    cache.write('abcd', cache.Binary(b'', {}))\n"
        "print([str(w.message) for w in seen if 'torchkiln' in str(w.message)])\n"
        "try: jit.extension([sys.argv[1]])\n"
        "except RuntimeError as error: print(error)"
    )
    (tmp_path / "a.cpp").touch()
    done = forked(code, tmp_path / "a.cpp")
    assert done.returncode == 0, done.stderr
    warned, refused = done.stdout.splitlines()
    assert warned.count("torchkiln.jit: cache folder: got none (the user has no home folder)") == 1
    assert "set TORCHKILN_CACHE" in refused


def test_unused_entries_are_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [cache.key(letter) for letter in "abc"]
    paths = [folder / name[:2] / name[2:] for name in names]
    for name, path, days in zip(names, paths, (91, 89, 91), strict=True):
        cache.write(name, Binary(b"code", {}))
        os.utime(path, times=(0, time.time() - days * cache.DAY))
    assert cache.read(names[2]) is not None  # reading counts as a use, after 91 days
    monkeypatch.setattr(cache, "_swept", set())  # as in another process
    cache.write(cache.key("d"), Binary(b"code", {}))
    assert [path.exists() for path in paths] == [False, True, True]

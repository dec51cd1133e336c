"""Names and figures of kernels, from which explain() derives its text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from torchkiln.trace import KernelLaunch
from torchkiln.trace.events import read
from torchkiln.trace.kernel_names import ACCESSES, ENUMERATORS, access_of, pretty

CUDA = Path(__file__).parents[2] / "cuda"

# Names in the form that `nm -C` prints for the object files of the CUDA kernels.
ACCESS = "torchkiln::device::elementwise::LinearAccess<double, 1, double>"
EACH = "torchkiln::device::elementwise::Each<torchkiln::ScaleShift<double> >"
LINEAR = f"void torchkiln::device::elementwise::kernel<{EACH}, {ACCESS} >({EACH}, {ACCESS}, long)"
IN_ROWS = LINEAR.replace("LinearAccess<double", "RowAccess<true, double")
TRANSPOSED = LINEAR.replace("LinearAccess", "TransposedAccess")
APART = LINEAR.replace("LinearAccess<double", "ElementAccess<float")
ANY = LINEAR.replace("LinearAccess<double, 1, double>", "AnyAccess<__half, 1, 1>")
NORM = (
    "void torchkiln::cuda::(anonymous namespace)::norm_rows<torchkiln::rowwise::RowTile<torchkiln::"
    "rowwise::RowVectors<__nv_bfloat16, 8, true>, 4>, __nv_bfloat16, false>(torchkiln::Norm, "
    "torchkiln::rowwise::TeamShape)"
)
ELEMENTS = NORM.replace("8, true", "1, true")
UNALIGNED = NORM.replace(
    "RowTile<torchkiln::rowwise::RowVectors<__nv_bfloat16, 8, true>, 4>",
    "UnalignedRowTile<__nv_bfloat16, 4>",
)
STREAMED = (
    "void torchkiln::cuda::(anonymous namespace)::stream_rows<torchkiln::rowwise::RowVectors<"
    "__half, 8, false>, true, true, 3>(torchkiln::NormBackward, torchkiln::rowwise::TeamShape, "
    "torchkiln::"
    "ComputeOf<torchkiln::rowwise::RowVectors<__half, 8, false>::T>::type*)"
)
PACKED = (
    "void torchkiln::reduce::rows::packed<__half, double, 8>(torchkiln::reduce::rows::Rows<__half>"
    ", int, torchkiln::reduce::Result)"
)
STAGED = (
    "void torchkiln::reduce::rows::staged<__half, float>(torchkiln::reduce::rows::Rows<__half>, "
    "int, int, torchkiln::reduce::Result)"
)
GRADIENT = (
    "torchkiln::cuda::(anonymous namespace)::GradientBody<torchkiln::cuda::(anonymous namespace)::"
    "Chosen<torchkiln::ExactMath>, double, 2>"
)
GRADIENTS = (
    f"void torchkiln::reduce::columns::walk<{GRADIENT}, 2>({GRADIENT}, torchkiln::reduce::columns::"
    f"Plan, {GRADIENT}::C*, torchkiln::reduce::Result)"
)
DROPOUT = GRADIENTS.replace(GRADIENT, GRADIENT.partition("<")[0] + "<__half, 1>")
SUMS = GRADIENTS.replace(
    GRADIENT, "torchkiln::cuda::(anonymous namespace)::ColumnBody<__half, double, 4>"
)
SM90 = (
    "void torchkiln::gemm::sm90::(anonymous namespace)::matmul_kernel<__nv_bfloat16, (torchkiln::"
    "gemm::wgmma::Major)0, (torchkiln::gemm::wgmma::Major)1>(torchkiln::gemm::sm90::Parameters)"
)

IN_PARTS = (
    "void torchkiln::rowwise::rows_in_parts<torchkiln::cuda::(anonymous namespace)::NormPart<"
    "torchkiln::rowwise::PartTile<__nv_bfloat16, 8, true>, false>, 3>(torchkiln::Norm)"
)
SLABS = (
    "void torchkiln::cuda::norm_gradients::(anonymous namespace)::slab_rows<__half, 1, true, false>"
    "(torchkiln::NormBackward, torchkiln::cuda::norm_slabs::SlabRows, torchkiln::cuda::norm_slabs::"
    "SlabPlan, float*, float*)"
)
NORM_SLABS = (
    "void torchkiln::cuda::(anonymous namespace)::norm_slab_rows<__half, 8, true, false>"
    "(torchkiln::Norm, torchkiln::cuda::norm_slabs::SlabRows, torchkiln::cuda::norm_slabs::SlabPlan"
    ", float*)"
)


@pytest.mark.parametrize(
    ("name", "words", "width", "items"),
    [
        (LINEAR, "all operands in one order, in vectors", 16, None),
        (IN_ROWS, "operands adjacent in rows, in vectors", 16, None),
        (TRANSPOSED, "a transposed operand, in squares through shared memory", 8, None),
        (APART, "rows at any alignment, or elements apart, an element at a time", 4, None),
        (ANY, "other strides or dtypes, an element at a time", 2, None),
        (NORM, "rows, in vectors", 16, 4),
        (ELEMENTS, "rows, an element at a time", 2, 4),
        (UNALIGNED, "rows at any alignment, in vectors", 16, 4),
        (STREAMED, "rows, in vectors", 16, None),
        (IN_PARTS, "parts of long rows, in vectors", 16, 8),
        (SLABS, "slabs of rows copied in bulk to shared memory, an element at a time", 2, None),
        (NORM_SLABS, "slabs of rows copied in bulk to shared memory, in vectors", 16, None),
        (PACKED, "short rows, in vectors", 16, None),
        (STAGED, "short rows through shared memory, in vectors", 16, None),
        (GRADIENTS, "columns, in vectors", 16, None),
        (DROPOUT, "columns, an element at a time", 2, None),
        (SUMS, "columns, in vectors", 8, None),
        (SM90, "tiles copied by the tensor memory accelerator", None, None),
        ("void somebody::else_s<float>(float*)", "", None, None),
    ],
)
def test_access_by_the_name(name: str, words: str, width: int | None, items: int | None) -> None:
    assert access_of(name) == (words, width, items)


def names_in_cuda() -> set[str]:
    """Qualified names of the types and kernels in cuda/, without unnamed namespaces."""
    found = set()
    opened = re.compile(r"^(?:inline )?namespace ?([\w:]*) \{$")
    named = re.compile(r"^(?:struct|class) (?:alignas\(.*?\) )?(\w+)|^[^/]*__global__.*?(\w+)\(")
    for file in [*CUDA.rglob("*.cuh"), *CUDA.rglob("*.cu"), *CUDA.rglob("*.h")]:
        namespaces: list[str] = []
        # A __global__ function may have its name on the next line.
        text = re.sub(r"(__global__.*)\n +", r"\1 ", file.read_text(encoding="utf-8"))
        text = re.sub(r"__launch_bounds__\([^;{]*?\)\)? (?=\w+\()", "", text)
        for line in text.splitlines():
            if match := opened.match(line):
                namespaces.append(match[1])
            elif line.startswith("}  // namespace"):
                namespaces.pop()
            elif match := named.match(line):
                found.add("::".join([*filter(None, namespaces), match[1] or match[2]]))
        assert not namespaces, file
    return found


def test_the_access_types_are_in_the_sources() -> None:
    """Every access type in the list that explain() reads exists in the CUDA sources."""
    known = names_in_cuda()
    assert "torchkiln::cuda::norm_rows" in known
    assert {f"torchkiln::{access.name}" for access in ACCESSES} <= known
    assert "torchkiln::rowwise::RowTile" in known  # the type whose argument ITEMS reads
    headers = (*CUDA.rglob("*.cuh"), *CUDA.rglob("*.h"))
    text = "".join(file.read_text(encoding="utf-8") for file in headers)
    for name, values in ENUMERATORS.items():
        assert f"enum class {name} {{ {', '.join(values)} }};" in text


def test_names_of_kernels() -> None:
    expected = ("norm_rows", "<RowTile<RowVectors<bfloat16, 8, true>, 4>, bfloat16, false>")
    assert pretty(NORM) == expected
    assert pretty(LINEAR)[0] == "elementwise::kernel"
    assert pretty(LINEAR)[1] == "<Each<ScaleShift<double>>, LinearAccess<double, 1, double>>"
    assert pretty(SUMS) == ("columns::walk", "<ColumnBody<float16, double, 4>, 2>")
    assert pretty(SM90) == ("sm90::matmul_kernel", "<bfloat16, Major::k, Major::outer>")
    assert pretty("void at::native::vectorized<4>(int)") == ("at::native::vectorized", "<4>")
    assert pretty("kernel") == ("kernel", "")


def recorded(name: str, figures: tuple[int, ...]) -> KernelLaunch:
    """The kernel of a launch that the binding reports with these figures.

    The figures: blocks, threads, cluster, dynamic and static shared bytes, registers, local bytes,
    blocks per multiprocessor, multiprocessors, most threads of a multiprocessor.
    """
    events: list[object] = [
        ("enter", 7, "torchkiln::op", "", (), []),
        ("launch", 7, name, "", figures, []),
        ("leave", 7, "torchkiln::op", "", (), []),
    ]
    (kernel,) = read(events).steps
    assert isinstance(kernel, KernelLaunch)
    return kernel


def test_a_launch_in_words() -> None:
    kernel = recorded(NORM, (8192, 1, 1, 256, 1, 1, 4, 1024, 512, 56, 16, 4, 132, 2048))
    assert (kernel.blocks, kernel.threads, kernel.cluster) == ((8192, 1, 1), (256, 1, 1), 4)
    assert kernel.shared_bytes == 1536
    assert kernel.occupancy == 0.5
    assert kernel.waves == pytest.approx(8192 / (4 * 132))
    assert str(kernel) == (
        "kernel norm_rows<RowTile<RowVectors<bfloat16, 8, true>, 4>, bfloat16, false>, "
        "rows, in vectors, 16 bytes per access, 4 vectors per thread, 8192 blocks of 256 threads, "
        "clusters of 4 blocks, 1.5 KiB of shared memory per block, 56 registers per thread, "
        "16 bytes of spilled registers per thread, occupancy 50%, 16 waves"
    )


def test_a_product_in_words() -> None:
    kernel = recorded(SM90, (132, 1, 1, 384, 1, 1, 1, 230400, 0, 168, 0, 1, 132, 2048))
    assert str(kernel) == (
        "kernel sm90::matmul_kernel<bfloat16, Major::k, Major::outer>, tiles copied by the tensor "
        "memory accelerator, 132 blocks of 384 threads, 225 KiB of shared memory per block, "
        "168 registers per thread, occupancy 19%, 1 wave"
    )


def test_a_launch_with_few_figures() -> None:
    kernel = recorded("", (1, 1, 1, 32, 1, 1, 1) + (0,) * 7)
    assert kernel.occupancy is kernel.waves is kernel.vector_bytes is None

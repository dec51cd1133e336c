"""The pages of docs/learn: their kernels, exercises, drawings and order."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import learn_drawings
import learn_launches as launches
import learn_measure
import pytest
import torch
from learn_references import Size
from learn_steps import SOLUTIONS, TOPICS, Step, Topic, require_right, table

from torchkiln.jit.compile import toolkit

LEARN = launches.LEARN
PAGES = {path.name: path.read_text(encoding="utf-8") for path in LEARN.glob("*.md")}
FILES = sorted(LEARN.rglob("*.cu"))
HOPPER = ("product/6_hopper.cu", "solutions/product_of_any_size.cu")
OWN = [
    (topic, step) for topic in (*TOPICS, *SOLUTIONS) for step in topic.steps if not step.is_shipped
]
CALLS = [
    pytest.param(topic, step, size, dtype, id=f"{step.file}-{size}-{dtype}")
    for topic, step in OWN
    for size in (*topic.sizes, *step.sizes)
    for dtype in topic.dtypes
]


def test_every_kernel_is_launched() -> None:
    assert {LEARN / step.file for _, step in OWN} == set(FILES)
    shipped = [step for topic in TOPICS for step in topic.steps if step.is_shipped]
    assert all((LEARN.parents[1] / "cuda" / step.file).is_file() for step in shipped)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(LEARN)))
def test_kernels_compile(path: Path, nvrtc: toolkit.Toolkit) -> None:
    del nvrtc
    module = launches.load(str(path.relative_to(LEARN)))
    assert module.signatures
    for name, signature in module.signatures.items():
        arguments = ["2" if word == "kVectors" else "__nv_bfloat16" for word in signature.template]
        whole = f"{name}<{', '.join(arguments)}>" if arguments else name
        assert module.binary("sm_90a", whole).code


@pytest.mark.cuda
@pytest.mark.parametrize(("topic", "step", "size", "dtype"), CALLS)
def test_results_are_right(topic: Topic, step: Step, size: Size, dtype: torch.dtype) -> None:
    major = torch.cuda.get_device_capability()[0]
    if major < 8 and dtype == torch.bfloat16:
        pytest.skip("needs bfloat16 arithmetic")
    if step.file in HOPPER and major != 9:
        pytest.skip("wgmma is of compute capability 9.0")
    torch.manual_seed(0)
    require_right(topic, step, size, dtype, "cuda")
    require_right(topic, step, size, dtype, "cuda")  # a second launch starts from the same state


@pytest.mark.cuda
def test_the_last_reduction_has_the_same_bits() -> None:
    x = torch.randn(1_000_003, device="cuda")
    assert len({launches.sum_same_bits(x).item() for _ in range(50)}) == 1


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.name)
def test_references_are_right(topic: Topic) -> None:
    """The shipped op agrees with the reference on the CPU, and a wrong element is found."""
    torch.manual_seed(0)
    for step in topic.steps:
        if step.is_shipped:
            require_right(topic, step, topic.sizes[-1], topic.dtypes[0], "cpu")
    inputs = topic.inputs(topic.sizes[-1], topic.dtypes[0], "cpu")
    truth, bound = topic.reference(*inputs)
    assert (bound.max() < 0.1 * truth.abs().max()).all()


def test_a_wrong_element_is_noticed() -> None:
    topic = next(topic for topic in TOPICS if topic.name == "norm")

    def wrong(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)

    with pytest.raises(AssertionError, match=r"wrong: .*expected .* elements are wrong"):
        require_right(topic, Step("wrong", "", wrong), (3, 8), torch.float32, "cpu")


def test_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """A correct step gets a time and a ceiling; a wrong one gets a reason and no time."""
    norm = next(topic for topic in TOPICS if topic.name == "norm")
    wrong = Step("wrong", "zeros", lambda x, *_: torch.zeros_like(x))
    shipped = norm.steps[-1]
    topic = dataclasses.replace(norm, steps=(shipped, wrong), sizes=((3, 8),), large=(16, 64))
    monkeypatch.setattr(learn_measure, "TOPICS", (topic,))
    monkeypatch.setattr(learn_measure, "SOLUTIONS", ())
    monkeypatch.setattr(learn_measure, "SECONDS", 0.0)
    count, reasons = learn_measure.check("cpu")
    assert count == 3  # 2 dtypes x small size + 1 x large size
    assert list(reasons) == ["wrong zeros"]
    found = learn_measure.measure(topic, reasons, "cpu")
    assert [row["call"] for row in found] == ["copy", shipped.idea]


def test_times_need_results() -> None:
    """The table has a column of times only with results, and then no cell is empty."""
    names = [topic.name for topic in TOPICS]
    assert all("time" not in table(name, None) for name in names)
    topics = {
        topic.name: {"copy": 1e-4, **{step.idea: 2e-4 for step in topic.steps}} for topic in TOPICS
    }
    lines = table("norm", {"machine": "a GPU", "topics": topics}).splitlines()
    assert lines[0].endswith("100 us. a GPU; medians.")
    assert [line.endswith("| 200 us | 1342 GB/s | 50.0% |") for line in lines[4:]] == [True] * 6
    product = table("product", {"machine": "a GPU", "topics": topics}).splitlines()
    assert product[4].endswith("| 200 us | 687.2 TFLOP/s | 50.0% |")


def test_drawings_are_up_to_date() -> None:
    assert learn_drawings.main(["--check"]) == 0


def test_every_step_and_solution_is_on_a_page() -> None:
    """Every step has a link and a drawing; links lead to files that exist."""
    text = "\n".join(PAGES.values())
    drawings = re.findall(r"!\[[^\]]+\]\(drawings/(\w+)\.svg\)", text)
    assert sorted(drawings) == sorted(path.stem for path in (LEARN / "drawings").glob("*.svg"))
    for topic, step in OWN:
        assert f"]({step.file})" in text, step.file
        if topic in TOPICS:
            folder, name = step.file.split("/")
            assert f"{folder}_{name[0]}" in drawings
    for page, content in PAGES.items():
        prose = re.sub(r"^```.*?^```$", "", content, flags=re.MULTILINE | re.DOTALL)
        for link in re.findall(r"\]\(([^)#]+)", prose):
            assert (LEARN / link).exists(), (page, link)


def test_every_page_ends_with_the_next_one() -> None:
    """Each page links to the next in the order of the navigation, and has at most 200 lines."""
    index = (LEARN.parent / "index.md").read_text(encoding="utf-8")
    order = [f"{name}.md" for name in re.findall(r"^learn/(\S+)$", index, re.MULTILINE)]
    assert set(order) == set(PAGES)
    for name, after in zip(order, [*order[1:], "../new.md"], strict=True):
        assert len(PAGES[name].splitlines()) <= 200, name
        last = PAGES[name].rstrip().rpartition("\n\n")[2]
        assert re.match(rf"Next: \[[^\]]+\]\({re.escape(after)}\)", last), name

"""The steps of docs/learn, the test of their results, and their tables."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import learn_launches as launches
import learn_references as references
import torch
from learn_launches import EPS, SCALE
from learn_references import Bounded, Size
from torch import Tensor

import torchkiln
from torchkiln.bench.report import duration
from torchkiln.bench.report import size as bytes_of

RESULTS = launches.LEARN / "results.json"
"""What learn_measure.py wrote on a GPU."""


@dataclass(frozen=True)
class Step:
    """A kernel of the path, or a shipped op."""

    file: str
    """The file below docs/learn; for a shipped op the one below cuda/."""
    idea: str
    run: Callable[..., Any]
    sizes: tuple[Size, ...] = ()
    """Sizes for the tests beside the topic's."""
    after: Callable[[Tensor], Tensor] = lambda result: result
    """What the op applies to the topic's result in the same kernel."""

    @property
    def is_shipped(self) -> bool:
        """Whether it is an op of torchkiln."""
        return self.file.startswith("ops/")


@dataclass(frozen=True)
class Topic:
    """Steps that compute the same."""

    name: str
    steps: tuple[Step, ...]
    inputs: Callable[[Size, torch.dtype, str], Any]
    reference: Callable[..., Bounded]
    sizes: tuple[Size, ...]
    dtypes: tuple[torch.dtype, ...]
    large: Size = ()
    """The size that is measured, in the first dtype; none for solutions of exercises."""
    moved: Callable[[Size], int] | None = None
    """Bytes to read and write. The ceiling is a copy of as many bytes; without them torch.mm."""
    value: Callable[[Any], Tensor] = lambda found: found
    """The tensor to compare, of what a step returns."""


FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
VECTORS: tuple[Size, ...] = ((1,), (1000,), (100_003,))
ROWS: tuple[Size, ...] = ((1, 8), (5, 1000), (70, 4096))
TILES: tuple[Size, ...] = ((128, 256, 64), (256, 512, 704))
"""Multiples of the largest tile; the second has more steps along k than a pipeline has stages."""
ANY_TILES: tuple[Size, ...] = ((1, 1, 1), (33, 70, 100))


TOPICS = (
    Topic(
        "square",
        (
            Step("square/1_square.cu", "one element per thread", launches.square),
            Step("square/2_vectors.cu", "16 bytes per thread", launches.square_vectors),
            Step("ops/activation/forward.cu", "`torchkiln.square`", torchkiln.square),
        ),
        references.plain,
        lambda x: references.rounded(x.double() ** 2, x.double() ** 2, x.dtype),
        VECTORS,
        (FLOAT32,),
        (2**26,),
        lambda size: 8 * size[0],
    ),
    Topic(
        "fusion",
        (
            Step("fusion/1_separate.cu", "three kernels", launches.separate),
            Step("fusion/2_fused.cu", "one kernel", launches.fused),
            Step(
                "ops/bias_act/forward.cu",
                "`torchkiln.bias_act`",
                lambda x, bias: torchkiln.bias_act(x, bias, scale=SCALE),
            ),
        ),
        references.with_columns,
        references.bias_relu_reference,
        ROWS,
        (BFLOAT16, FLOAT32),
        (16384, 8192),
        lambda size: 4 * size[0] * size[1],
    ),
    Topic(
        "reduction",
        (
            Step(
                "reduction/1_atomics.cu",
                "every thread adds to the result",
                launches.one_per_thread("reduction/1_atomics.cu"),
            ),
            Step(
                "reduction/2_shared.cu",
                "blocks add in shared memory",
                launches.one_per_thread("reduction/2_shared.cu"),
            ),
            Step(
                "reduction/3_shuffles.cu",
                "warps add in registers",
                launches.one_per_thread("reduction/3_shuffles.cu"),
            ),
            Step("reduction/4_vectors.cu", "64 bytes in flight per thread", launches.sum_vectors),
            Step("reduction/5_same_bits.cu", "a fixed order", launches.sum_same_bits),
            Step("ops/reduction/reduction.cu", "`torchkiln.sum`", torchkiln.sum),
        ),
        references.whole_numbers,
        lambda x: references.exact(x.double().sum()),
        (*VECTORS, (2**22 + 5,)),
        (FLOAT32,),
        (2**27,),
        lambda size: 4 * size[0],
    ),
    Topic(
        "norm",
        (
            Step("norm/1_thread_per_row.cu", "a thread per row", launches.norm_per_thread),
            Step(
                "norm/2_block_per_row.cu",
                "a block per row",
                launches.norm_per_block("norm/2_block_per_row.cu"),
                ((3, 77),),
            ),
            Step(
                "norm/3_vectors.cu",
                "16 bytes per access",
                launches.norm_per_block("norm/3_vectors.cu"),
            ),
            Step(
                "norm/4_registers.cu",
                "each element is read once",
                launches.norm_per_block("norm/4_registers.cu", in_registers=True),
            ),
            Step(
                "norm/5_one_exchange.cu",
                "one exchange instead of two",
                launches.norm_per_block("norm/5_one_exchange.cu", in_registers=True),
            ),
            Step(
                "ops/norm/forward_by_dtype.cuh",
                "`torchkiln.layer_norm`",
                lambda x, weight, bias: torchkiln.layer_norm(x, x.shape[1:], weight, bias, EPS),
            ),
        ),
        references.norm_inputs,
        references.norm_reference,
        ROWS,
        (BFLOAT16, FLOAT32),
        (16384, 4096),
        lambda size: 4 * size[0] * size[1],
    ),
    Topic(
        "product",
        (
            Step(
                "product/1_naive.cu",
                "a thread per result",
                launches.product("product/1_naive.cu", 16, (16, 16)),
                ANY_TILES,
            ),
            Step(
                "product/2_tiles.cu",
                "a block shares what it reads",
                launches.product("product/2_tiles.cu", 32, (32, 32)),
                ANY_TILES,
            ),
            Step(
                "product/3_registers.cu",
                "64 results per thread",
                launches.product("product/3_registers.cu", 128, launches.THREADS),
            ),
            Step(
                "product/4_tensor_cores.cu",
                "tensor cores",
                launches.product("product/4_tensor_cores.cu", 128, launches.THREADS),
            ),
            Step(
                "product/5_pipeline.cu",
                "copies ahead of the products",
                launches.product("product/5_pipeline.cu", 128, launches.THREADS, 4 * 20480),
            ),
            Step("product/6_hopper.cu", "TMA and wgmma", launches.product_hopper),
            Step(
                "ops/matmul/sm90.cu",
                "`torchkiln.linear` with relu",
                lambda a, b: torchkiln.linear(a, b, act="relu"),
                after=torch.relu,
            ),
        ),
        references.product_inputs,
        references.product_reference,
        TILES,
        (BFLOAT16,),
        (4096, 4096, 4096),
    ),
    Topic(
        "fp8",
        (
            Step("fp8/1_quantize.cu", "16 lanes share a scale", launches.quantize),
            Step("ops/quantize/rows.cu", "`torchkiln.quantize`", torchkiln.quantize),
        ),
        references.plain,
        references.quantize_reference,
        ((1, 128), (77, 384)),
        (BFLOAT16,),
        (16384, 4096),
        lambda size: 3 * size[0] * size[1] + size[0] * size[1] // 32,
        references.dequantized,
    ),
    Topic(
        "fp8_product",
        (
            Step(
                "ops/quantize/rows.cu",
                "`torchkiln.linear_fp8`",
                lambda a, b, weight: torchkiln.linear_fp8(a, b, quantized=weight),
            ),
        ),
        references.fp8_inputs,
        references.fp8_reference,
        TILES,
        (BFLOAT16,),
        (4096, 4096, 4096),
    ),
)

SOLUTIONS = (
    Topic(
        "vector_add",
        (Step("solutions/vector_add.cu", "", launches.vector_add),),
        lambda size, dtype, device: references.normal(size, size, dtype=dtype, device=device),
        lambda a, b: references.rounded(a.double() + b.double(), a.double() + b.double(), a.dtype),
        VECTORS,
        (FLOAT32, BFLOAT16),
    ),
    Topic(
        "bias_relu_residual",
        (Step("solutions/bias_relu_residual.cu", "", launches.fused_residual),),
        lambda size, dtype, device: references.normal(
            size, size[1:], size, dtype=dtype, device=device
        ),
        references.residual_reference,
        ROWS,
        (FLOAT32, BFLOAT16),
    ),
    Topic(
        "column_sum",
        (Step("solutions/column_sum.cu", "", launches.column_sum),),
        references.whole_numbers,
        lambda x: references.exact(x.double().sum(0)),
        ((1, 1), (1000, 300)),
        (FLOAT32,),
    ),
    Topic(
        "rms_norm",
        (Step("solutions/rms_norm.cu", "", launches.rms_norm),),
        references.norm_inputs,
        references.rms_reference,
        ROWS,
        (FLOAT32, BFLOAT16),
    ),
    Topic(
        "rms_norm_gradient",
        (Step("solutions/rms_norm_gradient.cu", "", launches.rms_norm_gradient),),
        references.gradient_inputs,
        references.gradient_reference,
        ROWS,
        (FLOAT32, BFLOAT16),
    ),
    Topic(
        "prefetched_product",
        (
            Step(
                "solutions/prefetched_product.cu",
                "",
                launches.product("solutions/prefetched_product.cu", 128, launches.THREADS),
            ),
        ),
        references.product_inputs,
        references.product_reference,
        TILES,
        (BFLOAT16,),
    ),
    Topic(
        "linear_relu",
        (Step("solutions/linear_relu.cu", "", launches.linear_relu),),
        references.linear_inputs,
        references.linear_reference,
        TILES,
        (BFLOAT16,),
    ),
    Topic(
        "product_of_any_size",
        (
            Step(
                "solutions/product_of_any_size.cu",
                "",
                lambda a, b: launches.product_hopper(a, b, any_size=True),
            ),
        ),
        references.product_inputs,
        references.product_reference,
        (*TILES, (100, 250, 72), (300, 514, 200)),
        (BFLOAT16,),
    ),
    Topic(
        "dequantize",
        (Step("solutions/dequantize.cu", "", launches.dequantize),),
        references.plain,
        references.quantize_reference,
        ((1, 128), (77, 384)),
        (BFLOAT16,),
    ),
)
"""The exercises."""


def require_right(topic: Topic, step: Step, size: Size, dtype: torch.dtype, device: str) -> None:
    """Raises if an element of a step's result differs from the truth by more than its bound."""
    inputs = topic.inputs(size, dtype, device)
    found = topic.value(step.run(*inputs)).double()
    truth, bound = topic.reference(*inputs)
    truth = step.after(truth)
    wrong = ~((found - truth).abs() <= bound)  # NaN is wrong
    if found.shape != truth.shape or wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{step.file}: {dtype}, {size}: got {found[at].item()} at {at}, expected"
            f" {truth[at].item()} +- {bound[at].item()}; {int(wrong.sum())} elements are wrong"
        )


def words_of(topic: Topic) -> str:
    """The size that is measured, and what the ceiling is."""
    shape = " x ".join(map(str, topic.large))
    dtype = str(topic.dtypes[0]).removeprefix("torch.")
    ceiling = "`torch.mm` in bfloat16"
    if topic.moved is not None:
        ceiling = f"a copy that moves as much, {bytes_of(topic.moved(topic.large))}"
    return f"Size {shape}, {dtype}. The ceiling is {ceiling}"


def rate(topic: Topic, seconds: float) -> str:
    """What a call of that time moves, or computes if its ceiling is a product."""
    if topic.moved is not None:
        return f"{topic.moved(topic.large) / seconds / 1e9:.0f} GB/s"
    return f"{2 * math.prod(topic.large) / seconds / 1e12:.1f} TFLOP/s"


def measured() -> Mapping[str, Any] | None:
    """Seconds by topic and call, those of the ceiling first; None before learn_measure.py ran."""
    if not RESULTS.is_file():
        return None
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    topics: dict[str, dict[str, float]] = {}
    for row in results["rows"]:
        topics.setdefault(row["topic"], {})[row["call"]] = row["seconds"]
    return {"machine": results["machine"], "topics": topics}


def table(name: str, results: Mapping[str, Any] | None) -> str:
    """The steps of a topic in Markdown, with times once they were measured."""
    topic = next(topic for topic in TOPICS if topic.name == name)
    found: Mapping[str, float] | None = None if results is None else results["topics"][name]
    lines = [f"{words_of(topic)}."] if found is None else []
    if results is not None and found is not None:
        ceiling = next(iter(found.values()))
        lines = [f"{words_of(topic)}: {duration(ceiling)}. {results['machine']}; medians."]
    columns = ("", " time | rate | of the ceiling |")[found is not None]
    lines += ["", f"| | step | idea |{columns}", f"|---:|---|---|{'---:|---:|---:|' * bool(found)}"]
    for number, step in enumerate(topic.steps, 1):
        path = f"../../cuda/{step.file}" if step.is_shipped else step.file
        shown = step.file if step.is_shipped else Path(step.file).name
        line = f"| {'' if step.is_shipped else number} | [{shown}]({path}) | {step.idea} |"
        if found is not None:
            seconds = found.get(step.idea)
            cells = ("", "", "")
            if seconds:
                cells = duration(seconds), rate(topic, seconds), f"{ceiling / seconds:.1%}"
            line += f" {' | '.join(cells)} |"
        lines.append(line)
    return "\n".join(lines) + "\n"

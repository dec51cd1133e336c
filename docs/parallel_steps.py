"""Training steps on several GPUs, with torchkiln's modules and with torch's, as lines of JSON.

    torchrun --standalone --nproc-per-node 4 docs/parallel_steps.py llama --out four.jsonl
    torchrun --standalone --nproc-per-node 4 docs/parallel_steps.py llama --scaling strong
    torchrun --standalone --nproc-per-node 4 docs/parallel_steps.py resnet
    torchrun --standalone --nproc-per-node 4 docs/parallel_steps.py layer
    python docs/parallel_steps.py llama     # one GPU

`llama` is the model of docs/examples/parallel.py with the sizes of Llama 3 8B, 4 layers and 4
sequences of 4096 tokens: for each process, or in all with `--scaling strong`. `resnet` is a
ResNet-50 under DDP and autocast with 128 images for each process, by its batch norms; `--graph`
captures its steps in a CUDA graph, so that the host launches each in one call. `layer` measures the
host's time for one of 50 small batch norms with a relu. Columns are measured in turns. Times are
medians of steps without an optimizer, and peaks are memory above that before the steps, both of the
slowest or largest process. --tiny is for a test on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parallel_models import (
    BLOCKS,
    COLUMNS,
    ENGINES,
    LLAMA,
    TINY,
    TINY_FOR_EIGHT,
    WithLoss,
    prepared,
    shape_of,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import torchkiln
from torchkiln.bench.clock import synchronize
from torchkiln.testing import environment

ROUNDS, STEPS, WARM = 2, 10, 3
LAYERS, HOST_STEPS = 50, 100
BEFORE_CAPTURE = 11
"""Steps that DDP has to run before one is captured, as torch's notes on CUDA graphs say."""
BATCH_NORMS = ("torch", "torchkiln", "fuse", "local")

Row = dict[str, Any]
Step = Callable[[], Tensor]


def llama(given: argparse.Namespace, device: torch.device, column: Row) -> Step:
    """A step of the language model."""
    sizes = {0: LLAMA, 4: TINY, 8: TINY_FOR_EIGHT}[given.tiny]
    count = dist.get_world_size()
    shape = shape_of(column["engine"], count, min(given.tensor, count))
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)  # equal weights everywhere
    with device:
        model = WithLoss(sizes, column["modules"]).to(getattr(torch, given.dtype))
    step = prepared(model, mesh, column["engine"])
    total = sizes.sequences * (count if given.scaling == "weak" else 1)
    if total % shape[0]:
        raise SystemExit(f"got {total} sequences for {shape[0]} processes, expected a multiple")
    drawn = torch.Generator().manual_seed(1)
    whole = torch.randint(sizes.vocabulary, (total, sizes.length + 1), generator=drawn)
    mine = whole.chunk(shape[0])[mesh["data"].get_local_rank()].to(device)

    def run() -> Tensor:
        loss = step(mine[:, :-1], mine[:, 1:])
        model.zero_grad(set_to_none=True)
        return loss

    return run


def normed(model: nn.Module, kind: str, device: torch.device) -> nn.Module:
    """The model on the device, with batch norms of a kind in place of local ones."""
    if kind == "torchkiln":
        model = torchkiln.nn.SyncBatchNormAct.convert_sync_batchnorm(model)
    elif kind != "local":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = model.to(device)
    if kind == "fuse":
        torchkiln.fuse(model)
    return model


def resnet(given: argparse.Namespace, device: torch.device, column: Row) -> Step:
    """A step of a ResNet-50."""
    torch.manual_seed(0)
    model: nn.Module
    if given.tiny:
        layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
        model = nn.Sequential(*layers, nn.Linear(8 * 36, 10))
    else:
        model = import_module("torchvision").models.resnet50()
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model = normed(model, column["batch norms"], device)
    images = torch.randn(2, 3, 8, 8) if given.tiny else torch.randn(128, 3, 224, 224)
    images = images.to(device, memory_format=torch.channels_last)
    classes = torch.zeros(len(images), dtype=torch.long, device=device)
    stream = torch.cuda.Stream(device) if given.graph else None
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):  # captured steps need a DDP that was made on a side stream
        call = DistributedDataParallel(model)

    def run() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(call(images), classes)
        loss.backward()
        call.zero_grad(set_to_none=True)
        return loss.detach()

    return run if stream is None else captured(run, stream)


def captured(run: Step, stream: torch.cuda.Stream) -> Step:
    """The step as a CUDA graph with its collectives."""
    with torch.cuda.stream(stream):
        for _ in range(BEFORE_CAPTURE):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = run()

    def replay() -> Tensor:
        graph.replay()
        return loss

    return replay


def columns(given: argparse.Namespace) -> Iterator[Row]:
    """What is measured in turns."""
    if given.task != "llama":
        for name in given.batch_norms.split(","):
            yield {"batch norms": name, "graph": given.graph}
        return
    one = dist.get_world_size() == 1
    for engine in ("one",) if one else given.engines.split(","):
        for modules in given.modules.split(","):
            if "tp" not in engine or modules not in BLOCKS:
                yield {"engine": engine, "modules": modules}


def most(value: float, device: torch.device) -> float:
    """The largest of all processes."""
    found = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()


def mean(loss: Tensor) -> float:
    """The mean over all processes."""
    found = loss.double() / dist.get_world_size()
    dist.all_reduce(found)
    return found.item()


def measured(step: Step, device: torch.device, steps: int) -> Row:
    """Times, peak and the loss of a step."""
    loss = mean(step())
    for _ in range(WARM - 1):
        step()
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if is_cuda else 0
    times = []
    for _ in range(steps):
        dist.barrier()
        synchronize(device)
        start = time.perf_counter()
        step()
        synchronize(device)
        times.append(most(time.perf_counter() - start, device))
    row: Row = {"seconds": statistics.median(times), "least": min(times), "loss": loss}
    if is_cuda:
        row["peak_bytes"] = most(torch.cuda.max_memory_allocated(device) - before, device)
    return row


def host_times(given: argparse.Namespace, device: torch.device, column: Row) -> Row:
    """The host's time for forward and backward of a layer; it waits only where the layer does."""
    count, steps = (2, 2) if given.tiny else (LAYERS, HOST_STEPS)
    parts = (part for _ in range(count) for part in (nn.BatchNorm2d(64), nn.ReLU()))
    model = normed(nn.Sequential(*parts), column["batch norms"], device)
    x = torch.randn(4, 64, 8, 8, device=device, requires_grad=True)
    times = []
    for _ in range(WARM + steps):
        dist.barrier()
        synchronize(device)
        start = time.perf_counter()
        loss = model(x).sum()
        middle = time.perf_counter()
        loss.backward()
        times.append((middle - start, time.perf_counter() - middle))
        synchronize(device)
    both = zip(
        ("forward_seconds", "backward_seconds"), zip(*times[WARM:], strict=True), strict=True
    )
    return {name: most(statistics.median(part) / count, device) for name, part in both}


def main(words: list[str]) -> None:
    """Measures in this process of a group; the first one prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=("llama", "resnet", "layer"))
    parser.add_argument("--engines", default=",".join(ENGINES[1:]))
    parser.add_argument("--modules", default=",".join(COLUMNS))
    parser.add_argument("--batch-norms", default=",".join(BATCH_NORMS))
    parser.add_argument("--graph", action="store_true", help="steps of resnet as CUDA graphs")
    parser.add_argument("--tensor", type=int, default=2, help="size of FSDP2 x tensor parallel")
    parser.add_argument("--scaling", choices=("weak", "strong"), default="weak")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", default="", help="needed outside of a checkout")
    tiny = "small sizes for a test in 4 processes, or in 8"
    parser.add_argument(
        "--tiny", type=int, choices=(4, 8), nargs="?", const=4, default=0, help=tiny
    )
    parser.add_argument("--out", type=Path, help="a file for the lines")
    given = parser.parse_args(words)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # nothing here writes over outputs
    device = torch.device(given.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, rank=0, world_size=1, store=store)
    facts = asdict(environment.environment(device))
    facts["commit"] = given.commit or facts["commit"]
    make = llama if given.task == "llama" else resnet
    for turn in range(1 if given.tiny else ROUNDS):
        for column in columns(given):
            words_of = {"task": given.task, "processes": dist.get_world_size(), **column}
            row = {**words_of, "scaling": given.scaling, "dtype": given.dtype, "turn": turn}
            if given.task == "layer":
                row |= host_times(given, device, column)
            else:
                row |= measured(make(given, device, column), device, 2 if given.tiny else STEPS)
                if given.graph:  # its replays allocate nothing
                    row.pop("peak_bytes", None)
            if dist.get_rank() == 0:
                line = json.dumps({**row, "environment": facts})
                print(line, flush=True)
                if given.out:
                    with given.out.open("a", encoding="utf-8") as file:
                        file.write(f"{line}\n")
            gc.collect()  # models of an engine are in cycles
            if device.type == "cuda":
                torch.cuda.empty_cache()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])

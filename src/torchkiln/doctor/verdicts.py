"""What becomes of a call of each op: on which GPU it runs and with which kernel, or why not."""

from __future__ import annotations

from dataclasses import dataclass

from torchkiln._loader import mismatch
from torchkiln.doctor.driver import Gpu
from torchkiln.doctor.facts import Facts
from torchkiln.doctor.gpu import runs
from torchkiln.doctor.kernels import OLDEST_GPU, kernel_of

# Without an import that lists them; a test compares.
OPS = (
    *("add", "muladd", "square", "relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh"),
    *("bias_act", "swiglu", "geglu", "geglu_tanh", "dropout_add", "bias_dropout_add"),
    *("sum", "mean", "layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"),
    *("softmax", "log_softmax", "cross_entropy", "spmm_csr", "matmul", "linear"),
)
# Of compute capability 9.0 alone, taken where they were measured to be faster.
WARPGROUP = ("matmul", "linear")


@dataclass(frozen=True)
class Verdict:
    """Of one op."""

    devices: tuple[str, ...]
    """Torch's names of those it runs on."""
    words: str


def verdicts(facts: Facts) -> dict[str, Verdict]:
    """By the op's name."""
    return {name: _verdict(name, facts) for name in OPS}


def _verdict(name: str, facts: Facts) -> Verdict:
    if reason := _nowhere(facts):
        return Verdict((), f"does not run, because {reason}")
    if reason := _cpu_only(facts):
        return Verdict(("cpu",), f"CPU only, because {reason}")
    words, devices = [], ["cpu"]
    for index, gpu in enumerate(facts.driver.gpus):
        device = f"cuda:{index}"
        kernel = _kernel(name, facts, gpu)
        if error := (facts.trial.error_on(device) if kernel else _unfit(gpu)):
            words.append(f"not on {device}, because {error}")
        else:
            devices.append(device)
            words.append(f"runs on {device} with the {kernel}")
    only = "CPU only: " if len(devices) == 1 else ""
    return Verdict(tuple(devices), only + "; ".join(words))


def _nowhere(facts: Facts) -> str | None:
    if facts.torch is None:
        return "there is no torch that could be imported"
    if facts.trial.torch_error:
        return f"torch cannot be imported: {_first_line(facts.trial.torch_error)}"
    if facts.record is None:
        return "torchkiln has not been built"
    if found := mismatch(facts.record, facts.torch):
        return f"torchkiln was built for {found.built}, and this is {found.here}"
    return f"its import fails: {_first_line(facts.trial.error)}" if facts.trial.error else None


def _cpu_only(facts: Facts) -> str | None:
    torch, record, driver = facts.torch, facts.record, facts.driver
    assert torch is not None  # _nowhere()
    assert record is not None
    if not torch.cuda:
        return "torch has no CUDA"
    if not record["cuda"]:
        return "this build has no CUDA kernels"
    if not driver.gpus:
        hidden = f": {', '.join(driver.present)} cannot be used" if driver.present else ""
        return f"no GPU is visible{hidden}"
    if driver.cuda and not runs(driver.cuda, torch.cuda):
        return f"the driver runs up to CUDA {driver.cuda}, and torch has CUDA {torch.cuda}"
    return None


def _kernel(name: str, facts: Facts, gpu: Gpu) -> str | None:
    assert facts.record is not None  # _nowhere()
    kernel = kernel_of(facts.record, gpu.capability)
    if kernel and name in WARPGROUP and gpu.capability == (9, 0):
        built = any(item.startswith("90") for item in facts.record["cuda_architectures"])
        return "sm_90a kernel or torch's product" if built else kernel
    return kernel


def _unfit(gpu: Gpu) -> str:
    if gpu.capability < OLDEST_GPU:
        return f"its compute capability is older than {'.'.join(map(str, OLDEST_GPU))}"
    return f"this build has no kernel for {gpu}"


def _first_line(text: str) -> str:
    return text.partition("\n")[0]

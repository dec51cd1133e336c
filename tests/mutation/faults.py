"""The planted faults: the replaced text, the file to compile again, the tests that must fail."""

from __future__ import annotations

from cpu_faults import CPU
from cuda_faults import CUDA
from kernel_faults import KERNELS

FAULTS = CPU + CUDA + KERNELS

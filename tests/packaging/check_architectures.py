"""Usage: check_architectures.py NUMBER...

Imports the installed package and lists the architectures in its kernels: those given, no others.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import nvidia

import torchkiln


def cuobjdump(listing: str, library: Path) -> set[str]:
    """The architectures in what the registry's cuobjdump lists."""
    tools = [Path(folder) / "cu13" / "bin" / "cuobjdump" for folder in nvidia.__path__]
    tool = next(path for path in tools if path.exists())
    done = subprocess.run([tool, listing, library], capture_output=True, text=True, check=True)
    return set(re.findall(r"\bsm_(\d+)", done.stdout))


def main() -> None:
    wanted = set(sys.argv[1:])
    record = torchkiln.build_info()
    library = Path(torchkiln.cmake_prefix_path).parents[1] / "lib" / "libtorchkiln_kernels.so"
    machine_code, ptx = cuobjdump("--list-elf", library), cuobjdump("--list-ptx", library)
    print(f"torchkiln {record['version']} with CUDA {record['cuda']}, torch {record['torch']}")
    print(f"recorded:     {', '.join(record['cuda_architectures'])}")
    print(f"machine code: {', '.join(sorted(machine_code))}")
    print(f"PTX:          {', '.join(sorted(ptx))}")
    if not (machine_code == set(record["cuda_architectures"]) == wanted):
        raise SystemExit(f"expected machine code for exactly {', '.join(sorted(wanted))}")


if __name__ == "__main__":
    main()

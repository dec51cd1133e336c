"""Times of every op, of its peers, and of the ceiling: a copy of as many bytes.

``torchkiln bench [OP ...]`` measures and prints; ``--help`` lists the choices. Two functions of
your own, and a run of ops::

    from torchkiln import bench

    print(bench.compare(mine, torch.nn.functional.silu, x))
    record = bench.run("rms_norm", shapes=[(4096, 4096)], peers=["eager"])
"""

from torchkiln.bench.comparison import Comparison, compare
from torchkiln.bench.result import Measurement, Record
from torchkiln.bench.runs import run
from torchkiln.testing.environment import Environment

__all__ = ["Comparison", "Environment", "Measurement", "Record", "compare", "run"]

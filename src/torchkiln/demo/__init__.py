"""A tour on whatever device is there: ``python -m torchkiln.demo [--out DIR] [--quick]``."""

"""From a formula to the source of a kernel, its derivatives and its reference in torch."""

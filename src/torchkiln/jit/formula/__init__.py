"""Formulas: parsing, derivatives, the kernel source and the reference in torch."""

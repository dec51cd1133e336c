"""Signatures of kernels, arguments packed for the driver, layouts of tensors."""

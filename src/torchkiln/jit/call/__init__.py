"""Calls: signatures of kernels, arguments in the form the driver takes, layouts of tensors."""

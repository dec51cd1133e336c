"""Compiles and loads kernels: toolkit look-up, NVRTC, cache, driver, reloading."""

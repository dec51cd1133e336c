"""From a source to a loaded kernel: toolkit look-up, NVRTC, cache, driver, reloading."""

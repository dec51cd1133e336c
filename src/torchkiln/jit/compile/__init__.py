"""From source to a loaded kernel: NVRTC, driver, toolkit, caches, reloading."""

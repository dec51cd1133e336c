"""From a call's arguments to a kernel's parameters."""

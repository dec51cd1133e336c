"""The operators, a file per family."""

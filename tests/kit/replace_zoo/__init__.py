"""Modules that ``torchkiln.replace`` and ``torchkiln.fuse`` may change only in speed."""

"""Modules for which ``torchkiln.replace`` and ``torchkiln.fuse`` must change nothing but speed."""

"""A tour of the ops on this machine: ``torchkiln demo [--out FOLDER] [--quick | --full]``."""

"""``python -m torchkiln``, the same as ``torchkiln``."""

import sys

from torchkiln.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""``python -m torchkiln_command``: the command of the package in this very Python."""

import sys

from torchkiln_command import main

if __name__ == "__main__":
    sys.exit(main())

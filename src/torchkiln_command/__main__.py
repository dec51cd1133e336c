"""``python -m torchkiln_command``: the command in the Python that is called."""

import sys

from torchkiln_command import main

if __name__ == "__main__":
    sys.exit(main())

"""``python -m compiled_optim``: the command line, as ``compiled-optim``."""

import sys

from compiled_optim.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""``python -m dstui``."""

import sys

from dstui.cli import main

if __name__ == "__main__":
    sys.exit(main())

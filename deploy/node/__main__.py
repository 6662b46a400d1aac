"""`python -m deploy.node`: see `process.py`."""

import sys

from deploy.node.process import main

if __name__ == "__main__":
    sys.exit(main())

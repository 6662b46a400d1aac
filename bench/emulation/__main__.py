"""`python -m bench.emulation`."""

import sys

from bench.emulation.check import main

sys.exit(main())

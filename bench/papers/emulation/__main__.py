"""`python -m bench.papers.emulation`."""

import sys

from bench.papers.emulation.check import main

sys.exit(main())

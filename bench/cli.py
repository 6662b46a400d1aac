"""`epd-bench`: the command that measures. Owns the argument parsing; each measurement is a module of its own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import epd_serve


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="epd-bench", description="Measure EPD-Serve.")
    parser.add_argument("--version", action="version", version=f"epd-bench {epd_serve.__version__}")
    parser.parse_args(argv)
    parser.print_help(sys.stderr)
    return 2  # no measurement was named


if __name__ == "__main__":
    sys.exit(main())

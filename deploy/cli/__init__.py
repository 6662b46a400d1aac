"""The command line: `epd-serve`."""

from deploy.cli.command import main

__all__ = ["main"]

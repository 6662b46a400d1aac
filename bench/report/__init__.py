"""The report of a layout comparison: `write(folder, experiment)` draws what `bench.report.folder.read` has read."""

from bench.report.whole import write

__all__ = ["write"]

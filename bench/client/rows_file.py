"""The old place of what `bench.clients.records` has now."""

from bench.clients.records import RecordsFile as RowsFile
from bench.clients.records import read_records as read_rows

__all__ = ["RowsFile", "read_rows"]

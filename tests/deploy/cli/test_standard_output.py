"""A reader of standard output that leaves first."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.cli.standard_output import READER_LEFT, until_the_reader_leaves

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("words", [("deploy.cli", "layout", "E-P-D"), ("bench.cli", "memory-tables")], ids=" ".join)
def test_a_command_that_nobody_reads_ends_without_a_word(words: tuple[str, ...], unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": unbuffered}
    try:
        done = subprocess.run(
            [sys.executable, "-m", *words], stdout=writer, stderr=subprocess.PIPE, env=environment, timeout=60
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (READER_LEFT, b"")


def test_another_connection_that_breaks_is_still_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    def command() -> int:
        print("printed")
        ours, theirs = socket.socketpair()
        with ours:
            theirs.close()
            return ours.send(b"to nobody")

    with pytest.raises(BrokenPipeError):
        until_the_reader_leaves(command)
    assert capfd.readouterr().out == "printed\n"

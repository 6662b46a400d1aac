"""Files with a key."""

from __future__ import annotations

from pathlib import Path

import pytest

from epd_serve.errors import ConfigError
from epd_serve.key_files import read_key, stage_key


def key_file(folder: Path, content: bytes, mode: int = 0o600) -> str:
    path = folder / "key"
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


def test_a_key_is_one_line(tmp_path: Path) -> None:
    assert read_key(key_file(tmp_path, b"0123456789abcdef\n", 0o640), "--key-file") == "0123456789abcdef"


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        (b"0123456789abcdef", 0o644, "chmod 600"),
        (b"0123456789abcdef", 0o602, "writable by everybody"),
        (b"0123456789\x01abcdefgh", 0o600, "one word"),
        (b"short", 0o600, "at least 16 characters; make one"),
        (b"two words and more of them", 0o600, "one word"),
        (b"\xff" * 20, 0o600, "not plain text"),
    ],
)
def test_a_file_that_is_no_secret_is_refused(tmp_path: Path, content: bytes, mode: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_key(key_file(tmp_path, content, mode), "--key-file")


def test_what_stages_are_shown_tells_no_key_and_is_the_same_on_every_machine() -> None:
    key = "0123456789abcdef"
    assert stage_key(key) == stage_key(key) != stage_key(key + "x")
    assert key not in stage_key(key)


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="openssl rand"):
        read_key(str(tmp_path / "none"), "--key-file")


def test_what_stages_are_shown_is_the_same_everywhere_and_does_not_tell_the_key() -> None:
    key = "0123456789abcdef"
    assert stage_key(key) == stage_key(key) != stage_key(f"{key}x")
    assert key not in stage_key(key)

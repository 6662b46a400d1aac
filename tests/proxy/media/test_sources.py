"""`file://` stays under its root."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from epd_serve.errors import PayloadTooLargeError, RequestError
from proxy.media.loader import read_local


@pytest.fixture
def root(tmp_path: Path) -> Path:
    allowed = tmp_path / "allowed"
    (allowed / "sub").mkdir(parents=True)
    (allowed / "a b.png").write_bytes(b"inside")
    (allowed / "sub" / "c.png").write_bytes(b"deeper")
    (tmp_path / "secret").write_bytes(b"outside")
    (tmp_path / "allowed-not").mkdir()
    (tmp_path / "allowed-not" / "x").write_bytes(b"sibling")
    (allowed / "link").symlink_to(tmp_path / "secret")
    (allowed / "dirlink").symlink_to(tmp_path)
    (allowed / "inner-link").symlink_to(allowed / "sub" / "c.png")
    os.mkfifo(allowed / "fifo")
    return allowed


def read(url: str, root: Path | None, max_bytes: int = 100) -> bytes:
    return read_local(url, root=str(root or ""), max_bytes=max_bytes, param="item")


def test_files_under_the_root_are_read(root: Path) -> None:
    assert read(f"file://{root}/a%20b.png", root) == b"inside"
    assert read(f"file://localhost{root}/sub/../sub/c.png", root) == b"deeper"
    assert read(f"file://{root}/inner-link", root) == b"deeper"


@pytest.mark.parametrize(
    "path",
    [
        "/../secret", "/%2e%2e/secret", "/link", "/dirlink/secret", "/../allowed-not/x", "/missing", "/sub", "/fifo",
        "", "/a%00b",
    ],
)  # fmt: skip
def test_everything_else_gets_one_and_the_same_refusal(root: Path, path: str) -> None:
    with pytest.raises(RequestError) as refused:
        read(f"file://{root}{path}", root)
    assert refused.value.message == "item: not a readable file under the allowed directory."


def test_other_hosts_devices_and_large_files_are_refused(root: Path) -> None:
    with pytest.raises(RequestError):
        read(f"file://elsewhere{root}/sub/c.png", root)
    with pytest.raises(RequestError):
        read("file:///dev/zero", Path("/"))
    with pytest.raises(PayloadTooLargeError):
        read(f"file://{root}/sub/c.png", root, max_bytes=5)


def test_a_root_that_is_itself_a_link_works(root: Path, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(root)
    assert read(f"file://{tmp_path}/alias/sub/c.png", tmp_path / "alias") == b"deeper"


def test_without_a_root_nothing_is_read(root: Path) -> None:
    with pytest.raises(RequestError, match="does not read local files"):
        read(f"file://{root}/sub/c.png", None)

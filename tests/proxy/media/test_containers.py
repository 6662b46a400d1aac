"""Lengths and frame sizes by headers; what is broken or unknown says nothing and never raises."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.media.containers import MAX_PARTS, Clip, read_clip
from tests.proxy.media import clips

VORBIS = b"\x01vorbis" + bytes(5) + (44_100).to_bytes(4, "little") + bytes(14)
VIDEO = 64 * 48
KNOWN = {
    "wav": (clips.wav(2.5), Clip(2.5)),
    "flac": (clips.flac(88_200, 44_100), Clip(2.0)),
    "opus": (clips.ogg(96_000, b"OpusHead" + bytes(11)), Clip(2.0)),
    "vorbis": (clips.ogg(132_300, VORBIS), Clip(3.0)),
    "mp3": (clips.mp3(32_000), Clip(2.0)),
    "mp3 behind a tag of text": (clips.mp3(32_000, id3=300), Clip(2.0)),
    "mp3 of a variable rate": (clips.mp3(32_000, tag_frames=441), Clip(441 * 1152 / 44_100)),
    "avi": (clips.avi(50, 40_000, 64, 48), Clip(2.0, VIDEO)),
    "mp4": (clips.mp4(12.0), Clip(12.0, VIDEO)),
    "mp4 with wide numbers": (clips.mp4(12.0, wide=True), Clip(12.0, VIDEO)),
    "mp4 in fragments": (clips.fragmented_mp4(9.0), Clip(9.0)),
    "webm": (clips.webm(7000.0), Clip(7.0, VIDEO)),
    "webm of a live stream": (clips.webm(0.0, last_cluster_ms=5000, endless=True), Clip(5.0, VIDEO)),
}


@pytest.mark.parametrize("name", KNOWN)
def test_what_the_headers_say(name: str) -> None:
    data, clip = KNOWN[name]
    assert read_clip(data) == clip


def test_a_header_that_claims_less_than_the_bytes_hold_is_not_believed() -> None:
    assert read_clip(clips.mp4(1.0, samples=((100, 40), (1, 1000)))).duration_s == 5.0
    assert read_clip(clips.webm(1.0, last_cluster_ms=60_000)).duration_s == 60.0
    assert read_clip(clips.mp3(400_000, tag_frames=1)).duration_s == 10.0


@pytest.mark.parametrize("share", [0.7, 0.9, 0.99])
def test_a_file_that_is_cut_short_is_as_long_as_what_is_left_of_it_says(share: float) -> None:
    for whole in (clips.webm(7000.0), clips.webm(0.0, last_cluster_ms=7000) + bytes(400), clips.mp4(7.0) + bytes(1000)):
        assert read_clip(whole[: int(len(whole) * share)]).duration_s == 7.0
    assert read_clip(clips.wav(100.0)[: int(800_000 * share) + 44]).duration_s == 100.0 * share


@pytest.mark.parametrize("data", [b"", b"RIFF", b"hello", b"OggS", b"\xff\xfb", b"\x1aE\xdf\xa3", b"\0\0\0\x18ftyp"])
def test_what_is_no_clip_says_nothing(data: bytes) -> None:
    assert read_clip(data) == Clip()


def test_files_of_nothing_but_tiny_or_nested_parts_are_left_soon() -> None:
    tiny = clips.box(b"ftyp") + clips.box(b"free") * 2 * MAX_PARTS + clips.mp4(12.0)
    assert read_clip(tiny) == Clip()
    nested = b""
    for _ in range(3000):
        nested = b"\x18\x53\x80\x67" + (1 << 56 | len(nested)).to_bytes(8, "big") + nested
    assert read_clip(clips.element(0x1A45DFA3, b"") + nested) == Clip()


@given(st.sampled_from(sorted(KNOWN)), st.data())
def test_no_damage_makes_it_raise_or_hang(name: str, data: st.DataObject) -> None:
    clip = bytearray(KNOWN[name][0])
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, min(len(clip), 400) - 1))
        clip[at] = data.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]))
    clip_info = read_clip(bytes(clip[: data.draw(st.integers(0, len(clip)))]))
    assert clip_info.duration_s is None or clip_info.duration_s >= 0

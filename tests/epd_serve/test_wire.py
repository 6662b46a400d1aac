"""Every message survives the wire, and a channel takes its own messages only."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from epd_serve import wire
from epd_serve.wire import TransferKey

KEY = TransferKey("t", "chatcmpl-1")

CHANNELS: dict[str, tuple[Any, list[Any]]] = {
    "announcements": (
        wire.announcements,
        [
            wire.FeatureReady("k", 8, "i", "h", True, {"image_grid_thw": [[1, 4, 4]]}),
            wire.FeatureFailed("k", "full"),
            wire.FeaturePending(["k", "l"], "i"),
            wire.FeatureMissing("r", ["k"], "deadline"),
            wire.StoreReport("E0", "i", 10, 5, 1, "up", 2, 3, {"encoded": 4}),
        ],
    ),
    "to prefill scheduler": (
        wire.to_prefill_scheduler,
        [
            wire.Queued([KEY]),
            wire.Ready(KEY, "p1", "D0:1", [1, 2], 0, 10, "h", ["ipc:///d"]),
            wire.Cancel(KEY),
        ],
    ),
    "to decode scheduler": (
        wire.to_decode_scheduler,
        [wire.Alive([KEY]), wire.Refused(KEY, "no"), wire.CancelAck(KEY)],
    ),
    "to decode worker": (
        wire.to_decode_worker,
        [
            wire.Hello(1, "P0:1", "shm", {"layers": 2, "region_block_bytes": [[1], [2, 3]]}, "/dev/shm/x", 4096),
            wire.Packet(1, 0, (0, 2), [(KEY, [(3, 4), (9, 1)])]),
            wire.Probe(2, 4096, 65536),
            wire.Done(KEY, False, "cancelled"),
        ],
    ),
    "to prefill worker": (
        wire.to_prefill_worker,
        [wire.HelloAck("D0:1", "host:1", [1 << 47]), wire.HelloRefused("dtype"), wire.Credit(3)],
    ),
}


@pytest.mark.parametrize("channel", CHANNELS)
def test_messages_come_back_equal(channel: str) -> None:
    decoder, messages = CHANNELS[channel]
    for message in messages:
        assert decoder.decode(wire.encode(message)) == message


@pytest.mark.parametrize("channel", CHANNELS)
def test_a_channel_refuses_the_messages_of_the_others(channel: str) -> None:
    decoder, _ = CHANNELS[channel]
    for other, (_, messages) in CHANNELS.items():
        for message in messages if other != channel else ():
            with pytest.raises(wire.DecodeError):
                decoder.decode(wire.encode(message))


@pytest.mark.parametrize("garbage", [b"", b"\xff", b"{}", msgspec.msgpack.encode({"type": "Cancel"}), b"\x80"])
def test_garbage_is_a_decode_error(garbage: bytes) -> None:
    for decoder, _ in CHANNELS.values():
        with pytest.raises(wire.DecodeError):
            decoder.decode(garbage)


def test_a_field_of_the_wrong_type_is_a_decode_error() -> None:
    wrong = msgspec.msgpack.encode({"type": "Packet", "key": ["t", "c"], "seq": "1"})
    with pytest.raises(wire.DecodeError):
        wire.to_decode_worker.decode(wrong)


def test_messages_are_frozen() -> None:
    with pytest.raises(AttributeError):
        wire.Credit(1).seq = 2  # type: ignore[misc]

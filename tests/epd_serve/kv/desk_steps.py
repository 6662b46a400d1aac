"""Steps of a desk that several tests take, and the times they take them at."""

from __future__ import annotations

from epd_serve.kv.decode_desk import DecodeDesk
from epd_serve.kv.prefill_desk import Admission, PrefillDesk, PromptShape
from epd_serve.wire import TransferKey
from tests.epd_serve.engine.kv.fakes import BLOCK_SIZE, key_of

PATIENCE, SILENCE, BEAT = 50.0, 5.0, 0.5
KEYS = [key_of(str(i)) for i in range(2)]
A = KEYS[0]


PROMPT = PromptShape(10, "h", BLOCK_SIZE, 2)


def admit(desk: PrefillDesk, key: TransferKey, now: float = 0.0, *, ahead: bool = False) -> Admission:
    return desk.admit(key, PROMPT, now, ahead=ahead)


def pass_time(desk: PrefillDesk | DecodeDesk, begin: float, end: float) -> None:
    """Beats from `begin` on, the last one at `end`."""
    for number in range(int((end - begin) / BEAT)):
        desk.beat(begin + number * BEAT)
    desk.beat(end)

"""The proxy's door in virtual time: its very queue (`proxy/admission/queue.py`) with the simulator's clock, and calls
that go on when their turn comes.

Nobody is refused, since every request is to be answered. Where there is no way through the fleet all wait here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter

from msgspec import convert

from deploy.planner.stage import Clock
from epd_serve.traffic import Request
from proxy.admission.queue import LAST_S, AdmissionQueue, Kind, Stage, Ticket
from proxy.config.limits import AdmissionLimits
from proxy.routing.credits import Credits, Need, Speeds, encoders_with_room, heads_with_room

HAIR_S = 1e-6
"""No sum of seconds is off by so much."""

SPEEDS_S = 1.0
"""For so long what is known of the instances' speeds is not worked out anew."""


class Turn(Ticket, kw_only=True):
    """A ticket. goes: called when its turn has come."""

    goes: Callable[[], None] = lambda: None


class Door:
    """One per fleet.

    Args:
        order: of `proxy/admission/order.py`. slo_s: of every request, until its first token.
        credits_of: of those that may be given something. is_open: whether there is a way through them.
        soonest: of those of a stage that have no credit, when the first one will have some by what it has done by then,
            and what to call then; called with the seconds that may be before something new.
        image_parts: most encoders that share one image.
    """

    def __init__(
        self,
        order: str,
        slo_s: float,
        clock: Clock,
        credits_of: Credits,
        is_open: Callable[[], bool],
        soonest: Callable[[Stage, float], tuple[float, Callable[[], None]] | None],
        image_parts: int = 1,
    ) -> None:
        self._settings = convert({"order": order}, AdmissionLimits)
        self._clock, self._slo_s, self._image_parts = clock, slo_s, image_parts
        self._credits_of, self._is_open, self._soonest = credits_of, is_open, soonest
        self.queue = AdmissionQueue(self._settings, lambda: clock.now_s, self._rooms, self._speeds)
        self.queue.room_made = self.look
        self._looks, self._later_s = False, math.inf
        self._refused: dict[Stage, tuple[float, int] | None] = dict.fromkeys(Stage)
        self._known, self._known_at_s = Speeds(1.0, 1.0), -math.inf

    def enter(self, request: Request) -> Turn:
        """It has come."""
        kind = Kind.MEDIA if request.items else Kind.TEXT
        turn = Turn(self.queue, kind, arrived=self._clock.now_s, slo_s=self._slo_s)
        turn.enter()
        tiles = [min(item.tiles, self._image_parts) for item in request.items]
        turn.sized(Need(float(request.prompt_tokens), [float(item.tokens) for item in request.items], tiles))
        return turn

    def wait(self, turn: Turn, stage: Stage, call: Callable[[], None]) -> None:
        """Call it now where nobody waits and there is room, else when its turn comes."""
        if not self.queue.lines[stage]:
            self._refused[stage] = None
        if turn.goes_at_once(stage):
            call()
            return
        turn.goes = call
        turn.enqueue(stage)
        self._look_later()

    def renewed(self) -> None:
        """Other instances are there."""
        self._known_at_s = -math.inf
        self.look()

    def look(self, stages: Sequence[Stage] = tuple(Stage)) -> None:
        """Something was given back there, or done: whoever waits may go. Not at once, for it may still be under way."""
        for stage in stages:
            self._refused[stage] = None
            if not self._looks and self.queue.lines[stage]:
                self._looks = True
                self._clock.after(0.0, self._let_through)

    def _let_through(self) -> None:
        for turn in self.queue.grants():
            assert isinstance(turn, Turn)
            turn.goes()
        self._looks = False
        self._look_later()

    def _look_later(self) -> None:
        """What instances get done until then tells nobody."""
        now = self._clock.now_s
        if self._looks or now < self._later_s < math.inf or not self.queue.anybody:
            return
        credit_s = {Stage.ENCODE: self._settings.encode_s, Stage.SERVE: self._settings.prefill_s}
        found = [self._soonest(stage, credit_s[stage]) for stage, line in self.queue.lines.items() if line]
        left_s = [(self.queue.short[stage].at + LAST_S, self.look) for stage, line in self.queue.lines.items() if line]
        found += [one for one in left_s if one[0] > now]
        at_s, changed = min([one for one in found if one is not None], key=itemgetter(0), default=(math.inf, self.look))
        self._later_s = max(now, at_s) + HAIR_S
        if at_s < math.inf:
            self._clock.after(self._later_s - now, partial(self._progressed, changed))

    def _progressed(self, changed: Callable[[], None]) -> None:
        changed()
        self.look()

    def _rooms(self, stage: Stage, need: Need, enough: int) -> int:
        """Where something has no room, what asks for no less has none, until somebody looks again."""
        encodes, refused = stage is Stage.ENCODE, self._refused[stage]
        cost = max(need.items) if encodes else need.tokens
        if not self._is_open() or (refused is not None and cost >= refused[0] and enough >= refused[1]):
            return 0
        rooms_of = encoders_with_room if encodes else heads_with_room
        rooms = rooms_of(self._credits_of, need, self._settings, self._speeds(), enough)
        if rooms < enough and (refused is None or enough <= refused[1]):
            self._refused[stage] = cost, enough
        return rooms

    def _speeds(self) -> Speeds:
        now = self._clock.now_s
        if now >= self._known_at_s + SPEEDS_S:
            self._known, self._known_at_s = Speeds.measured(self._credits_of, self._settings), now
        return self._known

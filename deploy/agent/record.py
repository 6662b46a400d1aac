"""What is known of the lives of one stage: with it a supervisor goes on where another one has ended."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass

from deploy.agent.stage_life import StageLife
from deploy.runtime.protocol import Phase


@dataclass
class Record:
    """Values that outlive the process that has written them. Times are of the machine's monotonic clock, seconds.

    Attributes:
        phase: STARTING, also before the first life and until the next one has begun; UP; DOWN, between two lives or
            while the rest of one is cleared away.
        incarnation: of this life, or of the last one; "" before the first.
        pid, born_ticks, log_start, began_at: of the process of this life; 0 as long as there is none.
        up_at: when this life answered; 0 until then. start_s: how long that took.
        ever_up: it has answered once. over: it is not started again.
        reason: why it was down last. lives: begun so far.
        short_lives: in a row that did not settle.
        delay_s: between the last two lives, or from the end of this one to the next.
        next_at: when the next life begins; 0 where that is not decided.
    """

    phase: Phase = Phase.STARTING
    incarnation: str = ""
    pid: int = 0
    born_ticks: int = 0
    log_start: int = 0
    began_at: float = 0.0
    up_at: float = 0.0
    start_s: float = 0.0
    ever_up: bool = False
    over: bool = False
    reason: str = ""
    lives: int = 0
    short_lives: int = 0
    delay_s: float = 0.0
    next_at: float = 0.0

    def begins(self, log_start: int) -> None:
        """Another life is about to be spawned."""
        self.phase, self.incarnation = Phase.STARTING, uuid.uuid4().hex[:12]
        self.pid, self.born_ticks, self.log_start, self.began_at = 0, 0, log_start, 0.0
        self.up_at = self.start_s = self.next_at = 0.0

    def spawned(self, life: StageLife) -> None:
        """It is there, and has done nothing yet. In the place of one that could not go on it is the same life."""
        if not self.pid:
            self.lives += 1
        self.pid, self.born_ticks, self.began_at = life.pid, life.born_ticks, life.started

    def answers(self) -> None:
        """This life, for the first time."""
        self.phase, self.ever_up, self.reason = Phase.UP, True, ""
        self.up_at = time.monotonic()
        self.start_s = self.up_at - self.began_at

    @property
    def up_s(self) -> float:
        return time.monotonic() - self.up_at if self.up_at else 0.0

    def falls(self, reason: str, delay_s: float) -> None:
        """This life ends, or has ended, or could not begin."""
        self.phase, self.reason, self.delay_s = Phase.DOWN, reason, delay_s
        self.short_lives = self.short_lives + 1 if delay_s else 0
        self.up_at = self.start_s = self.next_at = 0.0

    def waits(self) -> None:
        """Nothing of this life is left; the next one begins when its delay is over."""
        self.pid, self.next_at = 0, time.monotonic() + self.delay_s

    def ends(self, reason: str) -> None:
        """For good."""
        self.falls(reason or self.reason, 0.0)
        self.over = True

"""Failures on demand of one simulated stage: `--fault NAME=VALUE` at start, POST /sim/faults at run time.

    crash         true: the process ends at once, as after kill -9
    hang_s        the process stops for so long (SIGSTOP, then SIGCONT); connections stay, nothing answers
    refuse        true: every request that would generate gets 503
    error_rate    0 to 1: so many of them get `error_status` (default 500)
    break_rate    0 to 1: so many lose their connection: streams after their first token, others at once
    slow          factor on all times of the engine
    drop_features 0 to 1: so many features of an encoder get lost after their encode
    poison        text: a request that would generate and has it in its body ends the process, as after kill -9

What is not named stays as it was. `seed` begins the draws anew.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace

from epd_serve.errors import ConfigError


@dataclass(frozen=True)
class FaultState:
    """What goes wrong from now on."""

    refuse: bool = False
    error_rate: float = 0.0
    error_status: int = 500
    break_rate: float = 0.0
    slow: float = 1.0
    drop_features: float = 0.0
    poison: str = ""
    seed: int = 0


_ONCE = ("crash", "hang_s")
_RATES = ("error_rate", "break_rate", "drop_features")


class SimFaults:
    """One per stage. Draws are the same in every run of the same requests. `changed`: called with every new state."""

    def __init__(self, changed: Callable[[FaultState], None] = lambda state: None) -> None:
        self._changed = changed
        self.state = FaultState()
        self._chance = random.Random(0)

    def change(self, wanted: Mapping[str, object]) -> None:
        """Take over what is named; `crash` and `hang_s` happen now.

        Raises:
            ConfigError: a name or a value that means nothing; then nothing is changed.
        """
        once = {name: wanted[name] for name in _ONCE if name in wanted}
        lasting = {name: _checked(name, value) for name, value in wanted.items() if name not in _ONCE}
        hang_s = _number("hang_s", once.get("hang_s", 0.0))
        if "crash" in once and not isinstance(once["crash"], bool):
            raise ConfigError("crash has to be true or false", param="crash")
        self.state = replace(self.state, **lasting)  # type: ignore[arg-type]
        self._changed(self.state)
        if "seed" in lasting:
            self._chance.seed(self.state.seed)
        if once.get("crash"):
            _crash()
        if hang_s > 0:
            _stop_for(hang_s)

    def swallow(self, body: bytes) -> None:
        """A stage is about to work on this body, and does not survive it when it is poisonous."""
        if self.state.poison and self.state.poison.encode() in body:
            _crash()

    def as_dict(self) -> dict[str, object]:
        return asdict(self.state)

    def hits(self, rate: float) -> bool:
        """One draw."""
        return rate > 0 and self._chance.random() < rate


def fault_of(text: str) -> dict[str, object]:
    """`error_rate=0.1` as what `SimFaults.change` takes. Raises ConfigError."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--fault {text!r} is not NAME=VALUE", param="--fault")
    if value in ("true", "false"):
        return {name: value == "true"}
    if isinstance(getattr(FaultState, name, None), str):
        return {name: value}
    try:
        return {name: float(value)}
    except ValueError as error:
        raise ConfigError(f"--fault {text!r}: {value!r} is no number", param="--fault") from error


def _checked(name: str, value: object) -> object:
    kinds: dict[str, type] = {one.name: type(getattr(FaultState, one.name)) for one in fields(FaultState)}
    if name not in kinds:
        raise ConfigError(f"{name} is no fault; known are {', '.join((*_ONCE, *kinds))}", param=name)
    if kinds[name] is bool:
        if not isinstance(value, bool):
            raise ConfigError(f"{name} has to be true or false", param=name)
        return value
    if kinds[name] is str:
        if not isinstance(value, str):
            raise ConfigError(f"{name} has to be text", param=name)
        return value
    number = _number(name, value)
    if name in _RATES and number > 1:
        raise ConfigError(f"{name} is {number}; it has to lie between 0 and 1", param=name)
    if name == "error_status" and not 400 <= number < 600:
        raise ConfigError(f"error_status is {number}; it has to lie between 400 and 599", param=name)
    return int(number) if kinds[name] is int else number


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ConfigError(f"{name} is {value!r}; it has to be a number from 0 on", param=name)
    return float(value)


def _crash() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop_for(seconds: float) -> None:
    """Stop this process as a whole. Somebody else has to wake it: a shell that sleeps first."""
    script = f"sleep {seconds:g}; kill -CONT {os.getpid()}"
    subprocess.Popen(["/bin/sh", "-c", script], start_new_session=True, stdin=subprocess.DEVNULL)
    os.kill(os.getpid(), signal.SIGSTOP)

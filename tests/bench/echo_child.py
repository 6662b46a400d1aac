"""A child for tests: answers every command with itself."""

from __future__ import annotations

import signal

from bench.children import answering, commands

if __name__ == "__main__":
    answer = answering()
    told = commands()
    answer(configured=next(told))
    for command in told:
        if "fail" in command:
            raise SystemExit(command["fail"])
        if "interrupted_bytes" in command:
            signal.signal(signal.SIGALRM, lambda *_: None)
            signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
            answer(text="x" * command["interrupted_bytes"])
        elif not command.get("silent"):
            answer(echo=command)

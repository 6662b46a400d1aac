"""A child for tests: answers every command with itself."""

from __future__ import annotations

from bench.children import answering, commands

if __name__ == "__main__":
    answer = answering()
    told = commands()
    answer(configured=next(told))
    for command in told:
        if "fail" in command:
            raise SystemExit(command["fail"])
        if not command.get("silent"):
            answer(echo=command)

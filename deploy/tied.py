"""`python -m deploy.tied PROGRAM ARGUMENTS…`: becomes a foreign program that dies with the launcher.

Stages ask the kernel for that themselves (`epd_serve.engine.stage_main`); a program that is not ours cannot. The
request survives exec, so nothing stays in between.
"""

from __future__ import annotations

import os
import sys

from epd_serve.lifeline import die_with_parent
from epd_serve.stage_plan import LAUNCHER_ENV


def main() -> None:
    program, *arguments = sys.argv[1:]
    launcher = os.environ.get(LAUNCHER_ENV)
    if launcher is not None:
        die_with_parent(int(launcher))
    os.execv(program, [program, *arguments])


if __name__ == "__main__":
    main()

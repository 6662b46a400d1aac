"""`python -m epd_serve.engine.template SOCKET MODEL`: the template of a launch's stages.

SOCKET is the path of a socket that it makes, on which stages are asked for (`messages.py`).
"""

from __future__ import annotations

import os
import sys

from epd_serve.engine.template.messages import TEMPLATE_NAME
from epd_serve.lifeline import die_with_parent, name_process
from epd_serve.stage_plan import LAUNCHER_ENV

_LOADED_ENV = "EPD_SERVE_TEMPLATE_LOADED"  # set when this program runs with the libraries it needs


def main() -> int:
    """Returns the exit code: the template's own, or that of a process which was forked from it on the way."""
    path, model = sys.argv[1], sys.argv[2]
    if (launcher := os.environ.get(LAUNCHER_ENV)) is not None:
        die_with_parent(int(launcher))
    _load_libraries()
    name_process(TEMPLATE_NAME)
    from epd_serve.engine.template.imports import import_stage

    import_stage(model)
    from epd_serve.engine.stage_main import serve as serve_api
    from epd_serve.engine.template.server import listen, serve

    return serve(listen(path), serve_api)


def _load_libraries() -> None:
    """Become this program once more, with the environment that vLLM would give a worker on CPU before it starts it.

    OpenBLAS makes its threads when it is loaded; one of them is enough for what a stage does with NumPy.
    """
    from epd_serve.engine.compat import worker_libraries

    if os.environ.pop(_LOADED_ENV, None) is None:
        env = {**os.environ, **worker_libraries(os.environ), "OPENBLAS_NUM_THREADS": "1", _LOADED_ENV: "1"}
        os.execve(sys.executable, sys.orig_argv, env)


if __name__ == "__main__":
    sys.exit(main())

"""A template without vLLM: the same template, root and forks, which do what the stage's flags say.

`fake_template.py SOCKET MODEL`; MODEL is `broken` for one that cannot be. As many as lines in `MODEL.doomed` are killed
before they are ready. While there is `MODEL.slow` none gets ready.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Lock
from pathlib import Path

from epd_serve.engine.memory_names import name_memory
from epd_serve.engine.template.context import RootContext, forked
from epd_serve.engine.template.server import listen, serve


def api_server() -> int:
    act, folder, *rest = sys.argv[1:]
    name_memory()
    _note(Path(folder), "api")
    if act == "exit":
        return int(rest[0])
    context = RootContext()
    lock = context.Lock()
    reader, writer = context.Pipe(duplex=False)
    for setting in rest:  # as vLLM sets variables for a process that it is about to start
        name, _, value = setting.partition("=")
        os.environ[name] = value
    core = context.Process(target=engine_core, args=(Path(folder), writer, lock), name="core")
    core.start()
    writer.close()
    _write(Path(folder), "heard", reader.recv())
    core.join()
    _write(Path(folder), "core ended", str(core.exitcode))
    signal.pause()
    return 0


def engine_core(folder: Path, writer: Connection, lock: Lock) -> None:
    _note(folder, "core")
    worker = (RootContext() if forked() else get_context("spawn")).Process(target=rest, args=(folder,), name="worker")
    worker.start()
    with lock:
        writer.send(f"{os.environ.get('SETTING', '')} {worker.name}")
    signal.pause()


def rest(folder: Path) -> None:
    _note(folder, "worker")
    signal.pause()


def _note(folder: Path, name: str) -> None:
    """Who this is, as a test finds it."""
    descriptors = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    _write(folder, f"{name} descriptors", "\n".join(descriptors))
    _write(folder, name, f"{os.getpid()} {os.getppid()}")


def _write(folder: Path, name: str, text: str) -> None:
    unfinished = folder / f".{name}"
    unfinished.write_text(text)
    unfinished.rename(folder / name)


if __name__ == "__main__":
    path, model = sys.argv[1:]
    if model == "broken":
        print("ImportError: no such model", file=sys.stderr)
        sys.exit(1)
    doomed, slow = Path(f"{model}.doomed"), Path(f"{model}.slow")
    if doomed.exists() and (left := doomed.read_text().splitlines()):
        doomed.write_text("\n".join(left[1:]))
        os.kill(os.getpid(), signal.SIGKILL)
    while slow.exists():
        time.sleep(0.01)
    sys.exit(serve(listen(path), api_server))

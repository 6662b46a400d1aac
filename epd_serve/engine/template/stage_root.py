"""The root of a stage: leads its process group and forks its processes. One thread, which only waits and forks.

It forks vLLM's API server first, then whatever the stage's processes ask for (`context.py`): EngineCore, workers. An
end costs what the kernel's chain of parents costs in an ordinary start: that of the API server ends the stage, that of
any other process ends those that it had asked for. The root's own end ends all of them, because each has asked the
kernel for that, and the root's parent, the root of the launch, ends it in the same way. How the API server
ended is how the root ends. Signals to stop are for the group; the root lets them pass.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from epd_serve.engine.template.messages import NUMBER
from epd_serve.lifeline import die_with_parent, end_by
from epd_serve.packets import close_all, receive_packet, send_packet

_ASKER = struct.Struct("=i")  # pid of who asks
_TO_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Fork:
    """A process and who asked for it. `status`: descriptor to which its pid, then its end go; -1 for none."""

    asked_by: int
    status: int


def ask_for_process(root: socket.socket, descriptors: list[int]) -> None:
    """Have the root fork a process that gets copies of the descriptors; to the first it says the pid, then the end.

    Raises:
        ValueError: too many descriptors. OSError: the root has gone.
    """
    send_packet(root, _ASKER.pack(os.getpid()), descriptors)


@dataclass
class StageRoot:
    """Serves until the API server ends, and does not come back then; comes back in every process that it forks.

    Attributes:
        requests: where the stage's processes ask for others; one end of a `packet_pair`.
    """

    requests: socket.socket
    forks: dict[int, Fork] = field(default_factory=dict)  # those not waited for yet, by pid

    def run(self, api_server: Callable[[], int], be_forked: Callable[[list[int]], int]) -> Callable[[], int]:
        """Returns, in a forked process only, what that process has to do: `api_server`, or `be_forked` with the
        descriptors that came with the request."""
        for number in _TO_STOP:
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler there must be; the descriptor wakes the loop
        ended, wake = os.pipe()
        for end in (ended, wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._own = [self.requests.fileno(), ended, wake]
        self._api_server = self._fork(Fork(asked_by=0, status=-1))
        if self._api_server == 0:
            return api_server
        while True:
            ready, _, _ = select.select(self._own[:2], [], [])
            if ended in ready:
                os.read(ended, 4096)
                self._collect()
            if self.requests.fileno() in ready and (descriptors := self._on_request()) is not None:
                return lambda: be_forked(descriptors)

    def _fork(self, fork: Fork) -> int:
        """The new process's pid; 0 in that process, from which everything of the root's has been taken."""
        root = os.getpid()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (*_TO_STOP, signal.SIGCHLD))
        pid = os.fork()
        if pid == 0:
            die_with_parent(root)
            signal.set_wakeup_fd(-1)
            for number in (*_TO_STOP, signal.SIGCHLD):
                signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)
            of_others = [other.status for other in (*self.forks.values(), fork) if other.status >= 0]
            for descriptor in (*self._own, *of_others):
                os.close(descriptor)
        else:
            self.forks[pid] = fork
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return pid

    def _on_request(self) -> list[int] | None:
        """Fork what is asked for. In the new process: its descriptors; in the root: None."""
        message, descriptors = receive_packet(self.requests)
        (asker,) = _ASKER.unpack(message)
        status, *passed = descriptors
        if asker in self.forks:
            if (pid := self._fork(Fork(asker, status))) == 0:
                return passed
            _say(status, pid)
        else:  # it has ended meanwhile
            os.close(status)
        close_all(passed)
        return None

    def _collect(self) -> None:
        """Wait for those that have ended."""
        while self.forks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            fork, code = self.forks.pop(pid), os.waitstatus_to_exitcode(status)
            if pid == self._api_server:
                self._end(code)
            _say(fork.status, code)
            os.close(fork.status)
            for other, of_other in self.forks.items():
                if of_other.asked_by == pid:
                    os.kill(other, signal.SIGKILL)

    def _end(self, code: int) -> None:
        """Ends what it has forked. Python's resource trackers see that all have gone, and clean up after them."""
        for pid in self.forks:
            os.kill(pid, signal.SIGKILL)
        if code < 0:
            end_by(signal.Signals(-code))
        os._exit(code)


def _say(descriptor: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # who asked has gone
        os.write(descriptor, NUMBER.pack(number))

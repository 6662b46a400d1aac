"""Where something answers: how it is written (the rules that an IPv6 address needs), and that it answers nowhere else.

Mooncake binds its handshake, RPC and transfer ports to 0.0.0.0 and [::], whatever address it is given (0.3.13;
`MC_TCP_BIND_ADDRESS` changes what it advertises, not what it binds), and none of them asks who is there. A classic BPF
filter on the listening socket drops packets to any other address; accepted connections inherit it. No privilege is
needed. Linux only; elsewhere nothing is done. Between bind and filter lie milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterator

_SO_ATTACH_FILTER = 26
_NETWORK_HEADER = 0x100000000 - 0x100000  # SKF_NET_OFF: loads relative to the IP header
_LOAD_WORD, _LOAD_BYTE, _AND, _JUMP_EQUAL, _RETURN = 0x20, 0x30, 0x54, 0x15, 0x06
_V4_DESTINATION, _V6_DESTINATION = 16, 24
_PASS, _DROP = 0xFFFFFFFF, 0


def authority(host: str, port: int) -> str:
    """`10.0.0.4:8000`, `name:8000`, or `[fd00::4]:8000`: as in a URL, a ZMQ address or a Mooncake session."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def environment_at(host: str) -> dict[str, str]:
    """What a process that uses Mooncake at this address has to have in its environment. Without the second entry it
    looks for peers by IPv4 alone."""
    return {"MC_TCP_BIND_ADDRESS": host, **({"MC_USE_IPV6": "1"} if ":" in host else {})}


@contextlib.contextmanager
def reachable_only_at(host: str) -> Iterator[None]:
    """TCP ports that this process opens on every address inside the `with` answer at `host` alone afterwards.

    `host` as name or address; the unspecified address (0.0.0.0, ::) leaves the ports as they are.
    """
    address = _numeric(host)
    before = {inode for inode, _ in _wildcard_listeners()}
    try:
        yield
    finally:
        if not address.is_unspecified:
            for inode, listening in _wildcard_listeners():
                if inode not in before:
                    narrow(listening, str(address))


def narrow_port(host: str, port: int) -> bool:
    """Have a TCP port that this process listens on at every address answer at `host` (name or address) alone.

    Returns:
        False where this process has no such listener.
    """
    address = _numeric(host)
    narrowed = False
    for _, listening in _wildcard_listeners():
        if listening.getsockname()[1] == port:
            narrow(listening, str(address))
            narrowed = True
    return narrowed


def narrow(listening: socket.socket, address: str) -> None:
    """Drop what arrives at the socket for another address than `address` (numeric)."""
    program = b"".join(struct.pack("=HBBI", *instruction) for instruction in destination_filter(address))
    held = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: count of instructions, pointer to them; the kernel copies.
    filtering = struct.pack("HP", len(program) // 8, ctypes.addressof(held))
    listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filtering)


def destination_filter(address: str) -> list[tuple[int, int, int, int]]:
    """Classic BPF (code, jump if true, jump if false, operand) that passes one destination and drops all others: behind
    each check stands the drop, which a match jumps over.

    A dual-stack socket sees IPv4 packets with their IPv4 header: one version is all to look for.
    """
    drop = (_RETURN, 0, 0, _DROP)
    parsed = ipaddress.ip_address(address)
    start = _NETWORK_HEADER + (_V4_DESTINATION if parsed.version == 4 else _V6_DESTINATION)
    program = [(_LOAD_BYTE, 0, 0, _NETWORK_HEADER), (_AND, 0, 0, 0xF0), (_JUMP_EQUAL, 1, 0, parsed.version << 4), drop]
    for at, (word,) in enumerate(struct.iter_unpack("!I", parsed.packed)):
        program += [(_LOAD_WORD, 0, 0, start + 4 * at), (_JUMP_EQUAL, 1, 0, word), drop]
    return [*program, (_RETURN, 0, 0, _PASS)]


def _numeric(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


def _wildcard_listeners() -> Iterator[tuple[int, socket.socket]]:
    """(inode, socket) of this process's TCP sockets that listen on every address. Sockets are closed on the way."""
    import psutil  # whoever only writes addresses does without

    for one in psutil.Process().net_connections("tcp") if sys.platform.startswith("linux") else ():
        if one.status == psutil.CONN_LISTEN and ipaddress.ip_address(one.laddr.ip).is_unspecified:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(one.fd)) as listening:  # or closed since
                yield os.fstat(one.fd).st_ino, listening

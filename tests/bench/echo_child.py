"""A child for tests: answers every order with itself."""

from __future__ import annotations

from multiprocessing.connection import Connection


def main(pipe: Connection, greeting: str = "") -> None:
    pipe.send(greeting)
    for order in iter(pipe.recv, None):
        if order == "exit":
            raise SystemExit(1)
        if order == "fail":
            raise ValueError("told to fail")
        if order != "silent":
            pipe.send(order)

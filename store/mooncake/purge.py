"""`python -m store.mooncake.purge HOST:PORT` removes values from a Mooncake Store, leased or not; keys come by stdin.

A process of its own, because whoever asks (the command line) loads no Mooncake and can end this one when it hangs.
"""

from __future__ import annotations

import sys

from store.errors import StoreError
from store.mooncake.client import MooncakeConfig
from store.mooncake.tier import MooncakeStore


def purge(master: str, keys: list[str]) -> int:
    """How many of the keys were there.

    Raises:
        StoreError: Mooncake does not load, or its master does not answer in time.
    """
    pool = MooncakeStore.connect(MooncakeConfig(master=master))
    try:
        return sum(pool.remove(key) for key in keys)
    finally:
        pool.close()


def main() -> int:
    try:
        print(purge(sys.argv[1], sys.stdin.read().split()))
    except StoreError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

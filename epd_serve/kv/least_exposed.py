"""Where to cut L layers into packets: least exposed time, then fewest packets (EPD-Serve §3.3). Pure, exact.

Layer j is written at j·c. A packet of layers (i, j] starts at max(free, j·c), free being when the packets of 1 … i have
arrived, and takes a + s·(j − i). Its finish grows with `free`, so a best plan is made of best plans, and

    G(j) = min over i of  max(G(i), j·c) + a + s·(j − i),        j − i not below the floor

is the earliest finish of the layers 1 … j. Where the link is free by j·c the largest i is best (fewest layers left),
elsewhere the least G(i) − s·i; an i passes from the second kind to the first as j grows, and never back. So one heap
of G(i) − s·i answers every j, O(L·log L) in all: what is free by now leaves its top for good, and what is free further
down is no better than the top. With G on the right that of k − 1 packets, G is that of exactly k; with G itself on the
right, of any number.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush

MOST_COUNTED = 32
_ROUNDING = 1e-12  # relative: two sums of the same terms in another order are the same time


def fewest_packets(
    layers: int,
    *,
    least: int,
    layer_s: float,
    setup_s: float,
    send_s: float,
    backlog_s: float,
    slack_s: float,
    tolerance: float,
) -> tuple[int, ...]:
    """The cuts with the least exposed time, or within `tolerance` of it (relative), with the fewest packets.

    Args:
        layers: L, at least 1.
        least: layers of the smallest packet; a step of fewer leaves in one packet.
        layer_s, setup_s, send_s: c; a and s of a packet of m layers, a + s·m.
        backlog_s: the link is busy until then.
        slack_s: nobody waits until so long after the last layer.

    Returns:
        One past the last layer of each packet. Among plans of as many packets, the one that finishes first.
    """
    assert layers >= 1 and least >= 1 and min(layer_s, setup_s, send_s, backlog_s, slack_s, tolerance) >= 0
    least = min(least, layers)
    nothing = [backlog_s] + [math.inf] * layers
    earliest = nothing.copy()
    any_number = _one_more(earliest, earliest, least, layer_s, setup_s, send_s)
    due = layers * layer_s + slack_s
    exposed = max(0.0, earliest[layers] - due)
    due += exposed * (1.0 + tolerance)
    due += due * _ROUNDING
    before: list[list[int]] = []  # per number of packets: where the last packet of 1 … j begins
    finish = nothing
    while finish[layers] > due and len(before) < MOST_COUNTED:
        following = [math.inf] * (layers + 1)
        before.append(_one_more(finish, following, least, layer_s, setup_s, send_s))
        finish = following
    cuts = [layers]
    if finish[layers] > due:
        while any_number[cuts[-1]]:
            cuts.append(any_number[cuts[-1]])
    else:
        for begins in reversed(before[1:]):
            cuts.append(begins[cuts[-1]])
    return tuple(reversed(cuts))


def _one_more(
    free: list[float], finish: list[float], least: int, layer_s: float, setup_s: float, send_s: float
) -> list[int]:
    """Fill `finish[j]` with the earliest finish of one packet more than in `free`; where that packet begins, per j.

    `free` and `finish` may be the same list: entries are read after they are written.
    """
    begins = [0] * len(free)
    busy: list[tuple[float, int]] = []  # (free(i) − s·i, i)
    idle = -1  # the largest i that was seen to be free in time
    for j in range(least, len(free)):
        i, now = j - least, j * layer_s
        if free[i] < math.inf:
            heappush(busy, (free[i] - send_s * i, i))
        while busy and free[busy[0][1]] <= now:
            idle = max(idle, heappop(busy)[1])
        if idle >= 0:
            finish[j], begins[j] = now + setup_s + send_s * (j - idle), idle
        if busy:
            i = busy[0][1]
            at = free[i] + setup_s + send_s * (j - i)
            if idle < 0 or at < finish[j]:
                finish[j], begins[j] = at, i
    return begins

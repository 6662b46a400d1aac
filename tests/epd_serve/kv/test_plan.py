"""The packet plan is pure: every block leaves exactly once, in as few runs as the tables allow."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from epd_serve.kv.plan import Run, blocks_ready, coalesce

pairs = st.integers(0, 60).flatmap(
    lambda n: st.tuples(st.permutations(range(80)), st.permutations(range(80))).map(lambda t: (t[0][:n], t[1][:n]))
)


def blocks(runs: tuple[Run, ...]) -> list[tuple[int, int]]:
    return [(run.src + i, run.dst + i) for run in runs for i in range(run.count)]


@given(pairs)
def test_runs_hold_every_block_pair_exactly_once(tables: tuple[list[int], list[int]]) -> None:
    src, dst = tables
    assert blocks(coalesce(src, dst)) == sorted(zip(src, dst, strict=True))


def test_blocks_handed_out_in_reverse_are_one_run() -> None:
    assert coalesce(range(9, 0, -1), range(29, 20, -1)) == (Run(1, 21, 9),)


@given(st.integers(1, 500), st.integers(1, 64), st.lists(st.integers(1, 100)))
def test_chunks_send_every_block_once_and_the_partial_one_only_with_the_last(
    prompt: int, block_size: int, cuts: list[int]
) -> None:
    sent, end = 0, 0
    for cut in [*cuts, prompt]:
        end = min(prompt, end + cut)
        upto = blocks_ready(end, prompt, block_size)
        assert upto >= sent
        assert upto * block_size <= end or end == prompt
        sent = upto
    assert sent == -(-prompt // block_size)

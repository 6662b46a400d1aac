"""The logits processor: the first tokens of a request that goes on after them, and nothing else, whatever vLLM does
with the batch meanwhile. Of vLLM the parts that it talks to are real; all of vLLM is in tests/e2e."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.wire import GOES_ON_AFTER

VOCABULARY = 11
CPU = (torch.device("cpu"), False)
PACKAGE = "vllm.v1.sample.logits_processor"
OURS = "epd_serve.engine.forced_tokens"


@pytest.fixture(scope="module", autouse=True)
def vllm() -> Iterator[SimpleNamespace]:
    """Its logits processors' interface, without all that `import vllm` brings."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("needs vLLM")
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "vllm"}
    assert not before, "another test has imported vLLM"
    try:
        stubs: dict[str, dict[str, Any]] = {
            "vllm": {"SamplingParams": SimpleNamespace},
            "vllm.utils": {},
            "vllm.utils.torch_utils": {"async_tensor_h2d": None},
            PACKAGE: {"__path__": [str(Path(spec.origin).with_name("v1") / "sample" / "logits_processor")]},
        }
        for name, stub in stubs.items():
            sys.modules[name] = ModuleType(name)
            vars(sys.modules[name]).update(stub)
        interface, state = (importlib.import_module(f"{PACKAGE}.{name}") for name in ("interface", "state"))
        vars(sys.modules[PACKAGE]).update(vars(interface))
        ours = importlib.import_module(OURS)
        VLLM.update(vars(interface))
        VLLM.update(BatchUpdateBuilder=state.BatchUpdateBuilder, ForcedTokens=ours.ForcedTokens)
        yield SimpleNamespace(**VLLM)
    finally:
        VLLM.clear()
        for name in [name for name in sys.modules if name == OURS or name.split(".")[0] == "vllm"]:
            del sys.modules[name]


VLLM: dict[str, Any] = {}


def params(*tokens: int) -> Any:
    return having({GOES_ON_AFTER: list(tokens)} if tokens else {})


def having(named: dict[str, Any]) -> Any:
    transfer = {"transfer_id": "t", **named}
    return SimpleNamespace(extra_args={"kv_transfer_params": transfer})


def processor(*where: Any) -> Any:
    return VLLM["ForcedTokens"](configured(), *(where or CPU))


def configured(*more: str, asynchronous: bool = False) -> Any:
    """What is read of vLLM's configuration."""
    names = ["epd_serve.engine.forced_tokens:ForcedTokens", *more]
    return SimpleNamespace(
        model_config=SimpleNamespace(logits_processors=names),
        scheduler_config=SimpleNamespace(async_scheduling=asynchronous),
    )


def batch(size: int, **changes: Any) -> Any:
    return VLLM["BatchUpdate"](**{"batch_size": size, "removed": [], "added": [], "moved": [], **changes})


def forced(found: Any, rows: int, ctx: Any = None) -> dict[int, int]:
    """The rows that are left no choice, and what they must sample."""
    logits = torch.arange(rows * VOCABULARY, dtype=torch.float32).reshape(rows, VOCABULARY)
    before = logits.clone()
    assert found.apply(logits, ctx) is logits
    result = {}
    for row in range(rows):
        if torch.equal(logits[row], before[row]):
            continue
        (possible,) = torch.nonzero(logits[row] > float("-inf"), as_tuple=True)
        assert len(possible) == 1 and torch.isfinite(logits[row, possible[0]])
        result[row] = int(possible[0])
    return result


def test_the_first_token_is_forced_and_no_later_one() -> None:
    found, output = processor(), list[int]()
    found.update_state(batch(2, added=[(0, params(7), [1], output), (1, params(), [1], [])]))
    assert forced(found, 2) == {0: 7}
    found.update_state(None)
    assert forced(found, 2) == {0: 7}, "a step of a prompt that is computed in parts samples nothing that counts"
    output.append(-1)  # a placeholder, under asynchronous scheduling
    found.update_state(None)
    assert forced(found, 2) == {}


def test_one_token_after_the_other_is_forced() -> None:
    found, output = processor(), list[int]()
    found.update_state(batch(1, added=[(0, params(7, 3, 3, 5), [1], output)]))
    for token in (7, 3, 3, 5):
        assert forced(found, 1) == {0: token}
        output.append(-1)
        found.update_state(None)
    assert forced(found, 1) == {}


def test_a_request_that_is_preempted_begins_with_it_only_if_it_had_nothing() -> None:
    found = processor()
    found.update_state(batch(1, added=[(0, params(7), [1], [])]))
    found.update_state(batch(0, removed=[0]))
    assert forced(found, 1) == {}
    found.update_state(batch(1, added=[(0, params(7), [1], [])]))
    assert forced(found, 1) == {0: 7}
    found.update_state(batch(0, removed=[0]))
    found.update_state(batch(1, added=[(0, params(7), [1], [7, 8])]))  # resumed
    assert forced(found, 1) == {}
    found.update_state(batch(1, added=[(0, params(7, 8, 9), [1], [7, 8])]))
    assert forced(found, 1) == {0: 9}


@pytest.mark.parametrize("tokens", [True, 7, None, "7", [], ["7"], [7, True], [7, -1]])
def test_what_are_no_tokens_forces_nothing(tokens: Any) -> None:
    found = processor()
    named = having({GOES_ON_AFTER: tokens})
    found.update_state(batch(2, added=[(0, named, [1], []), (1, SimpleNamespace(extra_args=None), [1], [])]))
    assert forced(found, 2) == {}


@pytest.mark.parametrize("mask", [float("-inf"), float("nan")])
def test_a_token_that_was_masked_out_is_sampled_all_the_same(mask: float) -> None:
    found, logits = processor(), torch.full((1, VOCABULARY), mask)
    found.update_state(batch(1, added=[(0, params(7), [1], [])]))
    found.apply(logits)
    assert int(torch.argmax(logits[0])) == 7 and torch.softmax(logits[0], 0)[7] == 1


class Batch:
    """vLLM's batch, kept the simple way: rows of (tokens to be forced, output so far), in places that may be empty."""

    def __init__(self) -> None:
        self.rows: list[tuple[list[int], list[int]] | None] = []
        self.builder = VLLM["BatchUpdateBuilder"]()

    def remove(self, row: int) -> None:
        if self.rows[row] is not None:
            self.builder.removed_append(row)
            self.rows[row] = None

    def add(self, tokens: list[int], output: list[int]) -> None:
        row = self.builder.pop_removed()
        if row is None:
            row = len(self.rows)
            self.rows.append(None)
        self.rows[row] = (tokens, output)
        self.builder.added.append((row, params(*tokens), [1], output))

    def condense(self) -> None:
        """The last ones move to places that are still empty (0.32, `InputBatch.condense`)."""
        while self.rows and (None in self.rows):
            if self.rows[-1] is not None:
                place = self.builder.pop_removed()
                assert place is not None and self.rows[place] is None
                self.builder.moved.append((len(self.rows) - 1, place, VLLM["MoveDirectionality"].UNIDIRECTIONAL))
                self.rows[place] = self.rows[-1]
            self.rows.pop()

    def swap(self, one: int, other: int) -> None:
        self.builder.moved.append((one, other, VLLM["MoveDirectionality"].SWAP))
        self.rows[one], self.rows[other] = self.rows[other], self.rows[one]


rows = st.integers(0, 5)
joining = st.tuples(st.lists(st.integers(0, VOCABULARY - 1), max_size=4), st.integers(0, 3))  # tokens; output so far
steps = st.tuples(
    st.lists(rows, max_size=2), st.lists(joining, max_size=3), st.none() | st.tuples(rows, rows), st.booleans()
)


@given(st.lists(steps, max_size=20))
def test_every_request_is_forced_where_it_stands_in_the_batch(
    course: list[tuple[list[int], list[tuple[list[int], int]], tuple[int, int] | None, bool]],
) -> None:
    found, there = processor(), Batch()
    for leaving, joining, swapped, samples in course:
        for row in leaving:
            if row < len(there.rows):
                there.remove(row)
        for tokens, before in joining:
            there.add(tokens, [1] * before)
        there.condense()
        if swapped is not None and max(swapped) < len(there.rows):
            there.swap(*swapped)
        found.update_state(there.builder.get_and_reset(len(there.rows)))
        running = [row for row in there.rows if row is not None]
        left = {row: tokens[len(output) :] for row, (tokens, output) in enumerate(running)}
        expected = {row: tokens[0] for row, tokens in left.items() if tokens}
        assert forced(found, len(running)) == expected
        for _, output in running if samples else ():
            output.append(0)


def test_vllm_takes_it_for_one_of_its_own(vllm: SimpleNamespace) -> None:
    assert issubclass(vllm.ForcedTokens, vllm.LogitsProcessor)
    assert not processor().is_argmax_invariant(), "greedy requests are forced, too"


def test_the_second_model_runner_is_told_by_slot_and_by_what_the_model_has_seen() -> None:
    found = processor(SimpleNamespace(prompt_len=SimpleNamespace(np=np.array([4, 5, 6, 7]))))

    def ctx(*seen: tuple[int, int]) -> Any:
        slots, tokens = zip(*seen, strict=True)
        return SimpleNamespace(idx_mapping_np=np.array(slots), seq_lens_upper_bound_np=np.array(tokens))

    assert found.add_request(2, params(7, 8)) and not found.add_request(1, params())
    assert forced(found, 2, ctx((1, 5), (2, 4))) == {1: 7}, "a part of its prompt"
    assert forced(found, 2, ctx((1, 5), (2, 6))) == {1: 7}
    assert forced(found, 2, ctx((2, 7), (1, 6))) == {0: 8}, "its second token"
    assert forced(found, 2, ctx((2, 8), (1, 6))) == {}
    assert found.add_request(2, params(9)), "the slot's next request"
    assert forced(found, 1, ctx((2, 6))) == {0: 9}
    assert not found.add_request(2, params())
    assert forced(found, 1, ctx((2, 6))) == {}


class InputBatch:
    """As vLLM's, as far as this matters."""

    def __init__(self) -> None:
        self.logitsprocs_need_output_token_ids = True


@pytest.mark.parametrize(
    ("config", "waits"),
    [
        (configured(asynchronous=True), False),
        (configured(asynchronous=False), True),
        (configured("their:Own", asynchronous=True), True),
    ],
    ids=["asynchronous", "synchronous", "another processor"],
)
def test_no_step_waits_for_the_last_ones_tokens_on_our_account(
    monkeypatch: pytest.MonkeyPatch, config: Any, waits: bool
) -> None:
    batch_class = type("InputBatch", (InputBatch,), {"__init__": InputBatch.__init__})
    module = ModuleType("vllm.v1.worker.gpu_input_batch")
    vars(module)["InputBatch"] = batch_class
    monkeypatch.setitem(sys.modules, module.__name__, module)
    VLLM["ForcedTokens"](config, *CPU)
    assert batch_class().logitsprocs_need_output_token_ids is waits

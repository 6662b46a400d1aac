"""A use that a wheel does not bear is found, with its line; one that it bears is not."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract.facts import WheelFacts
from tests.contract.findings import Examined
from tests.contract.made_wheel import made_wheel
from tests.contract.reading import read

Reads = Callable[..., Examined]
FLAGS_FILE = "epd_serve/engine/argv.py"  # its lists hold flags of vLLM
BASE = "from vllm.distributed.ec_transfer.ec_connector.base import Base\n"


@pytest.fixture(scope="module")
def reads(tmp_path_factory: pytest.TempPathFactory) -> Reads:
    """Examines a source text against the made wheel."""
    facts = WheelFacts(made_wheel(tmp_path_factory.mktemp("wheel")), "vllm")

    def examine(text: str, path: str = "ours.py", probed: tuple[str, ...] = ()) -> Examined:
        return read(path, ast.parse(text), facts, "vllm", "vllm 1.0", frozenset(probed))

    return examine


def said(found: Examined) -> list[str]:
    return [str(finding) for finding in found.findings]


def test_a_symbol_that_does_not_exist_is_found_with_what_was_meant(reads):
    found = reads("import os\n\nfrom vllm.request import Requst\n")

    assert said(found) == ["ours.py:3: vllm 1.0: vllm.request.Requst does not exist; did you mean 'Request'?"]


def test_reexports_and_modules_are_no_findings(reads):
    found = reads("import vllm\nfrom vllm import Config\nfrom vllm import request\nvllm.config.Config()\n")

    assert said(found) == []
    assert {use.name for use in found.uses} >= {"vllm", "vllm.Config", "vllm.request", "vllm.config"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("request.itms", "vllm.request.Request has no 'itms'; did you mean 'items'?"),
        ("request.items[0].identifer", "vllm.request.Item has no 'identifer'; did you mean 'identifier'?"),
        ("[one.name for one in request.items]", "vllm.request.Item has no 'name'"),
        ("request.config.transfer.rol", "vllm.config.TransferConfig has no 'rol'; did you mean 'role'?"),
        ("request.finish('x').polcy", "vllm.config.Config has no 'polcy'; did you mean 'policy'?"),
        ("request.finish()", "vllm.request.Request.finish needs reason"),
        ("request.finish('x', 1.0)", "vllm.request.Request.finish takes 1 positional arguments, not 2"),
        ("request.finish('x', when=1.0)", "vllm.request.Request.finish takes no argument 'when'; it takes at"),
        ("make([])", "vllm.request.make needs config"),
        ("Request()", "vllm.request.Request needs items, config"),
        ("getattr(request, 'itms')", "vllm.request.Request has no 'itms'; did you mean 'items'?"),
        ("(held := request.config).policie", "vllm.config.Config has no 'policie'; did you mean 'policy'?"),
    ],
)
def test_a_wrong_use_of_a_typed_value_is_found(reads, body, message):
    text = f"from vllm.request import Request, make\n\n\ndef use(request: Request) -> None:\n    {body}\n"

    assert said(reads(text)) == [f"ours.py:5: vllm 1.0: {message}"]


def test_right_uses_are_no_findings(reads):
    text = """
from vllm.request import Request, make

class Ours:
    def __init__(self, request: Request) -> None:
        self._request = request

    def use(self) -> None:
        for item in self._request.items:
            item.identifier.upper()
        if self._request.is_done or self._request.finish("x", at=1.0).policy:
            make(self._request.items, self._request.config).config.transfer.extra.get("x")
"""
    found = reads(text)

    assert said(found) == []
    assert ("attribute", "vllm.request.Item:identifier") in {(use.kind, use.name) for use in found.uses}
    assert ("attribute", "vllm.config.TransferConfig:extra") in {(use.kind, use.name) for use in found.uses}


def test_attributes_that_methods_set_are_followed_whichever_comes_first(reads):
    text = """
from vllm.request import Request

class Ours:
    def use(self) -> None:
        self._request.itms

    def __init__(self, request: Request) -> None:
        self._request = request
"""
    assert said(reads(text)) == ["ours.py:6: vllm 1.0: vllm.request.Request has no 'itms'; did you mean 'items'?"]


@pytest.mark.parametrize(
    "body",
    [
        "getattr(request, 'newer', None)",
        "hasattr(request, 'newer')",
        "if hasattr(request, 'newer'):\n        request.newer()",
        "try:\n        from vllm.request import newer\n    except ImportError:\n        return",
    ],
)
def test_what_is_asked_for_at_run_time_is_a_probe_and_no_finding(reads, body):
    found = reads(f"from vllm.request import Request\n\n\ndef asks(request: Request) -> None:\n    {body}\n")

    assert said(found) == []
    assert [(probe.where, probe.found) for probe in found.probes][:1] == [("asks", False)]
    assert "newer" in found.probes[0].question


def test_an_import_error_that_is_raised_again_forgives_nothing(reads):
    text = "try:\n    from vllm.request import newer\nexcept ImportError as error:\n    raise SystemExit from error\n"

    assert said(reads(text)) == ["ours.py:2: vllm 1.0: vllm.request.newer does not exist"]


def test_a_missing_abstract_method_is_found_at_the_class(reads):
    found = reads(f"{BASE}\n\nclass Ours(Base):\n    def finished(self, request, count): ...\n")

    assert said(found) == [
        "ours.py:4: vllm 1.0: Ours lacks the abstract method 'load' of "
        "vllm.distributed.ec_transfer.ec_connector.base.Base"
    ]


LOAD = "    def load(self, items, **kwargs): ...\n"


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("def finishd(self, request, count): ...", "'finishd' is no method of {base}; did you mean 'finished'?"),
        ("def finished(self, request): ...", "finished does not take count, but {base} declares"),
        ("def finished(self, request, count, more): ...", "finished needs more, which nobody passes"),
        ("def never(self): ...", "'never' of {base} is never called, and nothing here asks whether it is"),
        (
            "def finished(self, *, request, count): ...",
            "finished takes 0 positional arguments, not 2, as vllm/",
        ),
        ("def go(self): self._private = 1", "Ours assigns '_private', which {base} keeps for itself"),
        ("def go(self): return self._privat", "{base} has no '_privat'; did you mean '_private'?"),
        ("def go(self): super().finished(1)", "{base}.finished needs count"),
    ],
)
def test_a_hook_that_does_not_fit_is_found(reads, method, message):
    found = reads(f"{BASE}\n\nclass Ours(Base):\n{LOAD}    {method}\n", probed=("go",))

    expected = message.format(base="vllm.distributed.ec_transfer.ec_connector.base.Base")
    assert [line for line in said(found) if line.startswith(f"ours.py:6: vllm 1.0: {expected}")]


def test_a_hook_that_the_engine_calls_with_a_keyword_must_take_it(reads):
    found = reads(f"{BASE}\n\nclass Ours(Base):\n    def load(self, items): ...\n")

    assert "ours.py:5: vllm 1.0: load takes no argument 'layer'; it takes none, as vllm/worker.py:3 calls it" in said(
        found
    )


def test_hooks_that_fit_are_noted_with_how_often_they_are_called(reads):
    found = reads(
        f"{BASE}\n\nclass Ours(Base):\n{LOAD}    def never(self): ...\n    def newer(self): ...\n",
        probed=("never", "newer"),
    )

    assert said(found) == []
    assert {(hook.method, hook.defined, hook.calls) for hook in found.hooks} == {
        ("load", True, 1),
        ("never", True, 0),
        ("newer", False, 0),
    }


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('["--polcy", "fcfs"]', "it has no flag --polcy; did you mean --policy?"),
        ('["--policy", "lifo"]', "--policy does not take 'lifo', only fcfs, priority"),
        ('["--no-policy"]', "it has no flag --no-policy; did you mean --policy?"),
        ('[f"--polcy={1}"]', "it has no flag --polcy; did you mean --policy?"),
        ('["--transfer-config", json.dumps({"rol": "producer"})]', "--transfer-config has no key 'rol'"),
        (
            '["--transfer-config", json.dumps({"role": "both"})]',
            "'role' of --transfer-config does not take 'both', only producer, consumer",
        ),
    ],
)
def test_a_flag_that_does_not_fit_is_found(reads, line, message):
    found = reads(f"import json\n\nargs = {line}\n", FLAGS_FILE)

    assert [text for text in said(found) if text.startswith(f"{FLAGS_FILE}:3: vllm 1.0: {message}")]
    assert len(found.findings) == 1


def test_flags_that_fit_are_no_findings_and_elsewhere_flags_are_not_looked_at(reads):
    config = 'config = {"role": "producer" if 1 else "consumer"}'
    right = f'{config}\nargs = ["--policy", "fcfs", "--no-enforce-eager", "--transfer-config", json.dumps(config)]\n'

    assert said(reads(right, FLAGS_FILE)) == []
    assert len([use for use in reads(right, FLAGS_FILE).uses if use.kind == "flag"]) == 3
    assert said(reads('args = ["--polcy"]\n')) == []


def test_environment_variables_and_dotted_names_must_be_known(reads):
    found = reads('env = {"VLLM_KNOWN": "1",\n"VLLM_UNKNOWN": "1"}\nnames = ["vllm.request",\n"vllm.reqest"]\n')

    assert said(found) == [
        "ours.py:2: vllm 1.0: VLLM_UNKNOWN is no environment variable of it: what is set here has no effect",
        "ours.py:4: vllm 1.0: vllm.reqest is neither a module nor an entry-point group",
    ]
    assert said(reads('group = "vllm.general_plugins"\n')) == []


def test_a_base_outside_the_wheel_leaves_members_unproved(tmp_path: Path):
    text = "import elsewhere\nclass Item: ...\nclass Request(elsewhere.Base): ...\n"
    facts = WheelFacts(made_wheel(tmp_path, request=text), "vllm")
    use = "from vllm.request import Request\ndef use(request: Request) -> None:\n    request.anything\n"
    found = read("ours.py", ast.parse(use), facts, "vllm", "vllm 1.0", frozenset())

    assert found.findings == []
    assert [one.name for one in found.unproved] == ["vllm.request.Request:anything"]


def test_words_of_another_package_are_held_against_it(tmp_path):
    facts = WheelFacts(made_wheel(tmp_path), "vllm_ascend")
    text = 'SCHEDULERS = {"items.nowhere_to_be_found": "a scheduler"}\n'
    examined = read(
        "deploy/options/stage_args.py", ast.parse(text), facts, "vllm_ascend", "vllm-ascend 1.0", frozenset()
    )

    assert said(examined) == [
        "deploy/options/stage_args.py:1: vllm-ascend 1.0: nowhere_to_be_found does not occur in it"
    ]

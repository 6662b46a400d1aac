"""A wired launch: who gets which address, what the proxy is told, how much shared memory is taken."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from deploy.agent.setup import AgentSetup
from deploy.agent.specs import orders
from deploy.agent.wiring import Net
from deploy.host.rundir import RunDir
from deploy.launch.ready_message import curl, endpoint_url, ready_message
from deploy.memory.shared_memory import SharedMemory, fit_shared_memory, usual_arena_mib, wanted_mib
from deploy.options.config import DeployConfig, proxy_values
from deploy.options.ways import draw_ways
from deploy.plan.blueprint import draw
from deploy.plan.machines import Machine, Machines
from deploy.plan.proxy_settings import build_proxy_settings
from epd_serve.engine.argv import FORCED_TOKENS, stage_command
from epd_serve.engine.kv.transports import quarantine_of_peers
from epd_serve.errors import ConfigError
from epd_serve.image_tokens import Resized
from epd_serve.layout_parser import parse
from epd_serve.peers import Peers, peer_of, write_peers
from epd_serve.placement import lower
from epd_serve.roles import Role
from npu_ops.properties import host_memory
from proxy.config.keys import ApiKeys
from tests.deploy.wired import RUN, Wired, wired


def test_features_and_kv_are_wired_between_the_right_instances() -> None:
    plan = wired("2E-P-D")
    encode, prefill, decode = (plan.wiring(name) for name in ("E1", "P0", "D0"))
    assert {one.peers for one in (encode, prefill, decode)} == {"/run/x/peers.json"}
    peers = {peer.instance: peer for peer in plan.peers()}
    assert {name: peer.role for name, peer in peers.items()} == {"E0": "E", "E1": "E", "P0": "P", "D0": "D"}
    assert encode.publish == peers["E1"].events == "ipc:///run/x/E1.events"
    assert prefill.publish == "ipc:///run/x/P0.events"
    assert encode.arena == prefill.arena == "/dev/shm/epd-abcd-arena"
    assert (prefill.kv_endpoint, decode.kv_endpoint, encode.kv_endpoint) == ("ipc:///run/x/P0.kv", "", "")
    assert decode.kv_worker_endpoint == "ipc:///run/x/D0.kvw{rank}"
    assert (peers["P0"].kv_endpoint, peers["D0"].kv_workers) == (prefill.kv_endpoint, ("ipc:///run/x/D0.kvw0",))
    assert (prefill.kv_staging, prefill.kv_staging_bytes) == ("/dev/shm/epd-abcd-kv", 8 << 20)


def test_encoders_are_told_where_to_write_features_only_where_that_is_asked_for() -> None:
    plan = wired("E-P-D", feature_transfer="device")
    assert [plan.wiring(name).push for name in ("E0", "P0", "D0")] == ["ipc:///run/x/E0.push", "", ""]
    assert {plan.wiring(name).feature_transfer for name in ("E0", "P0")} == {"device"}
    assert wired("E-P-D").wiring("E0").push == ""


def test_those_who_send_kv_tell_how_their_links_are_and_make_room_for_fetches() -> None:
    plan = wired("E-P:tp2-D:tp2", kv_grouping="fixed:3", kv_packet_floor_kib=64, kv_faults="drop=Ready:0.5")
    e, p, d = (plan.wiring(name) for name in ("E0", "P0", "D0"))
    assert [one.kv_publish for one in (e, p, d)] == ["", "ipc:///run/x/P0.kvnews{rank}", ""]
    assert [one.traffic for one in (e, p, d)] == ["", "/run/x/P0.traffic", ""]
    assert {(one.kv_grouping, one.kv_packet_floor_bytes, one.kv_faults) for one in (p, d)} == {
        ("fixed:3", 64 << 10, "drop=Ready:0.5")
    }


@pytest.mark.parametrize("layout", ["TP1", "E-P-D", "(E-PD)", "EP-D"])
def test_every_role_tells_how_busy_it_is(layout: str) -> None:
    plan = wired(layout)
    for one in plan.blueprint.plans:
        address = f"ipc:///run/x/{one.id}.load"
        assert plan.wiring(one.id).load_publish == plan.instance(one.id).load_news == address


def test_a_layout_without_encoders_has_no_arena() -> None:
    plan = wired("EP-D")
    assert all(plan.wiring(one.id).arena == "" for one in plan.blueprint.plans)
    assert [peer.events for peer in wired("TP1").peers()] == [""]


def test_the_proxy_is_told_where_ready_goes() -> None:
    plan = wired("E-P-D")
    told = plan.instance("P0", "i7")
    assert (told.url, told.incarnation, told.kv_endpoint) == ("unix:/run/x/P0.http", "i7", "ipc:///run/x/P0.kv")
    assert plan.instance("D0", "i7").kv_endpoint is None


@pytest.mark.parametrize(
    ("layout", "options", "flags", "warned"),
    [
        ("E-P-D", {}, [(), ()], False),
        ("P-D", {"stage_args": ("all:--seed 3", "P:--max-num-seqs 4")}, [("--seed 3",), ("--seed 3",)], False),
        ("P-D", {"stage_args": ("D:--seed 3",)}, [(), ("--seed 3",)], True),
        ("P-D", {"stage_args": ("D:--speculative-config {}",)}, [(), None], True),
        ("P-D", {"first_token": "decode", "stage_args": ("D:--seed 3",)}, [(), ("--seed 3",)], False),
        ("P-D", {"engine": "sim"}, [(), ()], False),
    ],
)
def test_who_may_answer_together_is_told_and_warned_of(
    layout: str, options: dict[str, Any], flags: list[Any], warned: bool
) -> None:
    plan = wired(layout, **options)
    assert [plan.instance(name).answer_flags for name in ("P0", "D0")] == flags
    assert any("first token" in line for line in plan.blueprint.warnings) is warned
    forced = [FORCED_TOKENS in stage_command(plan.stage(name)).argv for name in ("P0", "D0")]
    assert forced == [False, flags[1] is not None]


def test_the_proxy_is_told_where_the_workers_report_their_links_and_take_kv() -> None:
    plan = wired("E-P:tp2-D:tp2")
    e, p, d = (plan.instance(name, "i7") for name in ("E0", "P0", "D0"))
    assert p.kv_news == ("ipc:///run/x/P0.kvnews0", "ipc:///run/x/P0.kvnews1")
    assert d.kv_workers == ("ipc:///run/x/D0.kvw0", "ipc:///run/x/D0.kvw1")
    assert e.kv_news == e.kv_workers == p.kv_workers == d.kv_news == ()


def test_every_life_of_a_stage_becomes_a_command() -> None:
    plan = wired("(E-P)-D", stage_args=("D:--max-num-seqs 3",))
    command = stage_command(plan.stage("D0", "i9"))
    assert command.argv[-2:] == ("--max-num-seqs", "3")
    assert any('"incarnation": "i9"' in word for word in command.argv)
    assert plan.stage("E0").colocated == 2


def test_the_settings_of_the_proxy_follow_from_the_deployment(tmp_path: Path) -> None:
    plan = wired(
        "(E-P)-D",
        proxy=(
            f"media_root={tmp_path}",
            "media.max_bytes=5",
            "timeouts.encode_s=2",
            "media.allowed_domains=a.org, *.b.org",
            "key_limits.requests_per_minute=60",
        ),
    )
    keys = ApiKeys("5a" * 16)
    settings = build_proxy_settings(plan.blueprint, api_keys=keys)
    assert settings.served_models == ("epd-demo",)
    assert (settings.media.max_bytes, settings.timeouts.encode_s) == (5, 2.0)
    assert settings.media.allowed_domains == ("a.org", "*.b.org") and settings.key_limits.requests_per_minute == 60
    assert settings.media.allowed_local_root == str(tmp_path.resolve())
    assert settings.max_model_len == 8192
    assert settings.identity.dtype == "bfloat16"
    assert settings.identity.revision
    assert settings.api_keys is keys
    assert settings.modalities == {"image"}
    assert isinstance(settings.image_tokens, Resized) and settings.image_tokens.tokens(6 * 32, 6 * 32) == 36
    fewer = wired("(E-P)-D", stage_args=("E:--mm-processor-kwargs '{\"max_pixels\": 24576}'",))
    assert build_proxy_settings(fewer.blueprint).image_tokens == structs.replace(
        settings.image_tokens, max_pixels=24576
    )


@pytest.mark.parametrize(
    ("stage_args", "heed"),
    [
        ((), True),
        (("P:--scheduling-policy fcfs",), False),
        (("D:--scheduling-policy=fcfs",), False),
        (("D:--scheduling_policy fcfs",), False),
        (("all:--scheduling-policy fcfs", "P:--scheduling-policy priority", "D:--scheduling-policy priority"), True),
    ],
)
def test_the_proxy_knows_whether_stages_heed_priorities(stage_args: tuple[str, ...], heed: bool) -> None:
    assert build_proxy_settings(wired("P-D", stage_args=stage_args).blueprint).stage_priorities is heed
    said = wired("P-D", stage_args=stage_args, proxy=("stage_priorities=false",))
    assert build_proxy_settings(said.blueprint).stage_priorities is False


def test_front_doors_and_stages_send_their_traces_to_one_collector() -> None:
    url = "http://collector:4318/v1/traces"
    for plan in wired("P-D", otlp_traces_endpoint=url), wired("P-D", proxy=(f"otlp_traces_endpoint={url}",)):
        assert build_proxy_settings(plan.blueprint).otlp_traces_endpoint == url
        assert {plan.wiring(name).otlp_traces_endpoint for name in ("P0", "D0")} == {url}


def test_flags_of_the_mm_store_reach_the_proxy_and_the_stages() -> None:
    plan = wired(
        "E-P-D",
        send_pixels="always",
        on_missing_feature="reencode",
        tenant_header="X-Team",
        shared_features=True,
        recompute_limit=5,
        feature_prefetch="demand",
    )
    settings = build_proxy_settings(plan.blueprint, RUN.arena)
    assert (settings.send_pixels, settings.on_missing_feature) == ("always", "reencode")
    assert (settings.tenant_header, settings.shared_features) == ("X-Team", True)
    assert settings.arena == str(RUN.arena)
    wiring = plan.wiring("P0")
    assert (wiring.recompute_limit, wiring.feature_prefetch) == (5, "demand")
    assert (wiring.mooncake_master, wiring.mooncake_segment_bytes) == ("", 0)


def test_encoders_give_memory_to_the_second_tier_and_the_others_only_use_it() -> None:
    plan = wired("E-P-D", mooncake_segment_mib=64).with_master("127.0.0.1:5")
    encode, prefill = (plan.wiring(name) for name in ("E0", "P0"))
    assert (encode.mooncake_master, encode.mooncake_segment_bytes) == ("127.0.0.1:5", 64 << 20)
    assert (prefill.mooncake_master, prefill.mooncake_segment_bytes) == ("127.0.0.1:5", 0)


def on_npus(layout: str, **options: Any) -> Wired:
    """As if the plans' devices were NPUs."""
    plan = wired(layout, **options)
    ways = draw_ways(plan.blueprint.config, "npu", plan.blueprint.plans)
    machines = Machines((Machine("local", replace(plan.blueprint.inventory, kind="npu"), ()),))
    return replace(plan, blueprint=replace(plan.blueprint, ways=ways, machines=machines))


def test_pairs_on_one_npu_know_it_and_take_shared_memory_while_others_do_not(tmp_path: Path) -> None:
    plan, run = on_npus("(E-P-D)-D"), RunDir("abcd", tmp_path, tmp_path)
    plan = replace(plan, site=replace(plan.site, run=run))
    write_peers(run.peers, plan.peers())
    p, beside, away = (plan.wiring(name) for name in ("P0", "D0", "D1"))
    seen = Peers(p)
    assert seen.changed()
    assert [seen.beside(run.ipc(f"{name}.kvw0")) for name in ("D0", "D1")] == [True, False]
    assert [quarantine_of_peers(one, "npu")(p.kv_endpoint) for one in (beside, away)] == [0.0, 30.0]


def test_the_proxy_knows_where_the_arena_will_be_before_there_are_encoders() -> None:
    plan = wired("EP-D")
    assert build_proxy_settings(plan.blueprint, RUN.arena).arena == str(RUN.arena)
    assert build_proxy_settings(plan.blueprint).arena == ""


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("media.max_bytes", "not KEY=VALUE"),
        ("medai.max_bytes=1", "did you mean 'media.max_bytes'?"),
        ("media=1", "unknown proxy setting"),
        ("identity.model=x", "unknown proxy setting"),
        ("send_pixels=allways", "unknown proxy setting send_pixels 'allways'; did you mean 'always'?"),
        ("retries=many", "retries is 'many'; expected int"),
        ("retries=-1", "retries is '-1'; expected int >= 0"),
        ("media.allow_private_addresses=yes", "is 'yes'; expected true or false"),
    ],
)
def test_a_proxy_setting_that_is_wrong_is_named(entry: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        proxy_values([entry])
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("layout", "free", "fitted"),
    [
        ("(E-P)-D", 1000, (256, 64)),
        ("(E-P)-D", 300, (128, 32)),
        ("(E-P)-D", 64, (16, 4)),
        ("TP1", 1, (256, 64)),
        ("EP-D", 100, (256, 64)),
    ],
)
def test_shared_memory_shrinks_to_what_is_free(layout: str, free: int, fitted: tuple[int, int]) -> None:
    plans = lower(parse(layout), range(4))
    travel = any(plan.role is Role.E for plan in plans)
    assert fit_shared_memory(SharedMemory(256, 64), plans, features_travel=travel, free=free) == SharedMemory(*fitted)


@pytest.mark.parametrize(
    ("host_gib", "encoders", "free", "mib"),
    [
        (24, 1, 24 << 10, 384),  # a machine for development
        (24, 4, 12 << 10, 1536),
        (24, 16, 24 << 10, 3072),  # an eighth of its memory
        (4, 1, 2 << 10, 256),  # no less
        (1536, 8, 768 << 10, 8192),  # no more
        (1536, 8, 1 << 10, 512),  # half of /dev/shm
        (1536, 8, None, 8192),  # of another host
        (64, 1, 64, 256),  # a container: `fit_shared_memory` goes on from there
    ],
)
def test_the_arena_follows_the_machine(host_gib: int, encoders: int, free: int | None, mib: int) -> None:
    assert usual_arena_mib(host_gib << 30, encoders, free) == mib


def test_an_arena_that_was_asked_for_is_not_sized_by_the_machine() -> None:
    def arena_bytes(**options: int) -> int:
        blueprint = draw(DeployConfig(engine="sim", layout="2E-P-D", device="cpu", **options))
        return AgentSetup.of(RUN, blueprint, shm_mib=4096).arena_bytes

    assert arena_bytes(arena_mib=77) == 77 << 20
    assert arena_bytes() == usual_arena_mib(host_memory()[0], 2, 4096) << 20


@pytest.mark.parametrize(
    ("layout", "links"),
    [("P-D", 1), ("2P-D", 2), ("P:tp2-D:tp2", 2), ("P:tp2-D", 2), ("P-D:tp4", 4), ("P:tp2-D:tp3", 4)],
)
def test_every_pair_of_workers_that_shares_heads_has_staging_memory(layout: str, links: int) -> None:
    plans = lower(parse(layout), range(8))
    wanted = SharedMemory(256, 64)
    enough = 64 * links + 32
    assert fit_shared_memory(wanted, plans, features_travel=False, free=enough) == wanted
    assert fit_shared_memory(wanted, plans, features_travel=False, free=enough - 1).staging_mib == 32


def test_too_little_shared_memory_is_refused_with_the_fix() -> None:
    with pytest.raises(ConfigError, match="--shm-size=1g"):
        fit_shared_memory(SharedMemory(256, 64), lower(parse("E-P-D"), range(3)), features_travel=True, free=40)


def test_the_ready_message_shows_endpoint_placement_and_a_command() -> None:
    plan = wired("(E-P)-D", port=8123)
    message = ready_message(plan.blueprint, RUN.path, plan.instances(), 12.34)
    assert "Ready in 12.3 s: (E-P)-D on cpu serves epd-demo" in message
    assert "http://127.0.0.1:8123/v1" in message
    assert "data:image/png;base64," in message
    assert "P0        P       0    E0" in message


def test_the_command_to_try_names_a_reachable_address_and_the_key() -> None:
    blueprint = wired("TP1", host="0.0.0.0", api_key_file="secret").blueprint
    assert endpoint_url(blueprint) == "http://127.0.0.1:8000"
    shown = curl(blueprint, endpoint_url(blueprint))
    assert "$EPD_API_KEY" in shown
    assert "secret" not in shown


def test_more_virtual_devices_than_cores_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    assert draw(DeployConfig(layout="E-P-D", device="cpu")).warnings
    assert not draw(DeployConfig(layout="(E-P)-D", device="cpu")).warnings


def test_instances_are_placed_on_the_devices_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})

    blueprint = draw(DeployConfig(layout="E-P-D", device="cpu"), devices=(0, 3, 1))

    assert [plan.devices for plan in blueprint.plans] == [(0,), (3,), (1,)]
    assert [blueprint.cores_of(plan) for plan in blueprint.plans] == [(0,), (3,), (1,)]


def test_switchable_instances_have_the_addresses_of_both_parts_and_stand_for_each_other() -> None:
    plan = wired("E-P-D", switchable=True)
    e, p, d = (plan.instance(name) for name in ("E0", "P0", "D0"))
    for one in (p, d):
        assert (one.kv_endpoint, one.kv_workers) == (RUN.ipc(f"{one.id}.kv"), (RUN.ipc(f"{one.id}.kvw0"),))
        assert one.kv_news and plan.wiring(one.id).both
    assert not plan.wiring(e.id).both and e.kv_endpoint is None
    for_p, for_d = (orders(wired(layout, switchable=True).blueprint)[0].spec for layout in ("P-D", "D-P"))
    assert (for_p.role, for_d.role) == (Role.P, Role.D)
    assert for_p.both and for_p.stands_for(for_d)


def test_shared_memory_counts_a_link_each_way_between_switchable_instances() -> None:
    counts = [
        wanted_mib(SharedMemory(0, 1), wired("P-P-D", switchable=both).blueprint.plans, features_travel=False)
        for both in (False, True)
    ]
    assert counts == [2, 6]


@pytest.mark.parametrize(
    ("layout", "options", "field"),
    [("TP1", {}, "switchable"), ("P-D", {"stage_args": ("P:--max-num-seqs 4",)}, "stage_args")],
)
def test_what_cannot_switch_is_refused(layout: str, options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        wired(layout, switchable=True, **options)
    assert refused.value.param == field


def of_several_nodes(layout: str, host: str = "10.0.0.4", **options: Any) -> Wired:
    plan = wired(layout, **options)
    return replace(plan, site=replace(plan.site, net=Net("a", host, "/run/x/key", range(21000, 22000))))


@pytest.mark.parametrize(("host", "written"), [("10.0.0.4", "10.0.0.4"), ("fd00::4", "[fd00::4]")])
def test_on_a_node_of_several_every_socket_is_a_port_of_the_instances_own_block(host: str, written: str) -> None:
    plan = of_several_nodes("E-P:tp2-D:tp2", host)
    stages = [plan.stage(name) for name in ("E0", "P0", "D0")]
    assert {(one.host, one.guarded, one.wiring.host, one.wiring.node) for one in stages} == {(host, True, host, "a")}
    assert {one.wiring.key_file for one in stages} == {"/run/x/key"}
    p, d = plan.instance("P0"), plan.instance("D0")  # their blocks begin at 21001 and 21002
    assert (p.url, p.node) == (f"http://{written}:21001", "a")
    told = (p.kv_endpoint, p.events, p.load_news, *p.kv_news)
    assert told == tuple(f"tcp://{written}:{port}" for port in (21002, 21003, 21004, 21007, 21008))
    assert d.kv_workers == tuple(f"tcp://{written}:{port}" for port in (21006, 21007))
    assert plan.site.ports_of(orders(plan.blueprint)[1]) == 8 == 21008 - 21001 + 1
    assert [peer_of(one).node for one in (p, d)] == ["a", "a"]

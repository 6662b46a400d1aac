"""Devices: enough, free, and nobody else's."""

from __future__ import annotations

from dataclasses import replace

from deploy.doctor.check import Level
from npu_ops.properties import DeviceProperties, DeviceUser
from tests.deploy.doctor.machines import CPU, CUDA, GIB, NPU, found, serving, troubles, used_by

OTHER = DeviceUser(4711, "VLLMWorker_TP", 40 * GIB)


def test_a_device_in_use_by_others_is_warned_of_with_who_it_is() -> None:
    one = found(used_by(NPU, 3, OTHER), "device 3")
    assert one.level is Level.WARNING
    assert one.seen == "910B3, 10 of 64 GiB free; in use by VLLMWorker_TP (4711)"
    assert "ASCEND_RT_VISIBLE_DEVICES" in one.fix


def test_a_device_that_the_layout_leaves_alone_may_be_in_use() -> None:
    assert troubles(serving(used_by(NPU, 3, OTHER), "E-P-D")) == {}
    assert troubles(serving(used_by(NPU, 2, OTHER), "E-P-D")) == {"device 2": "warning"}


def test_memory_that_nobody_tells_of_is_unknown_and_not_free() -> None:
    facts = replace(CUDA, devices=(DeviceProperties(0, "NVIDIA GPU", note="nvidia-smi is not on PATH"),))
    assert "nvidia-smi is not on PATH" in found(facts, "device 0").seen


def test_no_device_of_the_kind_is_an_error_and_a_layout_that_does_not_fit_too() -> None:
    facts = replace(NPU, devices=(), devices_note="npu-smi is not on PATH")
    assert "npu-smi is not on PATH" in found(facts, "devices").seen
    refused = replace(CPU, wanted=replace(CPU.wanted, refusal="layout E-P-D needs 3 devices, found 1"))
    assert found(refused, "layout").level is Level.ERROR


def test_a_gpu_for_one_process_alone_is_an_error_where_stages_share_it() -> None:
    facts = replace(CUDA, compute_modes=("Exclusive_Process",))
    assert found(facts, "compute mode").level is Level.WARNING
    shared = found(serving(facts, "(E-PD)"), "compute mode")
    assert (shared.level, shared.fix) == (Level.ERROR, "sudo nvidia-smi -c DEFAULT")

"""GPU checks through a made-up NVML that answers like the real one: names, tuples, errors."""

from types import SimpleNamespace

import pytest

from megascale_jax.cluster.diagnose import gpu


class NVMLError(Exception):
    pass


class NVMLError_NotSupported(NVMLError):
    pass


class NVMLError_InvalidArgument(NVMLError):
    pass


class FakeNvml(SimpleNamespace):
    """``answers``: by function, a value, a function of (GPU, arguments), or an error to raise."""

    NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 0, 1, 0
    NVML_NVLINK_MAX_LINKS = 4
    NVML_NVLINK_ERROR_DL_REPLAY, NVML_NVLINK_ERROR_DL_RECOVERY, NVML_NVLINK_ERROR_DL_CRC_FLIT, NVML_NVLINK_ERROR_DL_CRC_DATA = range(4)
    nvmlClocksEventReasonHwSlowdown, nvmlClocksEventReasonSwThermalSlowdown = 8, 0x20
    nvmlClocksEventReasonHwThermalSlowdown, nvmlClocksEventReasonHwPowerBrakeSlowdown = 0x40, 0x80
    NVML_TEMPERATURE_GPU, NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = 0, 1

    def __init__(self, count=2, **answers):
        super().__init__(NVMLError=NVMLError, NVMLError_NotSupported=NVMLError_NotSupported)
        self.NVMLError_InvalidArgument = NVMLError_InvalidArgument
        healthy = {
            "nvmlInit": None,
            "nvmlShutdown": None,
            "nvmlDeviceGetCount": count,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetTotalEccErrors": 0,
            "nvmlDeviceGetRemappedRows": (0, 0, 0, 0),
            "nvmlDeviceGetNvLinkState": lambda gpu, link: 1,
            "nvmlDeviceGetNvLinkErrorCounter": 0,
            "nvmlDeviceGetCurrentClocksEventReasons": 0,
            "nvmlDeviceGetTemperature": 40,
            "nvmlDeviceGetTemperatureThreshold": 90,
            "nvmlDeviceGetPowerUsage": 300_000,
            "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetComputeRunningProcesses": [],
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=0),
        }
        self.answers = healthy | answers

    def __getattr__(self, name):
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def answer(*arguments):
            found = self.answers[name]
            if isinstance(found, Exception):
                raise found
            return found(*arguments) if callable(found) else found

        return answer


CHECKS = (gpu.gpu_memory, gpu.gpu_nvlink, gpu.gpu_clocks, gpu.gpu_free)


def only_on(wanted, value, otherwise=0):
    return lambda index, *rest: value if index == wanted else otherwise


@pytest.mark.parametrize("check", CHECKS)
def test_healthy_gpus_pass(check):
    found = check(lambda: FakeNvml())
    assert found.status == "pass" and found.numbers, found


@pytest.mark.parametrize(
    ("check", "answers", "status", "text"),
    [
        (gpu.gpu_memory, {"nvmlDeviceGetTotalEccErrors": lambda i, kind, _: kind * (i == 1)}, "fail", "GPU 1: 1 uncorrected ECC errors"),
        (gpu.gpu_memory, {"nvmlDeviceGetTotalEccErrors": lambda i, kind, _: 0 if kind else 5000}, "warn", "5000 corrected"),
        (gpu.gpu_memory, {"nvmlDeviceGetTotalEccErrors": NVMLError_NotSupported()}, "warn", "ECC is off"),
        (gpu.gpu_memory, {"nvmlDeviceGetRemappedRows": (0, 1, 1, 0)}, "fail", "waits to be remapped"),
        (gpu.gpu_memory, {"nvmlDeviceGetRemappedRows": (0, 1, 0, 1)}, "fail", "replace the GPU"),
        (
            gpu.gpu_memory,
            {"nvmlDeviceGetRemappedRows": NVMLError_NotSupported(), "nvmlDeviceGetRetiredPagesPendingStatus": 1},
            "fail",
            "page waits to be retired",
        ),
        (gpu.gpu_memory, {"nvmlDeviceGetHandleByIndex": NVMLError("GPU is lost")}, "fail", "GPU 0: NVML says GPU is lost"),
        (gpu.gpu_memory, {"nvmlInit": NVMLError("Driver/library version mismatch")}, "fail", "version mismatch"),
        (gpu.gpu_nvlink, {"nvmlDeviceGetNvLinkState": lambda i, link: int(link != 2)}, "fail", "GPU 0: NVLink 2 down"),
        (gpu.gpu_nvlink, {"nvmlDeviceGetNvLinkErrorCounter": lambda i, link, kind: int(kind == 1)}, "fail", "4 recovery"),
        (gpu.gpu_nvlink, {"nvmlDeviceGetNvLinkErrorCounter": lambda i, link, kind: 300 * (kind == 0)}, "warn", "1200 NVLink replays"),
        (gpu.gpu_nvlink, {"nvmlDeviceGetNvLinkState": NVMLError_NotSupported()}, "not_run", "no NVLink"),
        (gpu.gpu_clocks, {"nvmlDeviceGetCurrentClocksEventReasons": only_on(1, 0x48)}, "fail", "GPU 1: slowed down by heat (hardware)"),
        (gpu.gpu_clocks, {"nvmlDeviceGetCurrentClocksEventReasons": 0x08}, "fail", "slowed down by the hardware"),
        (gpu.gpu_clocks, {"nvmlDeviceGetTemperature": 88}, "warn", "88 °C, slowdown at 90 °C"),
        (gpu.gpu_clocks, {"nvmlDeviceGetCurrentClocksEventReasons": 0x05}, "pass", ""),
        (gpu.gpu_free, {"nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=4)]}, "fail", "in use by pid 4"),
        (gpu.gpu_free, {"nvmlDeviceGetMemoryInfo": SimpleNamespace(used=9 << 30)}, "fail", "9.0 GiB held, by no process"),
        (gpu.gpu_free, {"nvmlDeviceGetCount": 0}, "not_run", "has no GPU"),
    ],
)
def test_what_is_wrong_is_found(check, answers, status, text):
    found = check(lambda: FakeNvml(**answers))
    assert found.status == status and text in found.reason, found


def test_without_a_driver_nothing_runs_and_nothing_passes(tmp_path):
    for check in (*CHECKS, gpu.gpu_xid):
        found = check(lambda: gpu.load_nvml(tmp_path))
        assert (found.status, found.reason) == ("not_run", "no NVIDIA driver")


@pytest.mark.parametrize(
    ("line", "age_s", "status"),
    [
        ("NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.", 60, "fail"),
        ("NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.", 100_000, "pass"),
        ("NVRM: Xid (PCI:0000:3b:00): 94, Contained memory error", 60, "warn"),
        ("NVRM: Xid (PCI:0000:3b:00): 31, pid=7, MMU Fault", 60, "pass"),
        ("usb 1-1: new device", 60, "pass"),
    ],
)
def test_xids_of_the_last_day(line, age_s, status):
    found = gpu.gpu_xid(FakeNvml, lambda: [(age_s, line)])
    assert found.status == status
    if status == "fail":
        assert found.reason == "Xid 79 on 0000:3b:00: fell off the bus"


def test_a_kernel_log_that_may_not_be_read_is_not_run():
    assert "run as root" in gpu.gpu_xid(FakeNvml, lambda: None).reason

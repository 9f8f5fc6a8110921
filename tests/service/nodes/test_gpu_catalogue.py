"""The catalogue of GPU faults: the packaged one, a site's over it, and what a report becomes."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import ConfigError
from common.messages import GpuReport, RecoveryAction, XidCount
from common.model import GpuUuid
from coordinator.engine.state.events import FaultClass
from coordinator.service.nodes.gpu_catalogue import packaged, read_catalogue
from coordinator.service.nodes.gpu_facts import ECC
from coordinator.service.settings import CoordinatorSettings, GpuFaultSettings, check
from tests.tables import each_row

OUT = (38, 46, 48, 61, 62, 64, 74, 79, 94, 95, 109, 110, 119, 120, 123, 140, 143)
JOBS = (8, 11, 13, 31, 32, 37, 43, 68, 69)


def gpu(**fields: object) -> GpuReport:
    """A GPU that reports these."""
    base = {"uuid": GpuUuid("GPU-0"), "index": 0, "gpu_type": "H100", "memory_total_bytes": 1}
    return GpuReport(**{**base, **fields})  # type: ignore[arg-type]  # as a test says


def site(tmp_path: Path, text: str) -> str:
    """A site's file."""
    path = tmp_path / "site.toml"
    path.write_text(text)
    return str(path)


def test_the_packaged_catalogue_knows_what_takes_a_gpu_out_and_what_is_the_job_s() -> None:
    """By class; each entry has a meaning, and whoever has to act a next step."""
    found = packaged()
    kinds = {code: entry.kind for code, entry in found.by_xid.items()}
    assert {code for code, kind in kinds.items() if kind == FaultClass.GPU} == set(OUT)
    assert {code for code, kind in kinds.items() if kind == FaultClass.JOB} == set(JOBS)
    for entry in (*found.by_xid.values(), found.ecc):
        assert entry.meaning
        assert entry.next_step or entry.kind == FaultClass.INFO
    assert found.by_xid[64].needs_repair
    assert found.by_xid[79].needs_repair


def test_a_report_s_faults_are_told_by_the_catalogue() -> None:
    """XIDs with their counts, ECC errors once there is one, the driver's action as it is."""
    counts = (XidCount(code=13, count=2), XidCount(code=79, count=1), XidCount(code=998, count=1))
    fact = packaged().fact(
        gpu(xid_counts=counts, ecc_uncorrected_count=3, recovery_action=RecoveryAction.GPU_RESET)
    )
    assert [(one.what, one.count, one.kind) for one in fact.faults] == [
        ("XID 13", 2, FaultClass.JOB),
        ("XID 79", 1, FaultClass.GPU),
        ("XID 998", 1, FaultClass.INFO),
        (ECC, 3, FaultClass.GPU),
    ]
    assert fact.recovery == RecoveryAction.GPU_RESET
    assert packaged().fact(gpu(ecc_uncorrected_count=0)).faults == ()


def test_a_site_s_entry_goes_before_the_packaged_one(tmp_path: Path) -> None:
    """Only in what it says; XIDs that nobody knew are its own; all others stay."""
    text = """
    [xid.94]
    class = "job"
    [xid.998]
    class = "node"
    owner = "vendor"
    [ecc]
    class = "info"
    """
    found = read_catalogue(site(tmp_path, text))
    assert found.by_xid[94].kind == FaultClass.JOB
    assert found.by_xid[94].meaning == packaged().by_xid[94].meaning
    assert (found.by_xid[998].kind, found.by_xid[998].owner) == (FaultClass.NODE, "vendor")
    assert found.ecc.kind == FaultClass.INFO
    assert found.by_xid[79] == packaged().by_xid[79]


@each_row(
    "text, named",
    [
        ('[xid.94]\nclass = "gone"', "xid.94: Invalid enum value 'gone'"),
        ('[xid.94]\nclas = "gpu"', "xid.94: Object contains unknown field `clas`"),
        ("[xid.94]\nneeds_repair = 1", "xid.94: Expected `bool"),
        ('[xid.all]\nclass = "gpu"', "xid.all: expected a number"),
        ("[xid.998]\nmeaning = 'x'", "xid.998: class: is required"),
        ("[xids.94]", "unknown field `xids`"),
        ("[xid", "not TOML"),
        ("xid = 3", "Expected `object`"),
    ],
)
def test_an_entry_that_does_not_fit_is_named_when_settings_are_checked(
    tmp_path: Path, text: str, named: str
) -> None:
    """With the setting, the file, the entry, and what was expected: nothing starts on half."""
    file = site(tmp_path, text)
    settings = CoordinatorSettings(
        cell="c", nats_url="nats://127.0.0.1:4222", gpu_faults=GpuFaultSettings(catalogue=file)
    )
    with pytest.raises(ConfigError) as caught:
        check(settings)
    assert named in str(caught.value)
    assert str(caught.value).startswith(f"gpu_faults.catalogue: {file}: ")


def test_a_catalogue_that_is_not_there_is_told() -> None:
    """By the setting and the path."""
    with pytest.raises(ConfigError, match=r"gpu_faults\.catalogue: /nowhere\.toml: "):
        read_catalogue("/nowhere.toml")

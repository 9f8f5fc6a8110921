"""The distribution `aryl-client` on a real cell, in an interpreter with nothing else of Aryl."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from coordinator.demo.plan import CELL
from tests.harness.live.cell import running_cell

pytestmark = [pytest.mark.nats, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
ALONE = """\
import asyncio, json, sys
sys.path += [{site!r}, {wheel!r}]
import aryl_client

where = dict(nats_url={url!r}, cell={cell!r}, tenant="ops", user="ada")
spec = aryl_client.job_spec(dict(name="good", command=["sh", "-c", "echo hello; exit 0"],
    workers=dict(min=1, max=1), gpus_per_worker=1, workdir="/"))
said = {{}}

async def twice():
    async with aryl_client.connect_async(**where) as cell:
        long = aryl_client.job_spec(dict(name="long", command=["sleep", "600"],
            workers=dict(min=1, max=1), gpus_per_worker=1, workdir="/"))
        job = await cell.submit(long)
        try:
            await cell.wait(job.job_id, timeout_s=0.1)
        except TimeoutError:
            said["waits"] = True
        await cell.cancel(job.job_id)
        said["async"] = (await cell.wait(job.job_id, timeout_s=60)).state
        async for line in cell.follow_events(subject=job.job_id):
            said["event"] = line.what
            break

with aryl_client.connect(**where) as cell:
    first = cell.submit(spec, request_id="once")
    said["same"] = cell.submit(spec, request_id="once").job_id == first.job_id
    row = cell.wait(first.job_id, timeout_s=60)
    said["state"], said["exit_code"] = row.state, row.exit_code
    said["log"] = cell.logs(first.job_id).text
    said["nodes"] = len(cell.nodes())
    said["cell"] = cell.status().cell
    said["story"] = next(cell.follow_events(subject=first.job_id)).what
    try:
        cell.job("jnothing")
    except aryl_client.ApiRefused as refused:
        said["refused"] = refused.error.code
    asyncio.run(twice())
try:
    aryl_client.job_spec(dict(name="bad name", command=["x"], workers=dict(min=1, max=1)))
except aryl_client.ConfigError as error:
    said["field"] = str(error)
said["ours"] = sorted({{"agent", "common", "coordinator"}} & set(sys.modules))
print(json.dumps(said))
"""


def unpacked_wheel(directory: Path) -> Path:
    """The package as it is installed."""
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(directory))
    command = (sys.executable, "-m", "pip", "wheel", *options, str(ROOT / "clients/python"))
    subprocess.run(command, check=True, cwd=directory)
    [wheel] = directory.glob("aryl_client-*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(directory / "wheel")
    return directory / "wheel"


async def test_scripts_use_a_cell_with_the_client_alone(tmp_path: Path) -> None:
    """Submit, wait, logs, cancel, events and errors, with asyncio and without, and no module of
    ours under a name that a user's environment may have."""
    wheel = await asyncio.to_thread(unpacked_wheel, tmp_path)
    async with running_cell(tmp_path, training_nodes=1, inference_nodes=0) as harness:
        script = ALONE.format(
            site=sysconfig.get_path("purelib"),
            wheel=str(wheel),
            url=harness.cell.nats.url,
            cell=CELL,
        )
        # -S: the editable installation of Aryl is in a .pth file.
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", "-c", script, stdout=asyncio.subprocess.PIPE
        )
        data, _ = await process.communicate()
    said = json.loads(data)
    assert "field name" in said.pop("field")
    assert said.pop("event")
    assert said.pop("story")
    assert said == {
        "waits": True,
        "async": "cancelled",
        "same": True,
        "state": "succeeded",
        "exit_code": 0,
        "log": "hello\n",
        "nodes": 1,
        "cell": CELL,
        "refused": "not_found",
        "ours": [],
    }

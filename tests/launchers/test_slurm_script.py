"""The batch script of a stage: compared with golden files, parsed by bash, read by shellcheck.

After a wanted change: `python -m tests.launchers.test_slurm_script` writes the golden files anew.
"""

import dataclasses
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra_plugins.trainwright_launcher._slurm_reasons import in_words
from hydra_plugins.trainwright_launcher._slurm_script import render, slurm_time

from trainwright.config import RunConfig
from trainwright.errors import UserError
from trainwright.job import JobSpec
from trainwright.places import CONF

Parsed = Callable[..., RunConfig]
GOLDEN = Path(__file__).parents[1] / "golden" / "slurm"
SITE = ("launcher=slurm", "site.slurm.shared_dir=/fsx")
EVERY_KEY = (
    "site.slurm.partition='gpu,big'",
    "site.slurm.account=lab",
    "launcher.qos=high",
    "launcher.time=2-12:00:00",
    "launcher.gres='gpu:a100:8'",
    "launcher.constraint='efa&a100'",
    "launcher.exclusive=false",
    "launcher.cpus_per_task=96",
    "launcher.mem='0'",
    'launcher.nodelist="n[1-4]"',
    "launcher.exclude=n9",
    "launcher.reservation=maintenance",
    "launcher.mail_type='END,FAIL'",
    "launcher.mail_user=someone@example.org",
    "launcher.comment='second try, longer'",
    "launcher.signal_s=300",
    "launcher.max_requeues=0",
    "launcher.extra=['--licenses=matlab:1','--nice']",
    "launcher.setup=['module load cuda','ulimit -n 65536']",
    "launcher.srun_args=['--mpi=pmix']",
)
CONTAINER = (
    "hardware.accelerator=gpu",
    "hardware.devices=8",
    "launcher.container_image='nvcr.io#nvidia/nemo:24.03'",
    "launcher.container_mounts=['/data/my text:/data']",
)
# Golden file: overrides, and what differs in the job.
SCRIPTS = {
    "defaults.sh": ((), {}),
    "trn1.sh": (("model=tanuki_8b", "hardware=trn1", "site.slurm.partition=compute1"), {"devices": 32}),
    "every-key.sh": (EVERY_KEY, {"num_nodes": 4, "lane": "first-run-lane"}),
    "container.sh": (CONTAINER, {"devices": 8}),
    "awkward-names.sh": ((), {"run_dir": "/fsx/it's a $HOME 100%/r1", "python": "/opt/my python/bin/python"}),
}


def rendered(parsed: Parsed, name: str) -> str:
    overrides, changes = SCRIPTS[name]
    config = parsed(*SITE, *overrides)
    return render(dataclasses.replace(_job(config), **changes), config)


def _job(config: RunConfig) -> JobSpec:
    assert config.launcher.kind == "slurm"
    return JobSpec(
        run_id="r1",
        run_dir="/fsx/experiments/gpt_small/r1",
        stage="train",
        attempt=1,
        launch="torchrun",
        command=("-m", "anything"),
        python="python3",
        env={},
        num_nodes=1,
        devices=1,
        image=None,
        time_limit_s=config.launcher.time,
        grace_s=config.launcher.grace_s,
        files={},
        max_requeues=config.launcher.max_requeues,
    )


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_the_reviewed_one(name: str, parsed: Parsed) -> None:
    assert rendered(parsed, name) == (GOLDEN / name).read_text()


def test_every_golden_script_is_tested() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == set(SCRIPTS)


@pytest.mark.parametrize("name", SCRIPTS)
# SC2016: a dollar in single quotes; here it belongs to a name.
@pytest.mark.parametrize("reader", ["bash -n", "shellcheck --norc --exclude=SC2016"])
def test_a_script_is_good_bash(reader: str, name: str) -> None:
    read = subprocess.run([*reader.split(), GOLDEN / name], capture_output=True, text=True)
    assert (read.returncode, read.stdout + read.stderr) == (0, "")


def test_words_with_blanks_quotes_and_dollars_reach_the_worker_unchanged(parsed: Parsed) -> None:
    lines = rendered(parsed, "awkward-names.sh").splitlines()
    (worker,) = (line for line in lines if line.endswith("--stage train --attempt 1 \\"))
    run_dir = "/fsx/it's a $HOME 100%/r1"
    assert shlex.split(worker.removesuffix("\\"))[:3] == [
        "/opt/my python/bin/python",
        f"{run_dir}/run/worker.pyz",
        run_dir,
    ]


WITHOUT_ACCELERATOR = {"devices": 0, "num_nodes": 1, "stage": "convert"}
ACCELERATED = (
    "launcher.gres='gpu:8'",
    "launcher.constraint=efa",
    "launcher.nodelist=n1",
    "launcher.reservation=block",
    "launcher.mem=480G",
    "hardware.cpus=96",
)


def _script(parsed: Parsed, *overrides: str, **changes: object) -> str:
    config = parsed(*SITE, "site.slurm.partition=compute1", *ACCELERATED, *overrides)
    return render(dataclasses.replace(_job(config), **changes), config)  # type: ignore[arg-type]


def test_a_stage_without_accelerator_asks_for_none(parsed: Parsed) -> None:
    assert "--gres=gpu:8" in _script(parsed)
    here = _script(parsed, **WITHOUT_ACCELERATOR)
    assert "gres" not in here
    of_nodes = ("constraint=efa", "nodelist=n1", "reservation=block", "mem=480G", "cpus-per-task=96")
    for kept in ("partition=compute1", *of_nodes):
        assert f"--{kept}" in here
    elsewhere = _script(parsed, "launcher.cpu_partition=small", **WITHOUT_ACCELERATOR)
    assert "--partition=small" in elsewhere
    assert not any(word in elsewhere for word in ("gres", "compute1", *of_nodes))
    assert "--partition=compute1" in _script(parsed, "launcher.cpu_partition=small")


def test_a_script_has_the_cores_that_the_article_gives_a_trainium_node(parsed: Parsed) -> None:
    text = rendered(parsed, "trn1.sh")
    assert "#SBATCH --cpus-per-task=128\n" in text
    assert "--cpus-per-task=128 \\\n" in text.partition("srun \\\n")[2]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("launcher.time=100",), "use grace_s < signal_s < time"),
        (("launcher.signal_s=60",), "use grace_s < signal_s < time"),
        (("launcher.extra=['nice']",), "launcher.extra: 'nice' is no directive"),
        (('launcher.comment="two\\nlines"', "launcher.max_requeues=-1"), "launcher.max_requeues"),
        (("stages=[]",), "stages"),
        (("stages=[a]", "stages_from=b"), "stages_from: b with stages=['a']; give one of the two"),
    ],
)
def test_values_that_contradict_each_other_are_refused(overrides: tuple[str, ...], told: str, parsed: Parsed) -> None:
    with pytest.raises(UserError) as refused:
        parsed(*SITE, *overrides)
    assert told in str(refused.value)


@pytest.mark.parametrize(("seconds", "text"), [(60, "0-00:01:00"), (3599, "0-00:59:59"), (90_061, "1-01:01:01")])
def test_a_time_limit_reads_as_slurm_writes_it(seconds: int, text: str) -> None:
    assert slurm_time(seconds) == text


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("Priority", "Priority: jobs of higher priority come first; squeue --start -j 7 estimates when it starts"),
        ("PartitionTimeLimit", "lower launcher.time or change launcher.partition"),
        ("ReqNodeNotAvail, UnavailableNodes:n[2-3]", "ReqNodeNotAvail, UnavailableNodes:n[2-3]: nodes that it needs"),
        ("QOSMaxCpuPerUserLimit", "a limit of launcher.qos is reached; wait for other jobs to end"),
        ("AssocGrpNodeLimit", "a limit of launcher.account is reached"),
        ("MaxJobsPerAccount", "launcher.account has as many as it may"),
        ("SomethingNew", "SomethingNew; man squeue explains it under JOB REASON CODES"),
    ],
)
def test_a_reason_is_told_in_words_with_what_helps(reason: str, told: str) -> None:
    assert told in in_words(reason, "7")


def _parse(*overrides: str) -> RunConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return RunConfig.from_hydra(compose("config", [*overrides, "~local"]))


if __name__ == "__main__":
    for golden in SCRIPTS:
        (GOLDEN / golden).write_text(rendered(_parse, golden))

"""Any string passes from an override to the config, the record, the batch script and the node unchanged."""

import json
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hydra_plugins.trainwright_launcher._slurm_script import render
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.follow.conftest import Runs
from trainwright import app, dispatch, registry
from trainwright.config import RunConfig
from trainwright.job import JobSpec
from trainwright.node.run_paths import RunPaths

# No NUL and no lone surrogate: neither an argument nor a variable of a process can hold them.
TEXTS = st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), min_size=1, max_size=25)
KNOWN = [
    "", " ", "a b=c's $X,é", 'say "hi"', "\\", "a\\", '\\\\"', "${oc.env:HOME}", "${", "\\${x}", "\\\\${x", "$HOME",
    "a,b", "x=y", "-flag", "null", "true", "1e-3", "007", "12:00:00", "{}", "[a]", "a|b&c;d", "@pkg", "#no", "~local",
    "line\nline", "tab\t", "\r\n", "ü✓日本", "%j", "megatron--val_loss=9.72-step=50-consumed_samples=12800.0-last",
    "\x85\u2028\ufeff\x7f\x1b[0m",
]  # fmt: skip
SHOWS = (
    "import json, os, sys; print(json.dumps([sys.argv[2:], {k: v for k, v in os.environ.items() if k[:2] == 'V_'}]))"
)
# A fixture serves all examples of a test: what differs between them is made in the test.
SHARED_FIXTURES = [HealthCheck.function_scoped_fixture]


@given(texts=TEXTS)
@example(texts=KNOWN)
@settings(max_examples=8, deadline=None, suppress_health_check=SHARED_FIXTURES)
def test_any_text_reaches_the_node_as_it_was_given(texts: list[str], parsed: Callable[..., RunConfig]) -> None:
    overrides = [f"+launcher.env.V_{number}={app.quoted(text)}" for number, text in enumerate(texts)]
    wanted = {f"V_{number}": text for number, text in enumerate(texts)}
    with tempfile.TemporaryDirectory() as folder:
        record = Runs(parsed, Path(folder)).make((SHOWS,), *overrides, run_id="one")
        assert record.config.launcher.env == wanted
        frozen = registry.read_record(record.run_dir, 1)
        assert frozen["config"]["launcher"]["env"] == wanted
        assert frozen["overrides"][:-1] == overrides
        (job,) = record.jobs
        job = replace(job, command=(*job.command, *texts))
        RunPaths(record.run_dir).job(1, "s0").write_text(job.to_json(), encoding="utf-8")
        dispatch.submit_and_follow([replace(record, jobs=(job,))])
        shown = RunPaths(record.run_dir).rank_log("s0", 1, 0).read_text()
        assert json.loads(shown) == [texts, wanted]


@pytest.fixture
def on_slurm(runs: Runs, parsed: Callable[..., RunConfig]) -> tuple[RunConfig, JobSpec]:
    (job,) = runs.make((SHOWS,), run_id="one").jobs
    return parsed("launcher=slurm", "launcher.exclusive=false"), job


@given(texts=TEXTS)
@example(texts=KNOWN)
@settings(max_examples=25, deadline=None, suppress_health_check=SHARED_FIXTURES)
def test_a_batch_script_starts_exactly_the_command(texts: list[str], on_slurm: tuple[RunConfig, JobSpec]) -> None:
    """Words, directories and directives with any text in them, as bash and sbatch read them."""
    config, job = on_slurm
    directive = " ".join("".join(texts).split()) or "x"  # a directive is one line, and so are paths in it
    launcher = config.launcher.model_copy(update={"srun_args": tuple(texts), "comment": directive})
    with tempfile.TemporaryDirectory() as folder:
        job = replace(job, run_dir=f"{folder}/{directive.replace('/', '_')}")
        script = render(job, config.model_copy(update={"launcher": launcher}))
        srun = Path(folder, "srun")
        srun.write_text('#!/bin/bash\nprintf "%s\\0" "$@" > "$SEEN"\n')
        srun.chmod(0o755)
        environment = {"PATH": f"{folder}:/usr/bin:/bin", "SEEN": f"{folder}/seen"}
        asked = subprocess.run(["bash"], input=script.encode(), env=environment, capture_output=True)
        assert (asked.returncode, asked.stderr) == (0, b"")
        seen = Path(folder, "seen").read_bytes().decode().split("\0")[:-1]
    worker = [job.python, str(RunPaths(job.run_dir).worker), job.run_dir, "--stage", "s0", "--attempt", "1"]
    assert seen[-len(worker) - len(texts) :] == [*texts, *worker]
    (line,) = (line for line in script.split("\n") if line.startswith("#SBATCH --comment="))
    assert shlex.split(line.removeprefix("#SBATCH "))[0] == f"--comment=trainwright:one:s0:1 {directive}"

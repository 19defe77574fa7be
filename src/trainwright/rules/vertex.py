"""Rules of launcher=vertex: what Vertex AI would refuse, or let run otherwise than meant.

Only what is impossible stops a run; what is known from memory, or changes with time, is a warning.
"""

import difflib
import re
from collections.abc import Iterator

from trainwright.config_backend import NemoBackend
from trainwright.config_launcher import VertexLauncher
from trainwright.rules.case import Case, Rule, is_below
from trainwright.rules.vertex_machines import (
    ACCELERATORS,
    FIXED,
    FLEX_START,
    N1,
    NEEDS_SPOT_OR_FLEX_START,
    NO_ACCELERATOR,
    REGIONS,
    has_bfloat16,
)

_MAX_ENV, _MAX_LABELS, _OWN_LABELS = 100, 64, 3
_LABEL_KEY, _LABEL_VALUE = re.compile(r"[a-z][a-z0-9_-]{0,62}"), re.compile(r"[a-z0-9_-]{0,63}")
_LONGEST_FLEX_START_S = 7 * 24 * 3600


def _vertex(case: Case) -> VertexLauncher | None:
    launcher = case.config.launcher
    return launcher if isinstance(launcher, VertexLauncher) else None


def _machine(case: Case) -> Iterator[tuple[str, str]]:
    launcher, hardware = _vertex(case), case.config.hardware
    if launcher is None or hardware.accelerator == "neuron":  # refused by `accelerator`
        return
    machine, kind, count = launcher.machine, hardware.accelerator_type, hardware.devices
    if machine is None:
        yield "launcher.machine=null: Vertex AI must be told a machine type", "use launcher.machine=n1-standard-8"
        return
    if hardware.accelerator == "cpu":
        if machine in FIXED:
            has_kind, has_count = FIXED[machine]
            yield (
                f"launcher.machine={machine} has {has_count} {has_kind}, but hardware.accelerator=cpu",
                "use launcher.machine=n1-standard-8, or hardware with that accelerator",
            )
        return
    if kind not in ACCELERATORS:
        close = difflib.get_close_matches((kind or "").upper(), ACCELERATORS, n=1)
        fits = f"did you mean {close[0]}?" if close else f"use one of {', '.join(ACCELERATORS)}"
        yield f"hardware.accelerator_type={kind} is no accelerator of Vertex AI", fits
        return
    if machine.startswith(NO_ACCELERATOR):
        yield (
            f"launcher.machine={machine} takes no accelerators, but hardware.accelerator_type={kind}",
            "use an n1, g2, a2 or a3 machine",
        )
    elif machine in FIXED and FIXED[machine] != (kind, count):
        has_kind, has_count = FIXED[machine]
        yield (
            f"launcher.machine={machine} has {has_count} {has_kind}, but hardware has {count} {kind}",
            f"use hardware.devices={has_count} hardware.accelerator_type={has_kind}, or another machine",
        )
    elif machine in N1:
        counts = N1[machine].get(kind, ())
        fitting = [name for name, kinds in N1.items() if count in kinds.get(kind, ())]
        if count not in counts:
            yield (
                f"launcher.machine={machine} takes {' or '.join(map(str, counts)) or 'no'} {kind}, not {count}",
                f"use {' or '.join(fitting)}" if fitting else "use another hardware.devices or another machine",
            )


def _machine_doubts(case: Case) -> Iterator[tuple[str, str]]:
    launcher, hardware = _vertex(case), case.config.hardware
    if launcher is None or launcher.machine is None or hardware.accelerator != "gpu":
        return
    machine, kind = launcher.machine, hardware.accelerator_type or ""
    if machine not in FIXED and machine not in N1 and not machine.startswith(NO_ACCELERATOR):
        yield f"launcher.machine={machine} is not among the machine types known here", "look it up before you submit"
    if machine in NEEDS_SPOT_OR_FLEX_START and launcher.strategy == "STANDARD" and launcher.reservation is None:
        yield (
            f"launcher.machine={machine} is said to come with launcher.strategy=SPOT or FLEX_START only",
            "use one of them, or a3-highgpu-8g",
        )
    for location in launcher.all_locations:
        if kind in REGIONS and location not in REGIONS[kind] and "<site." not in location:
            yield (
                f"{kind} is not known to be in {location}",
                f"look it up, or use one of {', '.join(sorted(REGIONS[kind]))}",
            )


def _bfloat16(case: Case) -> Iterator[tuple[str, str]]:
    kind, precision, backend = case.config.hardware.accelerator_type, case.config.trainer.precision, case.config.backend
    has_engine = isinstance(backend, NemoBackend) and backend.transformer_engine
    wanted = {
        f"trainer.precision={precision}": (precision.startswith("bf16"), "trainer.precision=16-mixed"),
        "backend.transformer_engine=true": (has_engine, "backend.transformer_engine=false"),
    }
    found = {key: remedy for key, (is_wanted, remedy) in wanted.items() if is_wanted}
    if found and not has_bfloat16(kind):
        major, minor = divmod(ACCELERATORS[str(kind)], 10)
        yield (
            f"{' and '.join(found)} on {kind} (compute capability {major}.{minor}): bfloat16 begins with 8.0, and "
            "with it fused attention; below it is emulated and slow, or missing",
            f"use {' and '.join(found.values())}, or allow=[bf16-on-t4]",
        )


def _bucket(case: Case) -> Iterator[tuple[str, str]]:
    launcher, exp_dir = _vertex(case), case.config.exp_manager.exp_dir
    if launcher is not None and "<site." not in exp_dir and not is_below(exp_dir, launcher.bucket_mount):
        yield (
            f"exp_manager.exp_dir={exp_dir} is not below launcher.bucket_mount={launcher.bucket_mount}, so it is gone "
            "with the nodes",
            f"use exp_manager.exp_dir={launcher.bucket_mount}/BUCKET/experiments",
        )
    if launcher is not None and launcher.scratch_dir is None:
        yield (
            "launcher.scratch_dir=null: files that grow would be sent to the bucket whole with each line, or lost",
            "use launcher.scratch_dir=/tmp/trainwright, or allow=[vertex-bucket] if that is no bucket",
        )


def _bucket_problems(case: Case) -> Iterator[tuple[str, str]]:
    yield from case.facts.bucket_problems


def _environment(case: Case) -> Iterator[tuple[str, str]]:
    launcher = _vertex(case)
    if launcher is None:
        return
    env = {**case.config.hardware.rank_env, **launcher.env}
    odd = [name for name in env if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)]
    if odd:
        yield f"launcher.env: {odd[0]!r} is no name that Vertex AI takes", "use letters, digits and _ only"
    count = len({*env, *launcher.env_from})
    if count > _MAX_ENV:
        yield f"launcher.env and env_from hold {count} variables, Vertex AI takes {_MAX_ENV}", "write them to a file"


def _labels(case: Case) -> Iterator[tuple[str, str]]:
    launcher = _vertex(case)
    if launcher is None:
        return
    for key, value in launcher.labels.items():
        if not _LABEL_KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
            yield (
                f"launcher.labels: {key}={value} is no label",
                "use up to 63 of a-z, 0-9, _ and - for each; a key begins with a letter",
            )
        if key.startswith("trainwright_"):
            yield f"launcher.labels: {key} is ours, jobs are found by it", "use another key"
    if len(launcher.labels) > _MAX_LABELS - _OWN_LABELS:
        yield f"launcher.labels has {len(launcher.labels)} labels", f"use at most {_MAX_LABELS - _OWN_LABELS}"


def _one_region(case: Case) -> Iterator[tuple[str, str]]:
    launcher = _vertex(case)
    if launcher is None:
        return
    if launcher.tensorboard is not None and launcher.service_account is None:
        yield "launcher.tensorboard needs launcher.service_account", "set site.vertex.service_account"
    if launcher.tensorboard is not None and not launcher.bucket_url.startswith("gs://"):
        yield f"launcher.tensorboard needs a bucket, but launcher.bucket_url={launcher.bucket_url}", "use gs://"
    for key, value in (("tensorboard", launcher.tensorboard), ("encryption_key", launcher.encryption_key)):
        found = re.search(r"/locations/([^/]+)/", value or "")
        if value is not None and found is None:
            yield f"launcher.{key}={value} is no full name", "write projects/P/locations/L/..."
        elif found is not None and found.group(1) != launcher.location:
            yield f"launcher.{key}={value} is not in launcher.location={launcher.location}", "use one that is there"
    bound = [key for key in ("tensorboard", "encryption_key", "persistent_resource") if getattr(launcher, key)]
    if launcher.locations and bound:
        yield (
            f"launcher.{bound[0]} lies in one region, but launcher.locations={list(launcher.locations)} names more",
            "set launcher.locations=[] or leave it out",
        )


def _strategy(case: Case) -> Iterator[tuple[str, str]]:
    launcher, hardware = _vertex(case), case.config.hardware
    if launcher is None:
        return
    strategy = launcher.strategy
    own_machines = [key for key in ("persistent_resource", "reservation") if getattr(launcher, key) is not None]
    if strategy != "STANDARD" and own_machines:
        yield (
            f"launcher.strategy={strategy} takes other machines than launcher.{own_machines[0]}",
            "use launcher.strategy=STANDARD or leave the other out",
        )
    if strategy == "FLEX_START" and launcher.time > _LONGEST_FLEX_START_S:
        yield f"launcher.time={launcher.time} s is more than the 7 days of FLEX_START", "use 7-00:00:00 or less"
    if strategy == "FLEX_START" and hardware.accelerator_type not in FLEX_START:
        yield (
            f"launcher.strategy=FLEX_START brings no hardware.accelerator_type={hardware.accelerator_type}",
            f"use one of {', '.join(FLEX_START)}, or another strategy",
        )


def _strategy_doubts(case: Case) -> Iterator[tuple[str, str]]:
    launcher, num_nodes = _vertex(case), case.config.hardware.num_nodes
    if launcher is None:
        return
    if launcher.max_wait_s is not None and launcher.strategy != "FLEX_START":
        yield f"launcher.max_wait_s={launcher.max_wait_s} counts with launcher.strategy=FLEX_START only", "leave it out"
    if launcher.tensorboard is not None and isinstance(case.config.backend, NemoBackend):
        yield (
            "launcher.tensorboard shows RUN_DIR/logs, where NeMo writes no curves",
            "set it to null; trainwright tensorboard --upload brings them there",
        )
    if launcher.strategy == "SPOT" and launcher.disable_retries:
        yield (
            "launcher.strategy=SPOT with disable_retries=true: the first machine taken away ends the run",
            "set it false",
        )
    elif not launcher.restart_on_worker_restart and num_nodes > 1:
        yield (
            "launcher.restart_on_worker_restart=false: after one node is replaced, the others wait for it for ever",
            "set it true",
        )


def _visible_env(case: Case) -> Iterator[tuple[str, str]]:
    launcher = _vertex(case)
    if launcher is not None and launcher.env_from:
        yield (
            f"launcher.env_from: Vertex AI keeps {', '.join(launcher.env_from)} in the job, where all read it who may "
            f"view jobs of project {launcher.project}",
            "use a token that may do little and revoke it afterwards; allow=[vertex-env-from]",
        )


RULES: tuple[Rule, ...] = (
    Rule(
        id="vertex-machine",
        severity="error",
        condition="launcher=vertex has no machine of that type with so many of these accelerators",
        source="facts of machine types, rules/vertex_machines.py; google.cloud.aiplatform.v1, accelerator_type.proto",
        find=_machine,
    ),
    Rule(
        id="vertex-machine-doubt",
        severity="warning",
        condition="the machine type, or the accelerator in that region, is not known here",
        source="rules/vertex_machines.py: from memory, and it changes",
        find=_machine_doubts,
    ),
    Rule(
        id="bf16-on-t4",
        severity="warning",
        condition="bfloat16, or NeMo's Transformer Engine, on a GPU without bfloat16; the first article ran so",
        source="CUDA C++ Programming Guide: __nv_bfloat16 arithmetic begins with compute capability 8.0",
        find=_bfloat16,
    ),
    Rule(
        id="vertex-bucket",
        severity="error",
        condition="the runs of launcher=vertex lie where only a node's own disk is, or append to files in a bucket",
        source="Vertex AI mounts buckets below /gcs",
        find=_bucket,
    ),
    Rule(
        id="bucket",
        severity="error",
        condition="the bucket of exp_manager.exp_dir is missing, or does not let this command write the run's record",
        source="an object is created and removed there before a real run",
        find=_bucket_problems,
    ),
    Rule(
        id="vertex-env",
        severity="error",
        condition="more than 100 variables, or a name that is none",
        source="env_var.proto; custom_job.proto: ContainerSpec.env, at most 100",
        find=_environment,
    ),
    Rule(
        id="vertex-labels",
        severity="error",
        condition="launcher.labels breaks the rules of labels or takes one of ours",
        source="custom_job.proto: CustomJob.labels; cloud.google.com/resource-manager/docs/labels-overview",
        find=_labels,
    ),
    Rule(
        id="vertex-region",
        severity="error",
        condition="TensorBoard, key or persistent resource do not fit to region, account or bucket of the job",
        source="custom_job.proto: CustomJobSpec.tensorboard, CustomJob.encryption_spec",
        find=_one_region,
    ),
    Rule(
        id="vertex-strategy",
        severity="error",
        condition="launcher.strategy contradicts time, accelerator, reservation or persistent resource",
        source="cloud.google.com/vertex-ai/docs/training/schedule-jobs-dws, Requirements",
        find=_strategy,
    ),
    Rule(
        id="vertex-strategy-doubt",
        severity="warning",
        condition="a key that does nothing with this strategy or backend, or a job that cannot go on after a restart",
        source="custom_job.proto: Scheduling",
        find=_strategy_doubts,
    ),
    Rule(
        id="vertex-env-from",
        severity="warning",
        condition="launcher.env_from on launcher=vertex: the API shows the values of a job's variables",
        source="custom_job.proto: ContainerSpec.env is part of the job that GetCustomJob returns",
        find=_visible_env,
    ),
)

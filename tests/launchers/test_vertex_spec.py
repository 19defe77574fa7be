"""The CustomJobSpec of a stage: compared with golden files, with the first article's, and read by Google's parser.

After a wanted change: `python -m tests.launchers.test_vertex_spec` writes the golden files anew.
"""

import dataclasses
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.cloud.aiplatform_v1 import CustomJob, CustomJobSpec
from google.protobuf import json_format
from hydra import compose, initialize_config_dir
from hydra_plugins.trainwright_launcher import _vertex_spec as made
from hydra_plugins.trainwright_launcher._vertex_client import refuse_invalid

from trainwright.config import RunConfig
from trainwright.config_launcher import VertexLauncher
from trainwright.errors import UserError
from trainwright.job import JobSpec
from trainwright.places import CONF

Parsed = Callable[..., RunConfig]
GOLDEN = Path(__file__).parents[1] / "golden" / "vertex"
SITE = ("launcher=vertex", "site.vertex.project=my-project", "site.vertex.bucket=my-bucket")
IMAGE = "launcher.image=us-central1-docker.pkg.dev/my-project/images/train:1"
EVERY_KEY = (
    "hardware=h100",
    IMAGE,
    "site.vertex.service_account=trainer@my-project.iam.gserviceaccount.com",
    "site.vertex.network=projects/1234567890/global/networks/default",
    "launcher.boot_disk_type=hyperdisk-balanced",
    "launcher.boot_disk_size_gb=500",
    "+launcher.labels.team=speech",
    "launcher.strategy=FLEX_START",
    "launcher.max_wait_s=0",
    "launcher.time=2-00:00:00",
    "launcher.disable_retries=true",
    "launcher.persistent_resource=my-machines",
    "launcher.reservation=projects/p/zones/us-central1-a/reservations/r",
    "launcher.tensorboard=projects/1234567890/locations/us-central1/tensorboards/7",
    "launcher.enable_web_access=true",
    "launcher.encryption_key=projects/p/locations/us-central1/keyRings/r/cryptoKeys/k",
    "launcher.debug=true",
)
# Golden file: overrides, and what differs in the job.
SPECS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "t4.yaml": (("hardware=t4",), {"num_nodes": 4, "devices": 2, "image": "us-central1-docker.pkg.dev/p/r/nemo:1"}),
    "h100.yaml": (("hardware=h100", IMAGE), {"devices": 8}),
    "every-key.yaml": (
        EVERY_KEY,
        {"num_nodes": 2, "devices": 8, "env": {"B": "$(A) and $HOME", "A": "1"}, "env_from": ("HF_TOKEN",)},
    ),
    "processor.yaml": (("launcher.machine=n1-standard-8", "launcher.reservation=any", IMAGE), {}),
}


def job_of(config: RunConfig, **changes: Any) -> JobSpec:
    launcher = config.launcher
    assert isinstance(launcher, VertexLauncher)
    job = JobSpec(
        run_id="gpt_small-20261129-120000-ab12",
        run_dir="/gcs/my-bucket/nemo-experiments/gpt_small/gpt_small-20261129-120000-ab12",
        stage="train",
        attempt=1,
        launch="torchrun",
        command=("-m", "anything"),
        python=launcher.python,
        env={},
        num_nodes=1,
        devices=1,
        image=None,
        time_limit_s=launcher.time,
        grace_s=launcher.grace_s,
        files={},
    )
    return dataclasses.replace(job, **changes)


def rendered(parsed: Parsed, name: str) -> str:
    overrides, changes = SPECS[name]
    config = parsed(*SITE, *overrides)
    return made.render(job_of(config, **changes), config)


@pytest.mark.parametrize("name", SPECS)
def test_a_spec_is_the_reviewed_one(name: str, parsed: Parsed) -> None:
    assert rendered(parsed, name) == (GOLDEN / name).read_text()


def test_every_golden_spec_is_tested() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == {*SPECS, "article.yaml"}


@pytest.mark.parametrize("name", [*SPECS, "article.yaml"])
def test_googles_own_parser_reads_it_to_the_last_leaf(name: str) -> None:
    tree = yaml.safe_load((GOLDEN / name).read_text())
    message = CustomJobSpec.pb(CustomJobSpec())
    json_format.ParseDict(tree, message)
    back = json_format.MessageToDict(message)  # writes 64-bit numbers as text
    assert {key: str(value) for key, value in leaves(back)} == {key: str(value) for key, value in leaves(tree)}


# What is not as in the first article, and why.
DIFFERENCES = {
    "containerSpec.imageUri": "the name of an image of the user's",
    "containerSpec.command": "the worker travels with the run, so no program is in the image",
    "containerSpec.env": "the worker reads them in the job file of the run; GPUS_PER_NODE is hardware.devices",
    "scheduling": "the article leaves 7 days, and survivors that hang when a node is replaced",
}


def test_the_articles_spec_is_what_its_config_makes() -> None:
    article = dict(leaves(yaml.safe_load((GOLDEN / "article.yaml").read_text())))
    ours = dict(leaves(yaml.safe_load((GOLDEN / "t4.yaml").read_text())))
    differing = {key for key in {*article, *ours} if article.get(key) != ours.get(key)}
    used = {reason for key in differing for reason in DIFFERENCES if reason in key}
    assert [key for key in differing if not any(reason in key for reason in DIFFERENCES)] == []
    assert used == set(DIFFERENCES)
    same = {key.rpartition(".")[2] for key in article if article[key] == ours.get(key)}
    assert same == {"machineType", "acceleratorType", "acceleratorCount", "bootDiskSizeGb", "replicaCount"}


@pytest.mark.parametrize("num_nodes", [1, 2, 7])
def test_one_description_makes_a_chief_and_the_rest(num_nodes: int, parsed: Parsed) -> None:
    config = parsed(*SITE, "hardware=h100", IMAGE)
    pools = made.spec(job_of(config, num_nodes=num_nodes), config)["workerPoolSpecs"]
    counts = [pool.pop("replicaCount") for pool in pools]
    assert counts == ([1, num_nodes - 1] if num_nodes > 1 else [1])
    assert all(pool == pools[0] for pool in pools)


def test_a_job_has_nodes_for_the_largest_of_its_stages(parsed: Parsed) -> None:
    config = parsed(*SITE, "hardware=h100", IMAGE)
    pools = made.spec(job_of(config, num_nodes=1, most_nodes=4), config)["workerPoolSpecs"]
    assert [pool["replicaCount"] for pool in pools] == [1, 3]


def test_the_worker_is_started_by_an_argument_list(parsed: Parsed) -> None:
    config = parsed(*SITE, "hardware=h100", "launcher.python=/opt/venv/bin/python")
    job = job_of(config, attempt=3, run_dir="/gcs/b/a b/r1")
    (pool,) = made.spec(job, config)["workerPoolSpecs"]
    command = [
        "/opt/venv/bin/python",
        "/gcs/b/a b/r1/run/worker.pyz",
        "/gcs/b/a b/r1",
        "--stage",
        "train",
        "--attempt",
        "3",
    ]
    assert pool["containerSpec"]["command"] == command


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpt_small-20261129-120000-ab12", "gpt_small-20261129-120000-ab12"),
        ("7", "7"),
        ("x" * 63, "x" * 63),
    ],
)
def test_a_text_that_is_a_label_stays_as_it_is(text: str, expected: str) -> None:
    assert made.label(text) == expected


def test_no_two_texts_share_a_label() -> None:
    texts = ["Run.A", "run-a", "run.a", "RUN-A", "x" * 64, "x" * 65, "über"]
    labels = [made.label(text) for text in texts]
    assert len(set(labels)) == len(texts)
    assert all(len(label) <= 63 and not set(label) - set("abcdefghijklmnopqrstuvwxyz0123456789_-") for label in labels)


def test_a_long_name_is_cut_for_the_console(parsed: Parsed) -> None:
    config = parsed(*SITE, "hardware=h100", IMAGE)
    assert len(made.display_name(job_of(config, run_id="r" * 200))) == 128


def test_secrets_stand_in_the_record_by_name_and_reach_the_api_by_value(parsed: Parsed) -> None:
    config = parsed(*SITE, "hardware=h100", IMAGE)
    job = job_of(config, num_nodes=2, env={"PLAIN": "$(PATH)"}, env_from=("HF_TOKEN",))
    text = made.render(job, config)
    assert "# <HF_TOKEN> stands for the value of that variable" in text
    tree = yaml.safe_load(text)
    revealed = made.with_secrets(tree, job.env_from, {"HF_TOKEN": "hf_$(x)"})
    for pool, told in zip(tree["workerPoolSpecs"], revealed["workerPoolSpecs"], strict=True):
        assert pool["containerSpec"]["env"] == [
            {"name": "HF_TOKEN", "value": "<HF_TOKEN>"},
            {"name": "PLAIN", "value": "$$(PATH)"},
        ]
        assert told["containerSpec"]["env"][0] == {"name": "HF_TOKEN", "value": "hf_$$(x)"}


def test_the_job_around_it_is_what_gcloud_takes_as_options(parsed: Parsed) -> None:
    config = parsed(*SITE, *EVERY_KEY)
    assert isinstance(config.launcher, VertexLauncher)
    job = job_of(config, env={})
    words = shlex.split(made.gcloud(job, config.launcher, Path("/home/me/it's here/a1-train.yaml")))
    assert words[:4] == ["gcloud", "ai", "custom-jobs", "create"]
    options = dict(word.removeprefix("--").split("=", 1) for word in words[4:])
    around = made.custom_job(job, {}, config.launcher)
    assert options["display-name"] == around["displayName"] == "gpt_small-20261129-120000-ab12-train"
    assert dict(pair.split("=") for pair in options["labels"].split(",")) == around["labels"]
    assert around["labels"]["team"] == "speech"
    assert options["kms-key"] == around["encryptionSpec"]["kmsKeyName"]
    assert (options["region"], options["project"]) == ("us-central1", "my-project")
    assert options["config"] == "/home/me/it's here/a1-train.yaml"
    json_format.ParseDict(around, CustomJob.pb(CustomJob()))


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("hardware.accelerator_type=NVIDIA_T5", "hardware.accelerator_type: Vertex AI's client does not take it"),
        ("launcher.boot_disk_size_gb=9999999999", "launcher.boot_disk_size_gb: "),
        ("launcher.time=999999999999999", "launcher.time: "),
    ],
)
def test_what_googles_parser_refuses_is_an_error_that_names_our_key(override: str, told: str, parsed: Parsed) -> None:
    config = parsed(*SITE, "hardware=h100", IMAGE, override)
    with pytest.raises(UserError) as refused:
        refuse_invalid(made.spec(job_of(config), config))
    assert told in str(refused.value)


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, (dict, list)):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, tree


def _parse(*overrides: str) -> RunConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return RunConfig.from_hydra(compose("config", [*overrides, "~local"]))


if __name__ == "__main__":
    for golden in SPECS:
        (GOLDEN / golden).write_text(rendered(_parse, golden))

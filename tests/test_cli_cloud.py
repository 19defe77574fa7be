"""`trainwright cloud setup` as a user types it, with a gcloud that makes nothing."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Result
from tests.fakes import gcloud_on_path
from trainwright.cli import main

Setup = Callable[..., Result]
SITE = ("site.vertex.project=my-project", "site.vertex.bucket=my-bucket", "~local")
ACCOUNT = "site.vertex.service_account=jobs@my-project.iam.gserviceaccount.com"
MADE = (
    "gcloud services enable aiplatform.googleapis.com artifactregistry.googleapis.com cloudbuild.googleapis.com "
    "storage.googleapis.com --project=my-project",
    "gcloud storage buckets create gs://my-bucket --project=my-project --location=us-central1 "
    "--uniform-bucket-level-access --public-access-prevention",
    "gcloud artifacts repositories create container-image-repo --project=my-project --location=us-central1 "
    "--repository-format=docker --description=images of trainwright",
)


@pytest.fixture
def setup(capfd: pytest.CaptureFixture[str]) -> Setup:
    """Return `trainwright cloud setup` as a function."""

    def run(*arguments: str) -> Result:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["cloud", "setup", *arguments])
        return Result(int(ended.value.code or 0), *capfd.readouterr())

    return run


@pytest.mark.parametrize("overrides", [SITE, (*SITE, ACCOUNT)])
def test_the_script_is_sound(overrides: tuple[str, ...], setup: Setup) -> None:
    printed = setup(*overrides)
    assert (printed.code, printed.err) == (0, "")
    subprocess.run(["shellcheck", "-"], input=printed.out, text=True, check=True)


@pytest.mark.parametrize("how", ["the script", "--yes"])
def test_both_ways_make_what_the_article_made(
    how: str, setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = gcloud_on_path(tmp_path / "bin", monkeypatch, there=["print-access-token"])
    if how == "--yes":
        done = setup(*SITE, "--yes")
        assert done.code == 0, done.err
        assert "gcloud says: services enable" in done.out
        assert "custom_model_training_nvidia_t4_gpus" in done.out
    else:
        subprocess.run(["bash", "-c", setup(*SITE).out], check=True, capture_output=True)
    assert [call for call in calls() if " describe " not in call and " auth " not in call] == list(MADE)


def test_what_is_there_is_left_alone(setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = ["print-access-token", "my-bucket", "container-image-repo"]
    calls = gcloud_on_path(tmp_path / "bin", monkeypatch, there=there)
    done = setup(*SITE, "--yes")
    assert done.code == 0
    assert done.out.count("is there") == 3
    assert [call for call in calls() if " create " in call] == []


def test_a_service_account_is_made_with_its_roles(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = gcloud_on_path(tmp_path / "bin", monkeypatch, there=["print-access-token"])
    assert setup(*SITE, ACCOUNT, "--yes").code == 0
    made = calls()
    assert "iam.googleapis.com cloudresourcemanager.googleapis.com --project=my-project" in made[0]
    assert "gcloud iam service-accounts create jobs --project=my-project --display-name=trainwright jobs" in made
    bound = [call for call in made if "add-iam-policy-binding" in call]
    assert [call.partition("--role=")[2].split()[0] for call in bound] == [
        "roles/aiplatform.user",
        "roles/artifactregistry.reader",
        "roles/logging.logWriter",
        "roles/storage.objectAdmin",
    ]
    assert all("--member=serviceAccount:jobs@my-project.iam.gserviceaccount.com" in call for call in bound)


def test_the_first_failure_ends_it_and_is_named(setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = gcloud_on_path(tmp_path / "bin", monkeypatch, failing={"buckets create": 5})
    failed = setup(*SITE, "--yes")
    assert failed.code == 5
    assert "step 2/4 bucket for runs and data failed with exit code 5" in failed.err
    assert "buckets create" in calls()[-1]


def test_a_login_is_left_to_the_user_where_nobody_can_answer(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = gcloud_on_path(tmp_path / "bin", monkeypatch)
    done = setup(*SITE, "--yes")
    assert done.code == 0
    assert "run this yourself, on a terminal: gcloud auth application-default login" in done.err
    assert not [call for call in calls() if call.endswith(" login")]


def test_json_is_alone_on_standard_output(setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = json.loads(setup(*SITE, "--json").out)
    assert [step["outcome"] for step in planned["steps"]] == [None] * 4
    gcloud_on_path(tmp_path / "bin", monkeypatch, there=["print-access-token", "my-bucket"])
    done = setup(*SITE, "--json", "--yes")
    assert [step["outcome"] for step in json.loads(done.out)["steps"]] == ["made", "there", "made", "there"]
    assert "gcloud says" in done.err


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("~local",), ["site.vertex.project=<site.vertex.project> is not set", "site.vertex.bucket=<"]),
        ((*SITE, "site.vertex.repository=gcr.io/x"), ["is no repository of Artifact Registry; use us-central1-docker"]),
        ((*SITE[::2], "site.vertex.bucket=gs://b"), ["give the bucket's name alone"]),
    ],
)
def test_values_that_cannot_work_are_named_all_at_once(
    overrides: tuple[str, ...], told: list[str], setup: Setup
) -> None:
    refused = setup(*overrides)
    assert (refused.code, refused.out) == (2, "")
    assert all(text in refused.err for text in told)


def test_without_gcloud_the_script_is_the_remedy(setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    refused = setup(*SITE, "--yes")
    assert refused.code == 2
    assert "run what `trainwright cloud setup` prints" in refused.err

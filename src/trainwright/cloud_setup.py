"""What a project needs before its first run on Vertex AI, as steps: each looks first, and changes nothing twice.

Of the article's preparation, the notebooks are left out: their service (notebooks.googleapis.com) and a machine for
them are not needed by a command line.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from trainwright.config import VertexSite
from trainwright.errors import UserError

Command = tuple[str, ...]

_SERVICES = ("aiplatform", "artifactregistry", "cloudbuild", "storage")
_ACCOUNT_SERVICES = ("iam", "cloudresourcemanager")  # where accounts are made, and bound to roles
_REPOSITORY = re.compile(r"(?P<location>[a-z0-9-]+)-docker\.pkg\.dev/(?P<project>[^/]+)/(?P<name>[^/]+)")
_JOB_ROLES = ("roles/aiplatform.user", "roles/artifactregistry.reader", "roles/logging.logWriter")
_LOGIN = ("gcloud", "auth", "application-default")


@dataclass(frozen=True, kw_only=True)
class Step:
    """One thing that must be there."""

    name: str
    check: Command | None  # succeeds if it is there; None: to make it again changes nothing
    make: Command
    is_interactive: bool = False  # a person must answer
    notes: tuple[str, ...] = ()


def steps(site: VertexSite) -> tuple[Step, ...]:
    """Return the steps for a site, in order. Raises UserError naming all values that are unset or do not fit."""
    problems = [*_problems(site)]
    if problems:
        raise UserError("\n".join(problems))
    return tuple(_steps(site))


def hints(site: VertexSite) -> tuple[str, ...]:
    """Return what no step can do."""
    quota = (
        f"Quota: the console's IAM & Admin, Quotas shows custom_model_training_nvidia_t4_gpus of {site.location}; new "
        "projects have none and must ask."
    )
    people = (
        f"People who start runs need, in {site.project}: roles/aiplatform.user, roles/storage.objectAdmin on "
        f"gs://{site.bucket}, roles/cloudbuild.builds.editor to build images."
    )
    if site.service_account is not None:
        return quota, people, f"They also need roles/iam.serviceAccountUser on {site.service_account}."
    default = (
        "Jobs run as the project's default account, since site.vertex.service_account=null: it must be able to read "
        f"the repository and to write gs://{site.bucket}."
    )
    return quota, people, default


def script(site: VertexSite) -> str:
    """Return all steps as a script for bash, to be read and run by hand."""
    lines = [
        "#!/usr/bin/env bash",
        f"# Prepares project {site.project} for runs on Vertex AI; what is there already is left as it is.",
        "# `trainwright cloud setup --yes` does the same.",
        "set -euo pipefail",
    ]
    for number, step in enumerate(steps(site), 1):
        lines += ["", f"# {number}. {step.name}", *(f"# {note}" for note in step.notes)]
        make = shlex.join(step.make)
        if step.check is None:
            lines.append(make)
        else:
            lines += [f"{shlex.join(step.check)} > /dev/null 2>&1 ||", f"  {make}"]
    return "\n".join([*lines, "", *(f"# {hint}" for hint in hints(site)), ""])


def _problems(site: VertexSite) -> Iterator[str]:
    for key, value in site.model_dump().items():
        if value is not None and value.startswith("<site."):
            yield f"site.vertex.{key}={value} is not set; set it in conf/local/default.yaml or as KEY=VALUE"
    if "<site." not in site.repository and _REPOSITORY.fullmatch(site.repository) is None:
        yield (
            f"site.vertex.repository={site.repository} is no repository of Artifact Registry; use "
            f"{site.location}-docker.pkg.dev/PROJECT/NAME"
        )
    if site.bucket.startswith("gs://") or "/" in site.bucket:
        yield f"site.vertex.bucket={site.bucket}: give the bucket's name alone, without gs:// and folders"


def _steps(site: VertexSite) -> Iterator[Step]:
    of_project = f"--project={site.project}"
    repository = _REPOSITORY.fullmatch(site.repository)
    assert repository is not None  # `steps` has looked
    services = [*_SERVICES, *(_ACCOUNT_SERVICES if site.service_account is not None else ())]
    yield Step(
        name="services",
        check=None,
        make=("gcloud", "services", "enable", *(f"{name}.googleapis.com" for name in services), of_project),
        notes=("Not notebooks.googleapis.com, which the article has for its notebook.",),
    )
    bucket = f"gs://{site.bucket}"
    access = ("--uniform-bucket-level-access", "--public-access-prevention")
    yield Step(
        name="bucket for runs and data",
        check=("gcloud", "storage", "buckets", "describe", bucket),
        make=("gcloud", "storage", "buckets", "create", bucket, of_project, f"--location={site.location}", *access),
        notes=("In the region of the jobs: traffic between regions is slow and costs.",),
    )
    where = (f"--project={repository['project']}", f"--location={repository['location']}")
    about = ("--repository-format=docker", "--description=images of trainwright")
    yield Step(
        name="repository for images",
        check=("gcloud", "artifacts", "repositories", "describe", repository["name"], *where),
        make=("gcloud", "artifacts", "repositories", "create", repository["name"], *where, *about),
    )
    if site.service_account is not None:
        yield from _account_steps(site, site.service_account)
    yield Step(
        name="login of this machine's programs",
        check=(*_LOGIN, "print-access-token"),
        make=(*_LOGIN, "login"),
        is_interactive=True,
    )


def _account_steps(site: VertexSite, account: str) -> Iterator[Step]:
    of_project, member = f"--project={site.project}", f"--member=serviceAccount:{account}"
    name, _, domain = account.partition("@")
    if domain == f"{site.project}.iam.gserviceaccount.com":
        yield Step(
            name="account that jobs run as",
            check=("gcloud", "iam", "service-accounts", "describe", account, of_project),
            make=("gcloud", "iam", "service-accounts", "create", name, of_project, "--display-name=trainwright jobs"),
        )
    # Without --condition gcloud asks where a policy has conditions; its answer would be the whole policy.
    how = ("--condition=None", "--format=none")
    for role in _JOB_ROLES:
        yield Step(
            name=f"{role} for that account",
            check=None,
            make=("gcloud", "projects", "add-iam-policy-binding", site.project, member, f"--role={role}", *how),
        )
    role, bucket = "roles/storage.objectAdmin", f"gs://{site.bucket}"
    yield Step(
        name=f"{role} on the bucket for that account",
        check=None,
        make=(
            "gcloud",
            "storage",
            "buckets",
            "add-iam-policy-binding",
            bucket,
            member,
            f"--role={role}",
            "--format=none",
        ),
    )

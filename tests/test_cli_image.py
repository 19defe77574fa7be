"""`trainwright image` as a user types it, with a gcloud that builds nothing."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.conftest import Result
from tests.fakes import gcloud_on_path
from trainwright import image
from trainwright.backends import RENDERERS
from trainwright.cli import main
from trainwright.config import RunConfig
from trainwright.plan import make_plan

Parsed = Callable[..., RunConfig]
Image = Callable[..., Result]
SITE = ("site.vertex.project=my-project", "site.vertex.bucket=b")
NEMO = ("model=gpt_small", "hardware=t4", *SITE)
NATIVE = ("model=gpt_small", "hardware=h100", *SITE)
REPOSITORY = "us-central1-docker.pkg.dev/my-project/container-image-repo"
ROOT = Path(__file__).parents[1]


@pytest.fixture
def trainwright_image(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Image:
    """Return `trainwright image` as a function, run in `tmp_path`."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Result:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["image", arguments[0], "~local", *arguments[1:]])
        return Result(int(ended.value.code or 0), *capfd.readouterr())

    return run


def instructions(dockerfile: str) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile and what follows them, comments left out and lines joined."""
    lines = [line for line in dockerfile.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", "")
    pairs = [line.partition(" ") for line in joined.splitlines() if line.strip()]
    return [(name, rest.strip()) for name, _, rest in pairs]


def run_image(parsed: Parsed, *overrides: str) -> str | None:
    config = parsed(*overrides)
    (job,) = RENDERERS[config.backend.kind](
        config, make_plan(config), run_id="r", run_dir="/gcs/b/nemo-experiments/gpt/r", attempt=1
    )
    return job.image


def test_rendering_writes_the_context_and_shows_the_command(trainwright_image: Image, tmp_path: Path) -> None:
    rendered = trainwright_image("render", *NEMO)
    assert rendered.code == 0, rendered.err
    name = re.search(rf"{REPOSITORY}/trainwright-nemo:[0-9a-f]{{12}}", rendered.out)
    assert name is not None
    folder = Path("outputs/images", name.group().rpartition("/")[2].replace(":", "-"))
    assert sorted(path.name for path in folder.iterdir()) == [".gcloudignore", "Dockerfile"]
    assert (
        f"gcloud builds submit {folder} --project=my-project --tag={name.group()} --timeout=2h "
        "--machine-type=e2-highcpu-8 --disk-size=200\n"
    ) in rendered.out


def test_json_holds_the_same(trainwright_image: Image, tmp_path: Path) -> None:
    rendered = trainwright_image("render", *NEMO, "--json", "--output", str(tmp_path / "here"))
    told = json.loads(rendered.out)
    assert (told["schema_version"], told["folder"]) == (1, str(tmp_path / "here"))
    assert told["files"] == [".gcloudignore", "Dockerfile"]
    assert told["command"][:4] == ["gcloud", "builds", "submit", str(tmp_path / "here")]
    assert f"--tag={told['image']}" in told["command"]


@pytest.mark.parametrize("overrides", [NEMO, NATIVE])
def test_a_run_that_names_no_image_uses_the_one_that_is_built(overrides: tuple[str, ...], parsed: Parsed) -> None:
    made = image.to_build(parsed(*overrides)).name
    assert made.startswith(f"{REPOSITORY}/trainwright-{parsed(*overrides).backend.kind}:")
    assert run_image(parsed, *overrides) == made
    assert run_image(parsed, *overrides, "seed=7", "trainer.max_steps=9") == made
    assert run_image(parsed, *overrides, "backend.base_image=x:2") != made
    assert run_image(parsed, *overrides, "backend.image=mine:1") == "mine:1"
    assert run_image(parsed, "backend.image=null", "model=llama_tiny") is None


def test_nemos_dockerfile_adds_the_cloud_sdk_and_nothing_of_ours(parsed: Parsed) -> None:
    found = instructions(image.to_build(parsed(*NEMO)).files["Dockerfile"].decode())
    assert [name for name, _ in found] == ["FROM", "ENV", "SHELL", "WORKDIR", "RUN", *["LABEL"] * 4]
    values = dict(found[:5])
    assert values["FROM"] == "nvcr.io/nvidia/nemo:24.03.01.framework"
    assert values["ENV"] == "PYTHONUNBUFFERED=1"
    assert "signed-by=/usr/share/keyrings/cloud.google.gpg] https://packages.cloud.google.com/apt" in values["RUN"]
    assert json.loads(values["SHELL"]) == ["/bin/bash", "-euo", "pipefail", "-c"]
    subprocess.run(["bash", "-n", "-c", values["RUN"]], check=True)


def test_labels_tell_version_base_and_content(parsed: Parsed) -> None:
    made = image.to_build(parsed(*NEMO))
    labels = dict(
        rest.split("=", 1) for name, rest in instructions(made.files["Dockerfile"].decode()) if name == "LABEL"
    )
    assert labels["org.opencontainers.image.version"] == f'"{version("trainwright")}"'
    assert labels["org.opencontainers.image.base.name"] == '"nvcr.io/nvidia/nemo:24.03.01.framework"'
    assert labels["trainwright.content"].strip('"').startswith(made.name.rpartition(":")[2])


def test_the_native_image_holds_the_package_and_its_tested_versions(parsed: Parsed) -> None:
    files = image.to_build(parsed(*NATIVE)).files
    assert files["constraints.txt"] == (ROOT / "constraints.txt").read_bytes()
    assert b"torch<2.14,>=2.13\n" in files["requirements.txt"]
    assert b"pydantic<3,>=2.9\n" in files["requirements.txt"]
    assert b"pytest" not in files["requirements.txt"]
    sources = {
        f"trainwright/{path.relative_to(ROOT / 'src/trainwright')}" for path in ROOT.glob("src/trainwright/**/*.py")
    }
    assert sources <= set(files)
    assert not [name for name in files if "__pycache__" in name or name.startswith("trainwright/conf/")]
    copied = [rest.split()[:-1] for name, rest in instructions(files["Dockerfile"].decode()) if name == "COPY"]
    assert copied == [["requirements.txt", "constraints.txt"], ["trainwright"]]


def test_the_native_context_is_all_that_its_import_needs(parsed: Parsed, tmp_path: Path) -> None:
    image.write(image.to_build(parsed(*NATIVE)), tmp_path)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import trainwright.backends.native.train as train"
    asked = subprocess.run(
        [sys.executable, "-I", "-c", f"{code}; print(train.__file__)"], capture_output=True, text=True, check=True
    )
    assert asked.stdout.strip() == str(tmp_path / "trainwright/backends/native/train.py")


def test_writing_again_replaces_and_other_files_are_left_alone(parsed: Parsed, tmp_path: Path) -> None:
    nemo, native = image.to_build(parsed(*NEMO)), image.to_build(parsed(*NATIVE))
    image.write(native, tmp_path / "context")
    image.write(nemo, tmp_path / "context")
    assert sorted(path.name for path in (tmp_path / "context").rglob("*") if path.is_file()) == sorted(nemo.files)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    with pytest.raises(image.UserError, match=r"holds other files, such as thesis\.tex"):
        image.write(nemo, tmp_path / "mine")


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("hardware=t4",), "site.vertex.project=<site.vertex.project> is not set"),
        (("hardware=t4",), "site.vertex.repository=us-central1-docker.pkg.dev/<site.vertex.project>"),
        ((), "give the run's overrides, such as hardware=t4"),
        (("hardware=trn1", "model=tanuki_8b"), "launcher=slurm: images are for runs on Vertex AI"),
        (("hardware=trn1", "launcher=vertex"), "backend=nxdt: it has no container image"),
        ((*NEMO, "backend.base_image=nvcr.io/nvidia/nemo:latest"), "add a version, or its digest"),
        ((*NEMO, "backend.base_image=host:5000/nemo"), "add a version, or its digest"),
        (("hardware=t5",), "hardware"),
    ],
)
def test_what_makes_no_image_is_an_error_with_the_key(
    overrides: tuple[str, ...], told: str, trainwright_image: Image
) -> None:
    refused = trainwright_image("render", *overrides)
    assert (refused.code, refused.out) == (2, "")
    assert told in refused.err


def test_building_sends_the_context_once(
    trainwright_image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = gcloud_on_path(tmp_path / "bin", monkeypatch)
    built = trainwright_image("build", *NEMO, "--yes")
    assert built.code == 0, built.err
    assert "gcloud says: builds submit" in built.out
    looked, submitted = calls()
    assert looked.startswith(f"gcloud artifacts docker images describe {REPOSITORY}/trainwright-nemo:")
    assert submitted.startswith("gcloud builds submit /")
    assert (tmp_path / "bin" / "context" / "Dockerfile").read_text().startswith("FROM nvcr.io/")
    assert not Path(submitted.split()[3]).exists()


def test_an_image_that_is_there_is_not_built_again(
    trainwright_image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = gcloud_on_path(tmp_path / "bin", monkeypatch, there=["trainwright-nemo"])
    built = trainwright_image("build", *NEMO)
    assert built.code == 0
    assert "is there already" in built.out
    assert len(calls()) == 1


def test_a_build_that_fails_gives_its_exit_code(
    trainwright_image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gcloud_on_path(tmp_path / "bin", monkeypatch, failing={"builds submit": 7})
    assert trainwright_image("build", *NEMO, "--yes").code == 7


def test_nothing_is_built_unasked_or_without_gcloud(
    trainwright_image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = gcloud_on_path(tmp_path / "bin", monkeypatch)
    unasked = trainwright_image("build", *NEMO)
    assert (unasked.code, len(calls())) == (2, 1)
    assert "Add --yes if you mean it" in unasked.err
    monkeypatch.setenv("PATH", str(tmp_path))
    missing = trainwright_image("build", *NEMO, "--yes")
    assert missing.code == 2
    assert "gcloud is not on PATH; install it" in missing.err


def test_an_image_of_the_users_own_is_told(trainwright_image: Image) -> None:
    assert "runs with launcher.image=mine:1 use that" in trainwright_image("render", *NEMO, "launcher.image=mine:1").out

"""A model arrives whole, of one commit, once; one that is there is accepted or told why not."""

import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.checkpoint.models import tree
from tests.fakes import HubServer
from tests.fetch.models import model_files, write
from trainwright.errors import UserError
from trainwright.fetch.model import ModelRequest, fetch_model
from trainwright.node import commit

REPO = "team/tiny"
FETCHED = {
    "README.md", "config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json",
    "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
}  # fmt: skip


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    return model_files(tmp_path / "made")


@pytest.fixture
def request_(tmp_path: Path) -> ModelRequest:
    return ModelRequest(source=REPO, revision=None, target=tmp_path / "models" / "tiny", linked_below=None)


def fetch(request: ModelRequest, problems: Sequence[str] = ()) -> list[str]:
    told: list[str] = []
    fetch_model(request, check=lambda directory: problems, say=told.append, waits_s=(0.0, 0.0))
    return told


def refusal(request: ModelRequest, problems: Sequence[str] = ()) -> str:
    with pytest.raises(UserError) as caught:
        fetch(request, problems)
    return str(caught.value)


def content(target: Path) -> dict[str, bytes]:
    return {name: data for name, data in tree(target).items() if name != "commit.json"}


def test_a_model_of_the_hub_is_fetched_without_pickles_and_committed_with_its_hash(
    hub: HubServer, files: dict[str, bytes], request_: ModelRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    sha = hub.publish(REPO, files)
    told = fetch(request_)
    size = sum(path.stat().st_size for path in request_.target.glob("*.safetensors")) / 2**10
    assert f"team/tiny: {size:.2f} of {size:.2f} KiB, " in capsys.readouterr().err  # progress
    assert content(request_.target) == {name: files[name] for name in FETCHED}
    assert commit.read_commit(request_.target) == {
        "kind": "model",
        "source": REPO,
        "revision": None,
        "resolved": sha,
    }
    assert commit.verify(request_.target) == []
    assert told[-1].endswith(f"is complete, from {REPO}, revision main, commit {sha}")
    assert [path.name for path in request_.target.parent.iterdir()] == ["tiny"]


def test_a_branch_that_moved_changes_nothing_and_the_network_is_not_asked(
    hub: HubServer, files: dict[str, bytes], request_: ModelRequest, tmp_path: Path
) -> None:
    sha = hub.publish(REPO, files)
    fetch(request_)
    hub.publish(REPO, model_files(tmp_path / "newer", seed=1))
    asked = len(hub.requests)
    assert fetch(request_) == [
        f"backend.model_dir: {request_.target} is there, from {REPO}, revision main, commit {sha}"
    ]
    assert len(hub.requests) == asked
    for same in (sha, "main"):
        assert fetch(replace(request_, revision=same))
    assert "but model.source=team/tiny with model.revision=v2 is asked for" in refusal(replace(request_, revision="v2"))
    assert "but model.source=team/other with" in refusal(replace(request_, source="team/other"))


@pytest.mark.parametrize(("revision", "of"), [("v1", "first"), (None, "second")], ids=["a tag", "the newest"])
def test_the_revision_decides(
    revision: str | None, of: str, hub: HubServer, files: dict[str, bytes], request_: ModelRequest, tmp_path: Path
) -> None:
    versions = {"first": files, "second": model_files(tmp_path / "second", seed=1)}
    hub.publish(REPO, versions["first"], branch="v1")
    hub.publish(REPO, versions["second"])
    fetch(replace(request_, revision=revision))
    assert content(request_.target) == {name: versions[of][name] for name in FETCHED}


def test_what_the_hub_refuses_is_told_with_what_to_do(
    hub: HubServer, files: dict[str, bytes], request_: ModelRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "the hub shows no model team/tiny" in refusal(request_)
    hub.publish(REPO, files)
    assert "team/tiny has no revision v9; name a branch" in refusal(replace(request_, revision="v9"))
    hub.gated.add(REPO)
    told = refusal(request_)
    assert told.startswith("model.source: team/tiny is given only to users who accepted its terms; ")
    assert told.endswith("set HF_TOKEN and launcher.env_from=[HF_TOKEN]")
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
    assert fetch(request_)[-1].endswith(hub.branches[REPO, "main"])


def test_a_model_of_pickles_only_is_refused_with_the_remedy(
    hub: HubServer, files: dict[str, bytes], request_: ModelRequest
) -> None:
    hub.publish(REPO, {name: data for name, data in files.items() if ".safetensors" not in name})
    assert "as pickles only (pytorch_model.bin), which are never read here; save them" in refusal(request_)
    assert not request_.target.exists()


def test_a_model_that_does_not_fit_is_refused_before_its_weights_come(
    hub: HubServer, files: dict[str, bytes], request_: ModelRequest
) -> None:
    hub.publish(REPO, files)
    assert refusal(request_, ["hidden_size=4", "vocab_size=8"]) == "hidden_size=4\nvocab_size=8"
    assert not any(path.startswith("/stored/") for _, path in hub.requests)
    assert not request_.target.exists()


def stored(hub: HubServer, files: dict[str, bytes], number: int) -> str:
    """Return where the weights of a file come from."""
    hub.answer("HEAD", f"/{REPO}/resolve/main/model-{number:05d}-of-00002.safetensors", {})
    return list(hub.objects)[-1]


def test_a_transfer_that_breaks_off_goes_on(hub: HubServer, files: dict[str, bytes], request_: ModelRequest) -> None:
    hub.publish(REPO, files)
    hub.fail(stored(hub, files, 1), "cut", 503)
    hub.fail(f"/api/models/{REPO}", 503)
    told = fetch(request_)
    assert any("team/tiny: " in line and "again in" in line for line in told)
    assert content(request_.target) == {name: files[name] for name in FETCHED}


def test_what_is_not_what_the_hub_announced_is_not_kept(
    hub: HubServer, files: dict[str, bytes], request_: ModelRequest
) -> None:
    hub.publish(REPO, files)
    path = stored(hub, files, 2)
    hub.objects[path] = hub.objects[path][:-1] + b"\0"
    assert "its SHA-256 is not the one that the hub tells; given up after 3 tries" in refusal(request_)
    assert commit.read_commit(request_.target) is None
    assert not (request_.target / "model-00002-of-00002.safetensors").exists()


def test_a_download_that_was_killed_goes_on_with_the_files_that_are_whole(
    hub: HubServer, files: dict[str, bytes], request_: ModelRequest
) -> None:
    hub.publish(REPO, files)
    first, second = stored(hub, files, 1), stored(hub, files, 2)
    hub.fail(second, "hang")
    program = (
        "import pathlib, sys; from trainwright.fetch.model import ModelRequest, fetch_model\n"
        "source, target = sys.argv[1], pathlib.Path(sys.argv[2])\n"
        "request = ModelRequest(source=source, revision=None, target=target, linked_below=None)\n"
        "fetch_model(request, check=lambda directory: [], say=print)"
    )
    process = subprocess.Popen([sys.executable, "-c", program, REPO, str(request_.target)])
    whole = request_.target / ".cache/huggingface/download/model-00001-of-00002.safetensors.metadata"
    assert hub.hangs.wait(60)
    while not whole.exists():
        assert process.poll() is None
    process.kill()
    process.wait()
    assert commit.read_commit(request_.target) is None
    before = hub.gets(first)
    fetch(request_)
    assert hub.gets(first) == before
    assert content(request_.target) == {name: files[name] for name in FETCHED}


def test_two_runs_of_a_sweep_fetch_a_model_once(
    hub: HubServer, files: dict[str, bytes], request_: ModelRequest
) -> None:
    hub.publish(REPO, files)
    with ThreadPoolExecutor(2) as pool:
        told = list(pool.map(lambda _: fetch(request_), range(2)))
    assert hub.gets(stored(hub, files, 1)) == 1
    assert sorted("is there, from" in lines[-1] for lines in told) == [False, True]


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_model_at_a_path_is_linked_where_all_nodes_see_it_and_copied_from_elsewhere(
    is_shared: bool, files: dict[str, bytes], request_: ModelRequest, tmp_path: Path
) -> None:
    source = write(tmp_path / "shared" / "mine", files)
    below = tmp_path / ("shared" if is_shared else "elsewhere")
    request = replace(request_, source=str(source), linked_below=below)
    assert f"{source} was {'linked' if is_shared else 'copied'}" in fetch(request)[0]
    assert content(request.target) == {name: files[name] for name in FETCHED}
    assert all(path.is_symlink() == is_shared for path in request.target.iterdir() if path.name != "commit.json")
    assert set(tree(source)) == {name for name in files if "/" not in name}  # nothing was left there
    (source / "model-00001-of-00002.safetensors").write_bytes(b"other")
    if is_shared:
        assert "is damaged: model-00001-of-00002.safetensors has 5 bytes" in refusal(request)
    else:
        assert fetch(replace(request, revision="v2"))  # which a path has none of


def test_a_model_that_the_user_put_there_is_used_if_it_is_whole(
    files: dict[str, bytes], request_: ModelRequest
) -> None:
    write(request_.target, files)
    for source in (None, str(request_.target), REPO):
        assert fetch(replace(request_, source=source)) == [
            f"backend.model_dir: {request_.target} was there already and is whole; it is used as it is"
        ]
    assert "commit.json" not in tree(request_.target)
    (request_.target / "model-00002-of-00002.safetensors").unlink()
    told = refusal(request_)
    assert "model-00002-of-00002.safetensors cannot be read" in told
    assert "was not fetched by trainwright and is no whole model; complete it, or move it away" in told


def test_a_model_cut_short_after_its_fetch_is_damage(
    hub: HubServer, files: dict[str, bytes], request_: ModelRequest
) -> None:
    hub.publish(REPO, files)
    fetch(request_)
    (request_.target / "model-00001-of-00002.safetensors").write_bytes(b"short")
    assert "is damaged: model-00001-of-00002.safetensors has 5 bytes" in refusal(request_)


def test_a_missing_model_without_a_source_and_a_model_without_tokenizer_are_told(
    files: dict[str, bytes], request_: ModelRequest
) -> None:
    assert "names none to fetch; set it to a hub id or a path" in refusal(replace(request_, source=None))
    write(request_.target, {name: data for name, data in files.items() if name != "tokenizer.json"})
    assert "has no tokenizer (tokenizer.json, " in refusal(request_)


def test_a_model_that_the_disk_has_no_room_for_is_refused(hub: HubServer, request_: ModelRequest) -> None:
    hub.publish(REPO, {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"weights"})
    hub.oversize[REPO] = 2**62
    assert "4611686018427387904 bytes are to be fetched into" in refusal(request_)
    assert not request_.target.exists()

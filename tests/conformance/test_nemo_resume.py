"""NeMo's own exp_manager as the judge: what it trips on in a run directory, and what it does behind our janitor."""

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from tests.conformance.environments import ENVS, python_of
from tests.nemo_checkpoints import archive, distributed, marker, name_of, ranks
from trainwright.backends.rendered_yaml import to_yaml
from trainwright.config import RunConfig
from trainwright.exp_manager import nemo_block
from trainwright.node import nemo_config, nemo_janitor

Version = Literal["1.23", "2.7"]
Parsed = Callable[..., RunConfig]
SCRATCH = None  # what NeMo resumes from when it silently starts over

LAST_20, LAST_30 = name_of(20, suffix="-last"), name_of(30, suffix="-last")


@dataclass(frozen=True)
class Tree:
    """A run directory: what is in it, what NeMo makes of it, and what it must resume from behind the janitor."""

    build: Callable[[Path], object]
    alone: dict[Version, str | None]  # part of NeMo's refusal, or the end of the path that it would resume from
    newest: str
    tensor_parallel: int = 1


def two_lasts(checkpoints: Path) -> None:
    distributed(checkpoints, LAST_20)
    distributed(checkpoints, LAST_30)


def an_interrupted_save(checkpoints: Path) -> None:
    distributed(checkpoints, LAST_20)
    distributed(checkpoints, LAST_30, is_whole=False)
    marker(checkpoints, LAST_30)


def only_an_unfinished_last(checkpoints: Path) -> None:
    distributed(checkpoints, name_of(20))
    distributed(checkpoints, LAST_30, is_whole=False)
    marker(checkpoints, LAST_30)


def only_the_best(checkpoints: Path) -> None:
    distributed(checkpoints, name_of(10, loss="9.00"))
    distributed(checkpoints, name_of(20))


def a_last_behind_the_best(checkpoints: Path) -> None:
    distributed(checkpoints, LAST_20)
    distributed(checkpoints, name_of(30))


def a_last_with_a_version(checkpoints: Path) -> None:
    archive(checkpoints / f"{name_of(20)}.ckpt")
    archive(checkpoints / f"{LAST_30}-v1.ckpt")


def nan_in_a_name(checkpoints: Path) -> None:
    distributed(checkpoints, name_of(20, loss="nan"))
    distributed(checkpoints, LAST_30)


def an_exponent_in_a_name(checkpoints: Path) -> None:
    distributed(checkpoints, name_of(20, loss="1e-05"))
    distributed(checkpoints, LAST_30)


def ranks_of_a_killed_save(checkpoints: Path) -> None:
    ranks(checkpoints, name_of(20))
    ranks(checkpoints, LAST_20)
    archive(checkpoints / "mp_rank_00" / f"{LAST_30}.ckpt")
    archive(checkpoints / "mp_rank_01" / f"{LAST_30}.ckpt", is_whole=False)


def half_a_directory(checkpoints: Path) -> None:
    """One with metadata.json, which NeMo 1.23 would not save again."""
    distributed(checkpoints, LAST_20)
    distributed(checkpoints, LAST_30, lacks="model.embedding.word_embeddings.weight/1.0")


def another_programs_directory(checkpoints: Path) -> None:
    distributed(checkpoints, LAST_20)
    (distributed(checkpoints, LAST_30, is_whole=False) / "done").touch()


def a_removed_run_folder(checkpoints: Path) -> None:
    distributed(checkpoints, LAST_30)
    (checkpoints.parent / "run_1").mkdir()
    (checkpoints.parent / "git-info.log").touch()


def tidy(checkpoints: Path) -> None:
    distributed(checkpoints, name_of(20))
    distributed(checkpoints, name_of(30))
    distributed(checkpoints, LAST_30)


MULTIPLE = "ValueError: Multiple checkpoints"
TREES: dict[str, Tree] = {
    "two -last": Tree(two_lasts, {"1.23": MULTIPLE, "2.7": MULTIPLE}, LAST_30),
    # 1.23 knows no markers; 2.7 takes the other one.
    "an interrupted save": Tree(an_interrupted_save, {"1.23": MULTIPLE, "2.7": LAST_20}, LAST_20),
    "only an unfinished -last": Tree(
        only_an_unfinished_last, {"1.23": LAST_30, "2.7": "ValueError: Last checkpoint is unfinished"}, name_of(20)
    ),
    "only the best": Tree(only_the_best, {"1.23": SCRATCH, "2.7": SCRATCH}, name_of(20)),
    "a -last behind the best": Tree(a_last_behind_the_best, {"1.23": LAST_20, "2.7": LAST_20}, name_of(30)),
    "a -last-v1": Tree(a_last_with_a_version, {"1.23": SCRATCH, "2.7": SCRATCH}, f"{LAST_30}-v1.ckpt"),
    "nan in a name": Tree(nan_in_a_name, {"1.23": "ValueError: could not", "2.7": "ValueError: could not"}, LAST_30),
    "an exponent in a name": Tree(
        an_exponent_in_a_name, {"1.23": "ValueError: could not", "2.7": "ValueError: could not"}, LAST_30
    ),
    "ranks of a killed save": Tree(
        ranks_of_a_killed_save, {"1.23": "-last.ckpt", "2.7": "-last.ckpt"}, f"{LAST_20}.ckpt", tensor_parallel=2
    ),
    "half a directory": Tree(half_a_directory, {"1.23": MULTIPLE, "2.7": MULTIPLE}, LAST_20),
    "another program's": Tree(another_programs_directory, {"1.23": MULTIPLE, "2.7": MULTIPLE}, LAST_20),
    "a removed run folder": Tree(a_removed_run_folder, {"1.23": "FileExistsError", "2.7": "FileExistsError"}, LAST_30),
    "tidy": Tree(tidy, {"1.23": LAST_30, "2.7": LAST_30}, LAST_30),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What NeMo of one version said of all trees, and how the janitor left them."""

    version: Version
    alone: dict[str, dict[str, Any]]
    behind: dict[str, dict[str, Any]]
    actions: dict[str, tuple[str, ...]]
    left: dict[str, set[str]]  # in checkpoints/, when the janitor has been there and NeMo has started


@pytest.fixture(scope="module", params=["1.23", "2.7"])
def judged(request: pytest.FixtureRequest, parsed: Parsed, tmp_path_factory: pytest.TempPathFactory) -> Judged:
    """Ask NeMo twice of each tree in one process, since importing it takes 13 s."""
    version: Version = request.param
    python = python_of(f"nemo_{version.replace('.', '_')}")
    here = tmp_path_factory.mktemp("resume")
    asked, actions = {}, {}
    for number, (name, tree) in enumerate(TREES.items()):
        for kind in ("alone", "behind"):
            run_dir = here / kind / "gpt" / f"r{number}"
            tree.build(run_dir / "checkpoints")
            text = rendered(parsed, version, here / kind, run_dir.name)
            if kind == "behind":
                order = nemo_janitor.tidy(
                    run_dir / "checkpoints", run_dir / "run" / "damaged", tensor_parallel=tree.tensor_parallel
                )
                assert order.checkpoint is not None, name
                actions[name] = (*order.actions, *nemo_janitor.prepare_archive(run_dir))
                text = nemo_config.with_resume(text, str(order.checkpoint.resume_path))
            asked[f"{kind} {name}"] = yaml.safe_load(text)["exp_manager"]
    subprocess.run(
        [python, Path(__file__).with_name("nemo_resume_judge.py"), here / "answer.json"],
        input=json.dumps(asked),
        text=True,
        check=True,
        cwd=here,
        env={**os.environ, "PYTHONPATH": str(ENVS / "stubs")},
    )
    answer = json.loads((here / "answer.json").read_text())
    left = {
        name: {path.name for path in (here / "behind" / "gpt" / f"r{number}" / "checkpoints").iterdir()}
        for number, name in enumerate(TREES)
    }
    return Judged(
        version=version,
        alone={name: answer[f"alone {name}"] for name in TREES},
        behind={name: answer[f"behind {name}"] for name in TREES},
        actions=actions,
        left=left,
    )


def rendered(parsed: Parsed, version: Version, exp_dir: Path, run_id: str) -> str:
    config = parsed(
        "name=gpt", f"exp_manager.exp_dir={exp_dir}", "exp_manager.checkpoint_callback_params.save_top_k=10"
    )
    return to_yaml({"exp_manager": nemo_block(config, run_id=run_id, nemo=version)}, reader="NeMo", run_id=run_id)


@pytest.mark.parametrize("name", TREES)
def test_nemo_alone_trips_or_takes_another(name: str, judged: Judged) -> None:
    expected, said = TREES[name].alone[judged.version], judged.alone[name]
    if "refused" in said:
        assert expected is not None, said
        assert expected in said["refused"]
    else:
        assert said["resumed"] == expected or str(said["resumed"]).endswith(str(expected)), said


@pytest.mark.parametrize("name", TREES)
def test_behind_the_janitor_nemo_goes_on_from_the_newest_whole_checkpoint(name: str, judged: Judged) -> None:
    assert "refused" not in judged.behind[name], judged.behind[name]
    assert Path(judged.behind[name]["resumed"]).name == TREES[name].newest


@pytest.mark.parametrize("name", [name for name, tree in TREES.items() if tree.tensor_parallel == 1])
def test_nemo_removes_nothing_that_it_is_told_to_resume_from(name: str, judged: Judged) -> None:
    assert TREES[name].newest in judged.left[name]


def test_a_tidy_directory_is_left_as_it_is(judged: Judged) -> None:
    assert judged.actions["tidy"] == ()
    assert judged.left["tidy"] == {name_of(20), name_of(30), LAST_30}

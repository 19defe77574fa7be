"""Which stages of a run are run, and which are done."""

from collections.abc import Callable
from pathlib import Path

import pytest

from trainwright import stages
from trainwright.config import RunConfig
from trainwright.errors import UserError
from trainwright.job import JobSpec
from trainwright.node.commit import write_commit

Parsed = Callable[..., RunConfig]


def chain(*names: str, outputs: tuple[str, ...] = ()) -> list[JobSpec]:
    return [
        JobSpec(
            run_id="r",
            run_dir="/r",
            stage=name,
            attempt=1,
            launch="plain",
            command=("true",),
            python="python3",
            env={},
            num_nodes=1,
            devices=1,
            image=None,
            time_limit_s=None,
            grace_s=1.0,
            files={},
            outputs=outputs,
        )
        for name in names
    ]


FOUR = chain("fetch", "convert", "train", "export")


@pytest.mark.parametrize(
    ("override", "selected"),
    [
        ("stages=null", ["fetch", "convert", "train", "export"]),
        ("stages=[export,convert]", ["convert", "export"]),
        ("stages_from=train", ["train", "export"]),
    ],
)
def test_stages_are_selected_by_name_in_the_order_of_the_run(
    override: str, selected: list[str], parsed: Parsed
) -> None:
    assert [job.stage for job in stages.select(FOUR, parsed(override))] == selected


@pytest.mark.parametrize(("override", "key"), [("stages=[trian]", "stages"), ("stages_from=trian", "stages_from")])
def test_a_stage_that_is_none_is_refused_with_those_that_are(override: str, key: str, parsed: Parsed) -> None:
    with pytest.raises(UserError, match=f"{key}: trian is no stage of this run; use fetch, convert, train, export"):
        stages.select(FOUR, parsed(override))


@pytest.mark.parametrize(
    ("earlier", "override", "done"),
    [
        ({}, "stages=null", []),
        ({"fetch": "SUCCEEDED", "convert": "FAILED", "train": "CANCELLED"}, "stages=null", ["fetch"]),
        ({"fetch": "SUCCEEDED", "convert": "FAILED", "train": "SUCCEEDED"}, "stages=null", ["fetch"]),
        (dict.fromkeys(("fetch", "convert", "train", "export"), "SUCCEEDED"), "stages=null", []),
        ({"fetch": "SUCCEEDED", "convert": "FAILED"}, "stages_from=fetch", []),
        ({"fetch": "SUCCEEDED", "convert": "FAILED"}, "stages=[fetch]", []),
    ],
)
def test_a_broken_chain_goes_on_where_it_broke_and_a_whole_one_is_repeated(
    earlier: dict[str | None, str], override: str, done: list[str], parsed: Parsed
) -> None:
    assert list(stages.done(FOUR, parsed(override), earlier)) == done


@pytest.mark.parametrize("override", ["stages_from=fetch", "stages=[fetch,convert,train,export]"])
def test_a_retry_repeats_no_stage_that_is_done_though_its_run_names_it(override: str, parsed: Parsed) -> None:
    earlier: dict[str | None, str] = {"fetch": "SUCCEEDED", "convert": "SUCCEEDED", "train": "FAILED"}
    assert list(stages.done(FOUR, parsed(override), earlier, goes_on=True)) == ["fetch", "convert"]


def test_a_stage_is_done_once_all_its_outputs_are_complete_whoever_asks_for_it(parsed: Parsed, tmp_path: Path) -> None:
    model, text = tmp_path / "model", tmp_path / "text.jsonl"
    jobs = chain("fetch", outputs=(str(model), str(text)))
    config = parsed("stages=[fetch]")
    model.mkdir()
    write_commit(model, {})
    assert stages.done(jobs, config, {}) == {}
    text.write_text("{}")
    assert stages.done(jobs, config, {}) == {}
    write_commit(text, {})
    assert stages.done(jobs, config, {}) == {"fetch": f"complete already: {model}, {text}"}
    text.write_text("")
    assert stages.done(jobs, config, {}) == {}

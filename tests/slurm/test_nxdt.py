"""The third article end to end on a real Slurm, with stand-ins for NxDT and Neuron's tools."""

import json
import subprocess
from collections.abc import Iterator

import pytest
import yaml

from tests.checkpoint.models import differing, read_model
from tests.conftest import Result
from tests.fake_neuron_tools import COMPILER
from tests.slurm import nxdt_runs
from tests.slurm.cluster import Cluster, wait_for
from tests.slurm.nxdt_runs import STAGES, TEMPLATE, Site, given, log, newest, reason, shell, stages, train, trainwright
from trainwright import registry
from trainwright.node.events import read_events
from trainwright.node.results import read
from trainwright.node.run_paths import RunPaths

# Failures that the stand-ins play, and what the status of a run says of each.
FAILURES = {
    "device-memory": "known cause (device-memory): the memory of a NeuronCore is full (194641920 bytes more were asked",
    "collectives-init": "known cause (collectives-init): the NeuronCores could not set up their collectives",
    "staging": "known cause (staging): a compiled graph could not be loaded onto a NeuronCore",
    "cached-failure": "known cause (cached-failure): the cache remembers that this graph failed",
    "host-memory": "known cause (host-memory): the compiler was killed",
    "cache-file": "known cause (cache-file): the compiler lost a file of its cache",
    "lost-artifact": "known cause (lost-artifact): the compiler finished a graph but its file never reached the cache",
    "compiler": "known cause (compiler): the compiler does not manage this graph",
    "failed-graph": f"1 of 3 graphs failed to compile; first: {{cache}}/{COMPILER}/MODULE_",
    "error-line": "lines with ERROR: 1; first: 2025-06-25 05:50:00.000001: 75652 ERROR ||NEURON_CACHE||",
    "no-totals": "did not come to its end: no line 'Total failed compilations'",
    "no-graphs": "Total graphs: 0: the training script made no graph",
    "exit-code": "exit code 3",
}


@pytest.fixture(scope="module")
def site(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Return the site of all runs here; they are submitted by a shell in its folder."""
    built = nxdt_runs.build(tmp_path_factory.mktemp("site"))
    with shell(**built.environ), pytest.MonkeyPatch.context() as patch:
        patch.chdir(built.folder)
        yield built


@pytest.fixture(scope="module", autouse=True)
def stopped(site: Site, slurm: Cluster) -> RunPaths:
    """Return a training that was told of its time limit; Slurm starts it again while the first tests run."""
    with shell(FAKE_NEURON_PAUSE_AT="3"):
        result = train(site, "stages=[train]")
    assert result.code == 0, result.err
    paths = newest(site)
    wait_for(lambda: "stays before step 3" in log(paths, "train"), "it trains")
    slurm.ask("scancel", "--signal=USR1", nxdt_runs.job(paths, "train"))
    return paths


@pytest.fixture(scope="module")
def first(site: Site, stopped: RunPaths) -> tuple[RunPaths, Result]:
    """Return the first whole run and what its command printed."""
    result = train(site, f"model.chat_template='{TEMPLATE}'", "launcher.wait=true")
    assert result.code == 0, result.err
    return newest(site), result


def test_the_article_runs_from_fetch_to_verify(first: tuple[RunPaths, Result], site: Site, slurm: Cluster) -> None:
    paths, result = first
    told = json.loads(trainwright(site, "status", paths.run_dir.name, "--json").out)["run"]
    assert (told["state"], told["step"], told["max_steps"]) == ("SUCCEEDED", 6, 6)
    assert [(stage["stage"], stage["state"]) for stage in told["stages"]] == [(name, "SUCCEEDED") for name in STAGES]
    jobs = [int(nxdt_runs.job(paths, stage)) for stage in STAGES]
    assert jobs == list(range(jobs[0], jobs[0] + 6))
    found = "step 6 loads; 16 of 2,640 weights differ from the fetched model's"
    for stage, words in {**dict.fromkeys(STAGES, ""), "verify": f": {found}"}.items():
        assert f"end  {paths.run_dir.name} {stage}  SUCCEEDED{words}\n" in result.out
    assert f"export       {paths.export(6)}\n" in result.out
    compile_call, train_call = site.calls_of(paths.run_dir)
    assert (compile_call["env"]["COMPILE"], train_call["env"]["COMPILE"]) == ("1", "0")
    tree = given(train_call)
    assert tree["exp_manager"]["version"] == paths.run_dir.name
    assert tree["exp_manager"]["resume_from_checkpoint"] == f"{site.shared}/shards/tanuki_8b/tp2-pp1-kv1-fusedTrue"
    assert tree["model"]["weight_init_only"] is True


def test_results_count_samples_exactly_where_nxdts_counter_lags(first: tuple[RunPaths, Result]) -> None:
    paths, _ = first
    results = read(paths.results)
    assert results is not None
    assert (results["steps"], results["consumed_samples"], results["stop_reason"]) == (6, 48, "max_steps")
    names = ["tanuki_8b--step=4-consumed_samples=32.0.ckpt", "tanuki_8b--step=6-consumed_samples=32.0.ckpt"]
    assert [(one["step"], one["name"]) for one in results["checkpoints"]] == list(zip([4, 6], names, strict=True))
    for saved in results["checkpoints"]:
        files = [path for path in (paths.run_dir / saved["path"]).rglob("*") if path.is_file()]
        assert saved["bytes"] == sum(path.stat().st_size for path in files)
        assert saved["save_s"] is not None
    assert results["versions"] == {"python": "3.10", "neuronx_cc": "2.19.8089.0"}
    steps = [json.loads(line) for line in paths.metrics(1).read_text().splitlines()]
    assert [(line["step"], line["consumed_samples"]) for line in steps] == [(1, 8), (3, 24), (4, 32), (6, 48)]
    assert steps[2]["train_loss"] == results["train_loss"] == pytest.approx(1.97)


def test_the_export_is_the_trained_model_and_verify_counts_what_differs(
    first: tuple[RunPaths, Result], site: Site
) -> None:
    paths, _ = first
    assert differing(read_model(paths.export(6)), nxdt_runs.trained_tensors()) == []
    assert json.loads((paths.export(6) / "tokenizer_config.json").read_text())["chat_template"] == TEMPLATE
    report = json.loads(paths.verification(6).read_text())
    assert (report["problems"], report["warnings"]) == ([], [])
    assert (report["tensors"], report["tensors_differing"], report["weights_differing"]) == (21, 1, 16)
    assert report["base"] == f"{site.shared}/models/tanuki_8b"


def test_a_dry_run_renders_all_six_scripts_as_good_bash(site: Site) -> None:
    result = train(site, "dry_run=true")
    assert result.code == 0, result.err
    scripts = sorted(site.folder.glob("dry_runs/**/a1-*.sh"))
    assert [path.stem for path in scripts] == sorted(f"a1-{stage}" for stage in STAGES)
    for reader in (["bash", "-n"], ["shellcheck", "--norc"]):
        checked = [subprocess.run([*reader, path], capture_output=True, text=True) for path in scripts]
        assert [one.stdout + one.stderr for one in checked] == [""] * 6
        assert [one.returncode for one in checked] == [0] * 6


def test_every_known_failure_of_the_compiler_is_named_and_training_never_starts(
    first: tuple[RunPaths, Result], site: Site
) -> None:
    names = ",".join(f"compile:{name}" for name in FAILURES)
    cache = "backend.compiler_cache_url=${site.slurm.shared_dir}/caches/${launcher.env.FAKE_NEURON_FAILURE}"
    swept = (f"+launcher.env.FAKE_NEURON_FAILURE={names}", cache, "stages=[compile,train]", "launcher.wait=true")
    result = train(site, *swept, options=("-m",))
    assert result.code == 1, result.err
    found = {}
    for record in site.shared.glob("experiments/*/*/run/run.yaml"):
        environ = yaml.safe_load(record.read_text())["config"]["launcher"]["env"]
        found[environ.get("FAKE_NEURON_FAILURE", "").partition(":")[2]] = RunPaths(record.parents[1])
    for name, cause in FAILURES.items():
        paths = found[name]
        assert stages(paths) == {"compile": "FAILED", "train": "CANCELLED"}, name
        cache_dir = f"{site.shared}/caches/compile:{name}"
        told = trainwright(site, "status", paths.run_dir.name).out
        assert cause.format(cache=cache_dir) in told
        assert "DependencyNeverSatisfied" in reason(paths, "train")
        assert [call["env"]["COMPILE"] for call in site.calls_of(paths.run_dir)] == ["1"]


def test_a_retry_goes_on_at_compile_once_the_cause_is_gone(first: tuple[RunPaths, Result], site: Site) -> None:
    with shell(FAKE_NEURON_FAILURE="compile:device-memory"):
        assert train(site, "data.seq_length=32", "stages_from=fetch").code == 0
    paths = newest(site)
    done, never = ["fetch", "convert"], ["train", "export", "verify"]
    broken = {**dict.fromkeys(done, "SUCCEEDED"), "compile": "FAILED", **dict.fromkeys(never, "CANCELLED")}
    wait_for(lambda: trainwright(site, "status", paths.run_dir.name).code == 0 and stages(paths) == broken, "it fails")
    shards = f"{site.shared}/shards/tanuki_8b/tp2-pp1-kv1-fusedTrue"
    assert reason(paths, "convert") == f"skipped: complete already: {shards}"
    result = trainwright(site, "retry", paths.run_dir.name)
    assert result.code == 0, result.err
    assert f"skipped  {paths.run_dir.name} fetch: it is done" in result.out
    assert f"skipped  {paths.run_dir.name} convert: " in result.out
    wait_for(lambda: stages(paths)["train"] == "SUCCEEDED", "it compiles and trains")
    assert [call["env"]["COMPILE"] for call in site.calls_of(paths.run_dir)] == ["1", "1", "0"]


def test_the_same_graphs_are_not_compiled_again_and_a_save_that_was_killed_is_not_resumed_from(
    first: tuple[RunPaths, Result], site: Site
) -> None:
    variables = {
        "FAKE_NEURON_KILLED_IN": "4",
        "XLA_DOWNCAST_BF16": "from-the-shell",
        "NEURON_COMPILE_CACHE_URL": "/from-the-shell",
        "NEURON_CC_FLAGS": "--cache_dir=/from-the-shell",
    }
    with shell(**variables):
        result = train(site, "stages=[compile,train]", "launcher.wait=true")
    assert result.code == 1, result.err
    paths = newest(site)
    why = f"skipped: all 3 graphs are in {site.shared}/neuron_cache, made with the same key and versions"
    assert (stages(paths), reason(paths, "compile")) == ({"compile": "SUCCEEDED", "train": "FAILED"}, why)
    assert f"end  {paths.run_dir.name} compile  SUCCEEDED: {why}" in result.out

    (call,) = site.calls_of(paths.run_dir)
    assert call["env"]["NEURON_COMPILE_CACHE_URL"] == f"{site.shared}/neuron_cache"
    assert not {"XLA_DOWNCAST_BF16", "NEURON_CC_FLAGS"} & call["env"].keys()
    for name in ("XLA_DOWNCAST_BF16", "NEURON_COMPILE_CACHE_URL", "NEURON_CC_FLAGS"):
        assert f"unset {name}, which came from the shell and would have beaten NxDT's YAML" in log(paths, "train")
    assert "from-the-shell" not in log(paths, "train")

    assert any(paths.checkpoints.glob("*-unfinished"))
    result = trainwright(site, "retry", paths.run_dir.name)
    assert result.code == 0, result.err
    told = log(paths, "train", attempt=2)
    assert "janitor: removed tanuki_8b--step=4-consumed_samples=32.0.ckpt: its save was interrupted" in told
    assert "train: resume: from tanuki_8b--step=2-consumed_samples=8.0.ckpt, step 2" in told
    tree = given(site.calls_of(paths.run_dir)[-1])
    assert (tree["exp_manager"]["resume_from_checkpoint"], tree["model"]["weight_init_only"]) == (None, False)
    assert tree["exp_manager"]["version"] == paths.run_dir.name
    results = read(paths.results)
    assert results is not None
    assert (results["attempt"], results["consumed_samples"]) == (2, 48)


def test_two_nodes_follow_one_decision_and_another_degree_is_compiled(
    first: tuple[RunPaths, Result], site: Site
) -> None:
    degree = ("parallelism.tensor_model_parallel_size=4", "parallelism.kv_replicator=2")
    result = train(site, "hardware.num_nodes=2", *degree, "stages=[compile,train]", "launcher.wait=true")
    assert result.code == 0, result.err
    paths = newest(site)
    for stage, why in (("compile", "compile: fresh: no run with this cache key"), ("train", "train: fresh: ")):
        assert paths.nxdt_decision(stage, 1).exists()
        for node in (0, 1):
            assert why in log(paths, stage, rank=node)
    calls = [call["argv"] for call in site.calls_of(paths.run_dir)]
    places = [{word: argv[argv.index(word) + 1] for word in argv if word.startswith("--n")} for argv in calls]
    assert sorted((place["--node_rank"], place["--nnodes"], place["--nproc_per_node"]) for place in places) == [
        ("0", "2", "2"), ("0", "2", "2"), ("1", "2", "2"), ("1", "2", "2"),
    ]  # fmt: skip
    assert [path.name for path in sorted(paths.checkpoints.iterdir())] == [
        f"tanuki_8b--step={step}-consumed_samples=32.0.ckpt" for step in (4, 6)
    ]


def test_a_training_told_of_its_time_limit_goes_on_in_the_next_attempt(stopped: RunPaths, site: Site) -> None:
    wait_for(lambda: registry.refresh(stopped.run_dir).state == "SUCCEEDED", "Slurm has started it again")
    told = [(event.state, event.attempt) for event in read_events(stopped).events if event.stage == "train"]
    assert told[1:] == [
        ("RUNNING", 1), ("PREEMPTED", 1), ("REQUEUED", 2), ("RUNNING", 2), ("SUCCEEDED", 2),
    ]  # fmt: skip
    assert "NxDT saves nothing on a signal" in log(stopped, "train")
    assert "train: resume: from tanuki_8b--step=2" in log(stopped, "train", attempt=2)
    first, second = (given(call) for call in site.calls_of(stopped.run_dir))
    assert first["model"]["weight_init_only"] is True
    assert second["exp_manager"] == {**first["exp_manager"], "resume_from_checkpoint": None}
    assert second["model"]["weight_init_only"] is False
    assert second["exp_manager"]["version"] == stopped.run_dir.name

"""A site with a Neuron environment and a tiny Llama, and runs of it that go through train.py to a real Slurm."""

import contextlib
import io
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.backends.nxdt.runs import CONFIG, tiny_model, tiny_tensors
from tests.checkpoint.models import Tensors, disown, write_model
from tests.conftest import Result
from tests.fakes import neuron_tools, nxdt_checkout
from trainwright import app, cli, registry
from trainwright.checkpoint import hf_to_nxd
from trainwright.node.events import read_events
from trainwright.node.run_paths import RunPaths

TP = 2
STAGES = ("fetch", "convert", "compile", "train", "export", "verify")
TEMPLATE = "{% for m in messages %}[{{ m.content }}]{% endfor %}"


@dataclass(frozen=True)
class Site:
    """What stands on the storage of a cluster before the first run, and where runs find it."""

    folder: Path

    @property
    def shared(self) -> Path:
        return self.folder / "fsx"

    @property
    def model(self) -> Path:
        return self.folder / "hub" / "tiny"

    @property
    def weights(self) -> Path:
        return self.folder / "trained"

    @property
    def calls(self) -> Path:
        """What each torchrun was started with, a line each."""
        return self.folder / "calls"

    @property
    def environ(self) -> dict[str, str]:
        """What the stand-ins of NxDT and its tools are to read; the submitting shell has it, so jobs get it."""
        return {"FAKE_NEURON_WEIGHTS": str(self.weights), "FAKE_NEURON_CALLS": str(self.calls)}

    @property
    def overrides(self) -> tuple[str, ...]:
        """The third article's run, made so small that its stages take seconds."""
        return (
            "model=tanuki_8b",
            "hardware=trn1",
            f"site.slurm.shared_dir={self.shared}",
            f"site.slurm.neuron_env={self.folder}/env",
            f"site.slurm.nxdt_dir={self.folder}/nxdt",
            f"launcher.python={sys.executable}",
            "launcher.exclusive=false",
            "launcher.grace_s=10",
            "launcher.signal_s=30",
            "launcher.time=600",
            f"model.source={self.model}",
            f"model.num_layers={CONFIG['num_hidden_layers']}",
            f"model.hidden_size={CONFIG['hidden_size']}",
            f"model.ffn_hidden_size={CONFIG['intermediate_size']}",
            f"model.num_attention_heads={CONFIG['num_attention_heads']}",
            f"model.num_query_groups={CONFIG['num_key_value_heads']}",
            f"model.vocab_size={CONFIG['vocab_size']}",
            "model.max_position_embeddings=64",
            f"data.train_source={self.folder}/hub/training.jsonl",
            f"data.val_source={self.folder}/hub/validation.jsonl",
            f"data.tokenizer.vocab_size={CONFIG['vocab_size']}",
            "data.seq_length=64",
            f"parallelism.tensor_model_parallel_size={TP}",
            "parallelism.kv_replicator=1",
            "hardware.devices=2",
            "hardware.cpus=null",
            "trainer.max_steps=6",
            "optim.sched.warmup_steps=2",
            "trainer.log_every_n_steps=3",
            "exp_manager.checkpoint_callback_params.every_n_train_steps=2",
            "exp_manager.checkpoint_callback_params.save_top_k=2",
        )

    def calls_of(self, run_dir: Path) -> list[dict[str, Any]]:
        """Return what each torchrun of a run was started with."""
        calls = [json.loads(line) for line in self.calls.read_text().splitlines()]
        return [call for call in calls if any(str(run_dir) in word for word in call["argv"])]


def build(folder: Path) -> Site:
    """Write the model, its data, what training will make of it, and the environment of the nodes."""
    site = Site(folder)
    site.shared.mkdir()
    neuron_tools(folder / "env")
    nxdt_checkout(folder / "nxdt")
    tiny_model(site.model)
    for name in ("training", "validation"):
        record = {"input": "a b", "output": "b a"}
        (folder / "hub" / f"{name}.jsonl").write_text(json.dumps(record) + "\n")
    hf_to_nxd(
        write_model(folder / "scratch", CONFIG, trained_tensors()),
        site.weights,
        tensor_model_parallel_size=TP,
        dtype="fp32",  # as NxDT saves under mixed_precision
        layout="xser",
    )
    disown(site.weights)
    return site


def trained_tensors() -> Tensors:
    """Return the weights that training ends with: only the last norm's have moved."""
    tensors = tiny_tensors()
    return {**tensors, "model.norm.weight": tensors["model.norm.weight"] + torch.tensor(1.0, dtype=torch.bfloat16)}


def train(site: Site, *overrides: str, options: tuple[str, ...] = ()) -> Result:
    """Run `python train.py` in this process, without the machine's own conf/local."""
    return _told(lambda: app.run([*options, *site.overrides, *overrides, "~local"]))


def trainwright(site: Site, name: str, *arguments: str) -> Result:
    """Run `trainwright NAME` in this process."""

    def command() -> int:
        with pytest.raises(SystemExit) as ended:
            cli.main([name, "--exp-dir", f"{site.shared}/experiments", *arguments])
        return int(ended.value.code or 0)

    return _told(command)


def _told(command: Callable[[], int]) -> Result:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["train.py"])
        patch.setenv("HYDRA_FULL_ERROR", "1")
        code = command()
    return Result(code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def shell(**variables: str) -> Iterator[None]:
    """Set variables of the submitting shell for a while."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


def newest(site: Site) -> RunPaths:
    """Return the run that was recorded last."""
    records = sorted(site.shared.glob("experiments/*/*/run/run.yaml"), key=lambda path: path.stat().st_mtime_ns)
    return RunPaths(records[-1].parents[1])


def stages(paths: RunPaths) -> dict[str | None, str]:
    return {stage.stage: stage.state for stage in registry.refresh(paths.run_dir).stages}


def reason(paths: RunPaths, stage: str) -> str:
    return next(str(known.reason) for known in registry.refresh(paths.run_dir).stages if known.stage == stage)


def log(paths: RunPaths, stage: str, attempt: int = 1, rank: int = 0) -> str:
    file = paths.rank_log(stage, attempt, rank)
    return file.read_text() if file.exists() else ""


def job(paths: RunPaths, stage: str) -> str:
    """Return Slurm's id of the newest job of a stage."""
    told = [event for event in read_events(paths).events if event.state == "SUBMITTED" and event.stage == stage]
    return str(told[-1].extra["job_id"])


def given(call: dict[str, Any]) -> dict[str, Any]:
    """Return the YAML that an orchestrator was started with."""
    options = dict(word.split("=", 1) for word in call["argv"] if word.startswith("--config"))
    file = Path(options["--config-path"], f"{options['--config-name']}.yaml")
    tree: dict[str, Any] = yaml.safe_load(file.read_text())
    return tree

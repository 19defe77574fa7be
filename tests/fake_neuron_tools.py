"""Plays torchrun with NxDT's training below it, and neuron_parallel_compile: prints and writes what those do.

Started by the small programs that `tests.fakes.neuron_tools` makes: `python fake_neuron_tools.py TOOL ARGUMENTS`.
Needs the standard library only. Knobs, all in the environment:

    FAKE_NEURON_FAILURE    STAGE:NAME, such as compile:device-memory; names below, in FAILURES
    FAKE_NEURON_TAG        PARALLEL_COMPILE: the tag of older versions
    FAKE_NEURON_NUM_GRAPHS number of graphs that training asks for (3)
    FAKE_NEURON_CALLS      file to which each torchrun adds a line of JSON: argv, cwd, environment
    FAKE_NEURON_EVENTS     folder of prepared event files, copied to log_dir when training starts; unset: it writes some
    FAKE_NEURON_WEIGHTS    folder with model/ whose shards checkpoints hold; unset: those that training began with
    FAKE_NEURON_STEP_S     seconds that a step takes (0)
    FAKE_NEURON_PAUSE_AT   step before which a training that began at 0 stays for ever
    FAKE_NEURON_KILLED_IN  step in whose save a training that began at 0 is killed

Sources: neuronx-distributed-training 2.26 (training_orchestrator.py, utils/exp_manager.py), nemo_toolkit 2.1.0
(exp_manager), neuronx-distributed 2.29 (trainer/checkpoint.py), the Neuron documentation of neuron_parallel_compile,
the third article's logs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

COMPILER = "neuronxcc-2.19.8089.0+8ab9f450"
# What a failed stage prints, from the third article and the tools' own issues; {module} is one of its graphs.
FAILURES = {
    "device-memory": "2025-Mar-27 17:23:42.108556 65653:71175 ERROR TDRV:tensor_allocate Failed to allocate 194641920 "
    "bytes on DEVICE for tensor UNKNOWN.",
    "collectives-init": "2025-Mar-20 16:39:45.094874 158738:163246 ERROR ENC:ncclInitComm failed neuronInitComm "
    "request to NCCL",
    "collectives-timeout": "2025-Mar-20 16:41:45.094874 158738:163246 [5] socket.cc:44 CCOM WARN Timeout waiting for "
    "RX (waited 120 sec) - retrying",
    "staging": "2025-Jan-27 14:44:32.234379 199555:200462 ERROR NMGR:kmgr_load_nn_internal_v2 Failed to stage graph: "
    "kelf-0.json to NeuronCore",
    "compiler": "2024-12-20 02:37:08.000427: 448565 ERROR ||NEURON_CC_WRAPPER||: Failed compilation with "
    "['neuronx-cc', 'compile', '--framework=XLA', '/tmp/neuroncc_compile_workdir/4b8e/model.{module}.hlo_module.pb']: "
    "[NLA001] Unhandled exception",
    "cached-failure": "2025-06-25 04:05:43.000787: 75652 INFO ||NEURON_CC_WRAPPER||: Got a cached failed neff at "
    "{cache}/{compiler}/{module}/model.neff. Will skip compilation, please set --retry_failed_compilation for "
    "recompilation.",
    "host-memory": "[F137] neuronx-cc was forcibly killed - This most commonly occurs due to insufficient system "
    "memory.",
    "cache-file": 'Traceback (most recent call last):\n  File "/env/lib/python3.10/site-packages/libneuronxla/'
    'neuron_cc_cache.py", line 167, in download_hlo\n    self.cache.download_file(self.hlo_path, dst_path)\n'
    "FileNotFoundError: [Errno 2] No such file or directory: '{cache}/{compiler}/{module}/model.hlo_module.pb'",
    "lost-artifact": "Subprocess 17296 encountered error: stat: path should be string, bytes, os.PathLike or integer, "
    "not NoneType",
    "error-line": "2025-06-25 05:50:00.000001: 75652 ERROR ||NEURON_CACHE||: something that nobody has seen before",
    "training-script": "Traceback (most recent call last):\nAssertionError: sequence length 4096 is not 8192",
    # these print nothing of their own
    "failed-graph": "",
    "no-totals": "",
    "no-graphs": "",
    "exit-code": "",
}
_ENDS_THE_TRIAL = ("device-memory", "collectives-init", "staging", "training-script")  # which then fails as well


def main() -> int:
    tool, *words = sys.argv[1:]
    return {"torchrun": torchrun, "neuron_parallel_compile": parallel_compile}[tool](words)


def say(text: str = "", end: str = "\n") -> None:
    sys.stdout.write(text + end)
    sys.stdout.flush()


def knob(name: str, default: str = "") -> str:
    return os.environ.get(f"FAKE_NEURON_{name}", default)


def failure(stage: str) -> str:
    wanted, _, name = knob("FAILURE").partition(":")
    assert not name or name in FAILURES, name
    return name if wanted == stage else ""


def cache() -> Path:
    return Path(os.environ.get("NEURON_COMPILE_CACHE_URL", "/var/tmp/neuron-compile-cache"))


def tell(name: str, module: str) -> None:
    if FAILURES.get(name):
        say(FAILURES[name].format(module=module, cache=cache(), compiler=COMPILER))


def log(text: str, level: str = "INFO", tag: str = "") -> None:
    say(f"2025-06-25 05:58:16.000194:  58408  {level} ||{tag or knob('TAG', 'NEURON_PARALLEL_COMPILE')}||: {text}")


# ---- neuron_parallel_compile


def parallel_compile(words: list[str]) -> int:
    """Let the training script extract its graphs, then compile those of the cache that nobody has compiled."""
    name = failure("compile")
    trial = subprocess.run(words, env={**os.environ, "NEURON_EXTRACT_GRAPHS_ONLY": "1"})
    if trial.returncode:
        log(f"training run exited with status {trial.returncode}", "WARNING")
        return trial.returncode
    folder = cache() / COMPILER
    graphs = sorted(path.parent for path in folder.glob("MODULE_*/model.hlo_module.pb"))
    waiting = [graph for graph in graphs if not (graph / "model.done").exists()]
    log("New graph list from script: " + "\n\t".join(f"{graph}/model.hlo_module.pb" for graph in waiting))
    log(f"Compile cache path: {cache()}", tag="NEURON_CACHE")
    report = {}
    for number, graph in enumerate(waiting):
        is_bad = name in ("failed-graph", "compiler", "cached-failure", "host-memory") and number == 0
        report[f"{graph}/model.hlo_module.pb"] = not is_bad
        compile_graph(graph, name if is_bad else "")
        done = len(list(folder.glob("MODULE_*/model.done")))
        left = len(waiting) - number - 1
        log(
            f"Current remaining items are {left}, locked are 0, failed are {int(is_bad)}, done are {done}, "
            f"total is {len(graphs)}",
            tag="NEURON_CACHE",
        )
    if name in ("cache-file", "lost-artifact", "error-line", "collectives-timeout"):
        tell(name, graphs[0].name)
    if name == "no-totals":
        return 0
    failed = list(report.values()).count(False)
    summary = {str(status).lower(): list(report.values()).count(status) for status in set(report.values())}
    entries = {path: {"status": status, "retry": 0, "compile_time": 9.77} for path, status in report.items()}
    text = json.dumps({"compilation_summary": summary, "compilation_report": entries, "start_time": 1.5}, indent=4)
    log(text)
    log(f"Total graphs: {len(report)}")
    log(f"Total successful compilations: {len(report) - failed}")
    log(f"Total failed compilations: {failed}")
    return 3 if name == "exit-code" else 0  # a failed compilation alone does not change it


def compile_graph(graph: Path, bad: str) -> None:
    lock = graph / "model.hlo_module.pb.lock"
    minutes = 0
    while True:  # for ever, if nobody removes it
        with contextlib.suppress(FileExistsError):
            lock.touch(exist_ok=False)
            break
        say(f"[INFO]: Another process must be compiling {graph}/model.hlo_module.pb, been waiting for: {minutes}.0")
        minutes += 1
        time.sleep(0.1)
    name = f"/tmp/ubuntu/neuroncc_compile_workdir/4b8e6ed1/model.{graph.name}"
    command = f"neuronx-cc compile --framework=XLA {name}.hlo_module.pb --output {name}.neff --target=trn1 --verbose=35"
    log(f"Call compiler with cmd: {command}", tag="NEURON_CC_WRAPPER")
    say("." * 20)
    if bad:
        (graph / "model.log").write_text("[NLA001] Unhandled exception\n")
        tell(bad, graph.name)
    else:
        say("Compiler status PASS")
        (graph / "model.neff").write_bytes(b"neff" * 100)
        (graph / "model.done").touch()
    lock.unlink()


# ---- torchrun, with NxDT's training_orchestrator.py below it


def torchrun(words: list[str]) -> int:
    if knob("CALLS"):
        with open(knob("CALLS"), "a") as file:
            file.write(json.dumps({"argv": words, "cwd": os.getcwd(), "env": dict(os.environ)}) + "\n")
    options = {word.partition("=")[0]: word.partition("=")[2] for word in words if "=" in word}
    config = read_yaml(Path(options["--config-path"]) / f"{options['--config-name']}.yaml")
    node = int(words[words.index("--node_rank") + 1])
    is_trial = os.environ["COMPILE"] == "1"
    begin(config)
    module = extract(config) if is_trial else ""
    name = failure("compile" if is_trial else "train")
    if name and (not is_trial or name in _ENDS_THE_TRIAL):
        tell(name, module)
        return 1
    return train(config, is_trial=is_trial, writes=node == 0 and not is_trial)


def read_yaml(path: Path) -> dict[str, str]:
    """Return the scalars of a plain block of YAML by dotted key; no lists, no quotes within values."""
    found: dict[str, str] = {}
    parents: list[tuple[int, str]] = []
    for line in path.read_text().splitlines():
        match = re.match(r"( *)([\w.]+):(?: (.*))?$", line)
        if match is None:
            continue
        indent = len(match.group(1))
        parents = [parent for parent in parents if parent[0] < indent]
        key = ".".join([name for _, name in parents] + [match.group(2)])
        if match.group(3):
            found[key] = match.group(3).strip("'\"")
        else:
            parents.append((indent, match.group(2)))
    return found


def begin(config: dict[str, str]) -> None:
    tensor = config.get("distributed_strategy.tensor_model_parallel_size", "1")
    say("Map: 100%|##########| 12008/12008 [00:12<00:00, 952.95 examples/s]")
    say("[NeMo I 2025-06-25 01:18:26 nlp_overrides:940] NLPTrainer: Initializing trainer with parameters: ...")
    say(
        "[2025-06-25 01:18:33.326: I neuronx_distributed/parallel_layers/parallel_state.py:592] "
        f"> initializing tensor model parallel with size {tensor}"
    )


def extract(config: dict[str, str]) -> str:
    """Write the graphs that are not in the cache, as a trial run under NEURON_EXTRACT_GRAPHS_ONLY does."""
    assert os.environ["NEURON_EXTRACT_GRAPHS_ONLY"] == "1"
    count = 0 if failure("compile") == "no-graphs" else int(knob("NUM_GRAPHS", "3"))
    keys = ("trainer.devices", "distributed_strategy.tensor_model_parallel_size", "data.seq_length", "model.num_layers")
    shape = [config.get(key) for key in keys]
    module = ""
    for number in range(count):
        digest = int(hashlib.sha256(json.dumps([*shape, number]).encode()).hexdigest()[:15], 16)
        module = f"MODULE_{digest}+4eb52b03"
        folder = cache() / COMPILER / module
        if (folder / "model.done").exists():
            say(
                f"2025-06-25 03:00:00.000001:  7001  INFO ||NEURON_CC_WRAPPER||: Using a cached neff at "
                f"{folder}/model.neff. Exiting with a successfully compiled graph."
            )
            continue
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.hlo_module.pb").write_bytes(b"hlo" * 50)
        (folder / "compile_flags.json").write_text("[]")
        say(
            f"2025-06-25 03:00:00.000001:  7001  INFO ||NEURON_CC_WRAPPER||: Extracting graphs "
            f"({folder}/model.hlo_module.pb) for ahead-of-time parallel compilation. No compilation was done."
        )
    return module


def train(config: dict[str, str], *, is_trial: bool, writes: bool) -> int:
    log_dir = Path(config["exp_manager.exp_dir"]) / config["exp_manager.name"] / config["exp_manager.version"]
    max_steps = 10 if is_trial else int(config["trainer.max_steps"])
    every = int(config["exp_manager.checkpoint_callback_params.every_n_train_steps"])
    log_every, batch = int(config["trainer.log_every_n_steps"]), int(config["data.global_batch_size"])
    source, first = find_resume(config, log_dir) if writes else (None, 0)  # node 0 looks for all
    if source is not None:
        say(
            "[2025-06-30 08:47:34.316: I neuronx_distributed/trainer/checkpoint.py:887] loading checkpoint from "
            f"{source.name}"
        )
        say("[2025-06-30 08:48:28.400: I neuronx_distributed/trainer/checkpoint.py:963] loading checkpoint done")
    if writes:
        move_loose_files(log_dir)
        for file in sorted(Path(knob("EVENTS")).iterdir()) if knob("EVENTS") else ():
            shutil.copyfile(file, log_dir / file.name)
    logs_events = writes and not knob("EVENTS") and config.get("exp_manager.create_tensorboard_logger") == "true"
    events = log_dir / f"events.out.tfevents.{int(time.time())}.{os.uname().nodename}.{os.getpid()}.0"
    if logs_events:
        events.touch()  # TensorBoard's writer makes its file before the first step
    seen = first // log_every * log_every  # the counters lag: they are refreshed with each log only
    logged = (seen + 1) * batch
    for step in range(first, max_steps):
        if first == 0 and not is_trial and str(step) == knob("PAUSE_AT"):
            say(f"\nstays before step {step}")
            subprocess.run(["sleep", "infinity"], start_new_session=True)
        if step % log_every == 0:
            logged, seen = (step + 1) * batch, step
        if not is_trial or step % log_every == 0:
            loss = 0.0 if is_trial else 2 - seen / 100
            say(
                f"\rEpoch 0: {100 * step // max_steps:3}%|  | {step + 1}/{max_steps} [00:00<?, ?it/s, "
                f"reduced_train_loss={loss:.3f}, lr=0.00015, parameter_norm=2.64e-38, global_step={seen:.3f}, "
                f"consumed_samples={logged:.2f}, throughput=2.500, throughput_peak=2.600]",
                end="",
            )
        time.sleep(float(knob("STEP_S", "0")))
        if logs_events and (step + 1) % log_every == 0:
            scalars = {"reduced_train_loss": 2 - seen / 100, "lr": 0.00015, "parameter_norm": 50.0, "global_step": seen}
            log_event(events, step, {**scalars, "consumed_samples": logged, "throughput": 2.5, "epoch": 0})
        if writes and (step + 1) % every == 0:
            save(config, log_dir, step + 1, logged, source, is_killed=first == 0 and str(step + 1) == knob("KILLED_IN"))
    say()
    say(f"`Trainer.fit` stopped: `max_steps={max_steps}` reached.")
    return 0


def log_event(file: Path, step: int, scalars: dict[str, float]) -> None:
    """Append what TensorBoard's writer does in one call of Lightning's logger: a record for each scalar."""
    with open(file, "ab") as out:
        for tag, value in scalars.items():
            entry = b"\x0a" + bytes([len(tag)]) + tag.encode() + b"\x15" + struct.pack("<f", value)
            summary = b"\x0a" + bytes([len(entry)]) + entry
            event = b"\x09" + struct.pack("<d", time.time()) + b"\x10" + bytes([step])
            event += b"\x2a" + bytes([len(summary)]) + summary
            length = struct.pack("<Q", len(event))
            out.write(length + struct.pack("<I", checksum(length)) + event + struct.pack("<I", checksum(event)))


def checksum(content: bytes) -> int:
    """Return TensorFlow's masked CRC-32C."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def find_resume(config: dict[str, str], log_dir: Path) -> tuple[Path | None, int]:
    """Return what NxDT resumes from and its step: as it is told, else the newest by time, complete or not."""
    checkpoints = log_dir / "checkpoints"
    for marker in checkpoints.glob("*-unfinished"):  # as NeMo does, and dies of it: os.remove of a directory
        for checkpoint in checkpoints.glob(f"{marker.name[: -len('-unfinished')]}*.ckpt"):
            os.remove(checkpoint)
    told = config.get("exp_manager.resume_from_checkpoint", "null")
    if told != "null":
        return Path(told), 0
    found = sorted(checkpoints.glob("**/*.ckpt"), key=lambda path: path.stat().st_mtime)
    if not found:
        return None, 0
    assert (found[-1] / "done").exists(), f"{found[-1]} cannot be loaded"
    step = re.search(r"step=(\d+)", found[-1].name)
    assert step is not None
    return found[-1], int(step.group(1))


def move_loose_files(log_dir: Path) -> None:
    log_dir.mkdir(parents=True, exist_ok=True)
    loose = [path for path in log_dir.iterdir() if path.is_file()]
    if loose:
        target = log_dir / f"run_{len(list(log_dir.glob('run_*')))}"
        target.mkdir()
        for path in loose:
            path.rename(target / path.name)


def save(
    config: dict[str, str], log_dir: Path, step: int, consumed: int, source: Path | None, *, is_killed: bool
) -> None:
    """Write a checkpoint as NxD does, `done` last."""
    template = config["exp_manager.checkpoint_callback_params.filename"]
    name = template.replace("{step}", f"step={step}").replace("{consumed_samples}", f"consumed_samples={consumed}.0")
    folder = log_dir / "checkpoints" / f"{name}.ckpt"
    marker = log_dir / "checkpoints" / f"{name}-unfinished"
    before = list(folder.parent.glob("*.ckpt")) if folder.parent.is_dir() else []
    (folder / "model").mkdir(parents=True)
    marker.touch()
    (folder / "checkpoint").write_text("1")
    tensor = int(config["distributed_strategy.tensor_model_parallel_size"])
    for part in ("model", "optim"):
        (folder / part).mkdir(exist_ok=True)
        for rank in range(tensor):
            (folder / part / f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt").write_bytes(b"weights")
    weights = Path(knob("WEIGHTS")) if knob("WEIGHTS") else source
    if weights is not None and (weights / "model").is_dir():
        # As written now: the time that a save took is read off its files.
        shutil.copytree(weights / "model", folder / "model", copy_function=shutil.copyfile, dirs_exist_ok=True)
    (folder / "user_content.pt").write_bytes(b"user content")
    if is_killed:
        os.kill(os.getpid(), signal.SIGKILL)
    (folder / "done").write_text("1")
    marker.unlink()
    top = int(config["exp_manager.checkpoint_callback_params.save_top_k"])
    for old in sorted(before, key=lambda path: path.stat().st_mtime)[: len(before) + 1 - top] if top > 0 else ():
        shutil.rmtree(old)


if __name__ == "__main__":
    sys.exit(main())

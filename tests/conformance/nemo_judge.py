"""Runs in NeMo's environment: what its exp_manager, Hydra and schedules say of ours. JSON on stdin, JSON to a file."""

import json
import sys

import pytorch_lightning as pl
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

try:
    from lightning.pytorch import Trainer
except ImportError:  # NeMo 1.23
    Trainer = pl.Trainer
from nemo.core.config import hydra_runner
from nemo.core.optim.lr_scheduler import prepare_lr_scheduler
from nemo.utils.exp_manager import ExpManagerConfig, check_resume, exp_manager


def merge(block):
    """Merge a block as exp_manager() does; return the outcome or, as text, the refusal."""
    schema = OmegaConf.structured(ExpManagerConfig)
    try:
        return OmegaConf.to_container(OmegaConf.merge(schema, OmegaConf.create(block)), enum_to_str=True)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def resume(log_dir):
    """Run check_resume on a run's directory and return the checkpoint it would take."""
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    check_resume(trainer, log_dir, resume_if_exists=True, resume_ignore_no_checkpoint=True)
    return trainer.ckpt_path


# What a machine without a GPU can do of a run's trainer; the other keys must be the trainer's own.
ON_CPU = {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "precision": 32, "use_distributed_sampler": True}


def start(folder):
    """Do with a run's file what NeMo's script does before the model: read it, make trainer and exp_manager."""
    told = {}

    @hydra_runner(config_path=".", config_name="another")
    def script(cfg):
        told["config"] = OmegaConf.to_container(cfg, resolve=True)
        told["hydra"] = {"run_dir": HydraConfig.get().run.dir, "output_subdir": HydraConfig.get().output_subdir}
        trainer = Trainer(**{**told["config"]["trainer"], **ON_CPU})
        told["log_dir"] = str(exp_manager(trainer, cfg.exp_manager))
        told["callbacks"] = [type(callback).__name__ for callback in trainer.callbacks]
        told["checkpoint"] = vars(trainer.checkpoint_callback)["filename"] if trainer.checkpoint_callback else None

    sys.argv = ["script", f"--config-path={folder}", "--config-name=config"]
    script()
    return told


def rates(optim, max_steps):
    """Return the learning rate of each step of a schedule as NeMo makes it."""
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=optim["lr"])
    config = OmegaConf.create({**optim["sched"], "max_steps": max_steps})
    made = prepare_lr_scheduler(optimizer=optimizer, scheduler_config=config)["scheduler"]
    found = []
    for _ in range(max_steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        made.step()
    return found


def main():
    asked, target = json.load(sys.stdin), sys.argv[1]
    answer = {
        "defaults": OmegaConf.to_container(OmegaConf.structured(ExpManagerConfig), enum_to_str=True),
        "merged": {name: merge(block) for name, block in asked["blocks"].items()},
        "resumed": resume(asked["log_dir"]),
        "started": {name: start(folder) for name, folder in asked["folders"].items()},
        "rates": {name: rates(*schedule) for name, schedule in asked["schedules"].items()},
    }
    with open(target, "w", encoding="utf-8") as file:
        json.dump(answer, file)


main()

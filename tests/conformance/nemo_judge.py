"""Runs in NeMo's environment: what its ExpManagerConfig and its check_resume say. JSON on stdin, JSON to a file."""

import json
import sys

import pytorch_lightning as pl
from omegaconf import OmegaConf

try:
    from lightning.pytorch import Trainer
except ImportError:  # NeMo 1.23
    Trainer = pl.Trainer
from nemo.utils.exp_manager import ExpManagerConfig, check_resume


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


def main():
    asked = json.load(sys.stdin)
    answer = {
        "defaults": OmegaConf.to_container(OmegaConf.structured(ExpManagerConfig), enum_to_str=True),
        "merged": {name: merge(block) for name, block in asked["blocks"].items()},
        "resumed": resume(asked["log_dir"]),
    }
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump(answer, file)


main()

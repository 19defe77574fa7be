"""Runs in NeMo's environment: what its exp_manager makes of run directories. JSON on stdin, JSON to a file."""

import json
import os
import sys

import pytorch_lightning as pl
from omegaconf import OmegaConf

try:
    from lightning.pytorch import Trainer
except ImportError:  # NeMo 1.23
    Trainer = pl.Trainer
from nemo.utils.callbacks import NeMoModelCheckpoint
from nemo.utils.exp_manager import ExpManagerConfig, exp_manager


def start(block):
    """Do what a script does before it trains; return the checkpoint that it would load, or the refusal."""
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    try:
        exp_manager(trainer, OmegaConf.create(block))
        if hasattr(NeMoModelCheckpoint, "_remove_unfinished_checkpoints"):  # what 2.x does in its callback's setup()
            checkpoints = os.path.join(block["exp_dir"], block["name"], block["version"], "checkpoints")
            NeMoModelCheckpoint._remove_unfinished_checkpoints(checkpoints)
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    return {"resumed": trainer.ckpt_path}


def main():
    OmegaConf.structured(ExpManagerConfig)
    asked = json.load(sys.stdin)
    answer = {name: start(block) for name, block in asked.items()}
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump(answer, file)


main()

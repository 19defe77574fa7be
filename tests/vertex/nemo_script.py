"""Plays NeMo 1.23's megatron_gpt_pretraining.py on CPUs: `nemo_script.py --config-path=FOLDER --config-name=NAME`.

It trains in earnest, the native backend's GPT-2 on the data, in the order and with the sizes that the YAML says. It
leaves what NeMo leaves: a log, TensorBoard's events, checkpoints as megatron-core lays them out, files put away in
run_N. It resumes from what it is told and looks for nothing.
"""

import argparse
import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import yaml
from torch import Tensor, nn

from trainwright.backends.native.module import LanguageModel, build_network
from trainwright.config import Model
from trainwright.dataset.blend import parse_data_prefix
from trainwright.dataset.samples import GptData, Samples, open_dataset, requested_samples

Tree = dict[str, Any]
VOCAB_SIZE = 50304  # of GPT-2, padded
CONSUMED = re.compile(r"consumed_samples\=([0-9]+.[0-9]+)")  # NeMo's own


def native_gpt(model: Tree) -> LanguageModel:
    """Return the native backend's GPT-2 in the sizes of NeMo's section."""
    sizes = Model(
        name="gpt",
        architecture="gpt2",
        num_layers=model["num_layers"],
        hidden_size=model["hidden_size"],
        ffn_hidden_size=model["ffn_hidden_size"],
        num_attention_heads=model["num_attention_heads"],
        num_query_groups=model["num_query_groups"],
        max_position_embeddings=model["max_position_embeddings"],
        vocab_size=VOCAB_SIZE,
        make_vocab_size_divisible_by=model["make_vocab_size_divisible_by"],
        share_embeddings_and_output_weights=True,
        hidden_dropout=model["hidden_dropout"],
        attention_dropout=model["attention_dropout"],
        init_method_std=model["init_method_std"],
        layernorm_epsilon=model["layernorm_epsilon"],
        rope_theta=None,
        trains_on=(),
        source=None,
        revision=None,
        chat_template=None,
    )
    return LanguageModel(build_network(sizes, VOCAB_SIZE))


class Training:
    """One rank's part of the run."""

    def __init__(self, tree: Tree) -> None:
        self.trainer, self.manager, self.model = tree["trainer"], tree["exp_manager"], tree["model"]
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        expected = self.trainer["num_nodes"] * int(os.environ["LOCAL_WORLD_SIZE"])
        assert (self.trainer["devices"], expected) == ("auto", self.world_size)
        assert not self.manager["resume_if_exists"], "NeMo would look for checkpoints itself"
        self.log_dir = Path(self.manager["exp_dir"], self.manager["name"], self.manager["version"])
        self.checkpoints = self.log_dir / "checkpoints"
        torch.manual_seed(self.model["seed"])
        self.gpt = native_gpt(self.model)
        optim = self.model["optim"]
        self.adam = torch.optim.AdamW(
            self.gpt.parameters(), optim["lr"], betas=tuple(optim["betas"]), weight_decay=optim["weight_decay"]
        )
        self.step, self.consumed = 0, 0
        self.newest: Path | None = None  # the newest `-last`

    def run(self) -> None:
        """Train to the last step."""
        if self.rank == 0:
            put_away(self.log_dir)
        self.resume(self.manager.get("resume_from_checkpoint"))
        data = self.data()
        assert data.validation is not None
        logger = self.logger()
        dist.barrier()
        while self.step < self.trainer["max_steps"]:
            began = time.perf_counter()
            loss = self.train_step(data.train)
            values = {
                "reduced_train_loss": loss,
                "lr": self.adam.param_groups[0]["lr"],
                "global_step": float(self.step - 1),
                "consumed_samples": float(self.consumed),
                "train_step_timing in s": time.perf_counter() - began,
            }
            if self.step % self.trainer["val_check_interval"] == 0:
                values["val_loss"] = self.validate(data.validation)
                self.save(values["val_loss"])
            if logger is not None:
                for tag, value in {**values, "epoch": 0.0}.items():
                    logger.add_scalar(tag, value, self.step - 1)
                logger.flush()
        if logger is not None:
            logger.close()

    def data(self) -> GptData:
        """Return the samples; their indices are built by rank 0 and read by all others."""
        trainer, section = self.trainer, self.model["data"]
        if self.rank:
            dist.barrier()
        num_train, num_validation = requested_samples(
            max_steps=trainer["max_steps"],
            global_batch_size=self.model["global_batch_size"],
            val_check_interval=trainer["val_check_interval"],
            limit_val_batches=trainer["limit_val_batches"],
        )
        data = open_dataset(
            parse_data_prefix(section["data_prefix"]),
            splits_string=section["splits_string"],
            seq_length=section["seq_length"],
            vocab_size=VOCAB_SIZE,
            seed=self.model["seed"],
            index_mapping_dir=Path(section["index_mapping_dir"]),
            num_train_samples=num_train,
            num_validation_samples=num_validation,
        )
        if not self.rank:
            dist.barrier()
        return data

    def logger(self) -> Any:
        """Return what writes TensorBoard's events; None: on other ranks than 0."""
        if self.rank:
            return None
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self.log_dir))

    def batches(self, samples: Samples, start: int, num_samples: int) -> list[Tensor]:
        """Return this rank's micro-batches of `num_samples` samples from `start` on: of each, neighbours."""
        size = self.model["micro_batch_size"]
        starts = range(start + self.rank * size, start + num_samples, self.world_size * size)
        return [torch.from_numpy(np.stack([samples[at + one] for one in range(size)])) for at in starts]

    def train_step(self, samples: Samples) -> float:
        """Take one optimizer step and return the loss of all ranks."""
        batch = self.model["global_batch_size"]
        batches = self.batches(samples, self.consumed, batch)
        self.adam.zero_grad()
        loss = torch.stack([self.gpt(tokens[:, :-1], tokens[:, 1:]) for tokens in batches]).mean()
        loss.backward()
        gradients = [weight.grad for weight in self.gpt.parameters() if weight.grad is not None]
        together = torch.cat([loss.detach().flatten(), *(gradient.flatten() for gradient in gradients)])
        dist.all_reduce(together)
        together /= self.world_size
        sizes = [1, *(gradient.numel() for gradient in gradients)]
        for gradient, reduced in zip(gradients, together.split(sizes)[1:], strict=True):
            gradient.copy_(reduced.view_as(gradient))
        self.adam.step()
        self.step, self.consumed = self.step + 1, self.consumed + batch
        return float(together[0])

    def validate(self, samples: Samples) -> float:
        batch = self.model["global_batch_size"]
        with torch.no_grad():
            parts = self.batches(samples, 0, batch * self.trainer["limit_val_batches"])
            loss = torch.stack([self.gpt(tokens[:, :-1], tokens[:, 1:]) for tokens in parts]).mean()
        dist.all_reduce(loss)
        return float(loss) / self.world_size

    def save(self, val_loss: float) -> None:
        """Save one checkpoint under its name and again as the newest; only then the one before goes."""
        if self.rank == 0:
            template = self.manager["checkpoint_callback_params"]["filename"]
            name = filled(template, {"val_loss": val_loss, "step": self.step, "consumed_samples": float(self.consumed)})
            state = {"step": self.step, "adam": self.adam.state_dict()}
            for folder in (self.checkpoints / name, self.checkpoints / f"{name}-last"):
                write_checkpoint(folder, self.gpt, state)
            if self.newest is not None:
                shutil.rmtree(self.newest)
            self.newest = self.checkpoints / f"{name}-last"
        dist.barrier()

    def resume(self, checkpoint: str | None) -> None:
        """Go on from a checkpoint; how many samples were consumed stands in its name alone."""
        if checkpoint is not None:
            state = read_checkpoint(Path(checkpoint), self.gpt)
            self.adam.load_state_dict(state["adam"])
            self.step, self.newest = state["step"], Path(checkpoint)
            found = CONSUMED.search(checkpoint)
            assert found is not None
            self.consumed = round(float(found.group(1)))
        print(f"[NeMo I] rank {self.rank} of {self.world_size} begins after step {self.step}", flush=True)


def put_away(log_dir: Path) -> None:
    """Move what the process before has left; the folder is named by how many there are."""
    files = [path for path in log_dir.iterdir() if path.is_file()]
    if files:
        folder = log_dir / f"run_{sum(path.name.startswith('run_') for path in log_dir.iterdir())}"
        folder.mkdir()
        for path in files:
            shutil.move(str(path), str(folder))


def filled(template: str, values: Tree) -> str:
    """Return the name that Lightning makes of a template: {key:.2f} becomes key=1.23."""
    return re.sub(r"\{(\w+):?([^}]*)\}", lambda hole: f"{hole[1]}={values[hole[1]]:{hole[2]}}", template)


def write_checkpoint(folder: Path, model: nn.Module, state: Tree) -> None:
    """Write tensors as zarr does, the rest in common.pt, and metadata.json last."""
    for name, tensor in model.state_dict().items():
        array, place = np.atleast_1d(tensor.numpy()), folder / name
        place.mkdir(parents=True)
        header = {"shape": array.shape, "chunks": array.shape, "dtype": "<f4", "compressor": None, "zarr_format": 2}
        (place / ".zarray").write_text(json.dumps(header))
        array.tofile(place / ".".join("0" * array.ndim))
    torch.save(state, folder / "common.pt")
    (folder / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')


def read_checkpoint(folder: Path, model: nn.Module) -> Tree:
    """Fill a model from a checkpoint and return the rest."""
    for name, tensor in model.state_dict().items():
        chunk = folder / name / ".".join("0" * tensor.ndim)
        tensor.copy_(torch.from_numpy(np.fromfile(chunk, np.float32)).view_as(tensor))
    state: Tree = torch.load(folder / "common.pt")
    return state


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config-path", required=True)
    parser.add_argument("--config-name", required=True)
    arguments = parser.parse_args()
    tree = yaml.safe_load(Path(arguments.config_path, f"{arguments.config_name}.yaml").read_text())
    assert tree["hydra"]["run"]["dir"] == "."
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        Training(tree).run()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

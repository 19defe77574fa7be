"""Rules of NxDT: what its own code accepts and then fails at, or does otherwise than its config says.

They speak only where NxDT has the architecture at all: of other models, the rule `architecture` says enough. Traps that
no config triggers, and what becomes of those: docs/compared.md.
"""

from collections.abc import Callable, Iterator

from trainwright.config_backend import NxdtBackend
from trainwright.rules import nxdt_model, nxdt_run
from trainwright.rules.case import Case, Rule, Severity


def _rule(
    id: str,
    condition: str,
    source: str,
    find: Callable[[Case, NxdtBackend], Iterator[tuple[str, str]]],
    *,
    severity: Severity = "error",
    dry_run_severity: Severity | None = None,
) -> Rule:
    def found(case: Case) -> Iterator[tuple[str, str]]:
        if isinstance(case.config.backend, NxdtBackend) and case.config.model.architecture == "llama":
            yield from find(case, case.config.backend)

    return Rule(
        id=id, severity=severity, dry_run_severity=dry_run_severity, condition=condition, source=source, find=found
    )


RULES = (
    _rule(
        "nxdt-path",
        "a path of checkpoints holds -v, tp_rank or mp_rank",
        "NxDT nlp_overrides.py, _remove_version_count; NeMo uninject_model_parallel_rank",
        nxdt_run.paths,
    ),
    _rule(
        "nxdt-heads",
        "tensor parallel size is not key-value heads * kv_replicator, or does not divide the MLP",
        "neuronx_distributed checkpoint_converter.py; GQAQKVColumnParallelLinear",
        nxdt_model.heads,
    ),
    _rule(
        "nxdt-parallel",
        "a kind of parallelism that NxDT does not have, or sizes that do not fit each other",
        "NxDT base.py, lightning_modules/model; neuronx_distributed pipeline partitions",
        nxdt_model.parallel,
    ),
    _rule(
        "nxdt-devices",
        "hardware.devices is none of the counts that NxDT starts",
        "NxDT patches/lightning_neuron_patch.py",
        nxdt_model.devices,
    ),
    _rule(
        "nxdt-seed",
        "seed is 0",
        "NxDT initialize_model_parallel_for_nemo: a seed must be above 0",
        nxdt_model.seed,
    ),
    _rule(
        "nxdt-tied",
        "the model shares the table of input and output",
        "NxDT load_model_state_dict: lm_head.weight must be there, and is trained by itself",
        nxdt_model.tied,
    ),
    _rule(
        "nxdt-name",
        "the run's name makes NxDT choose another architecture",
        "NxDT examples/training.py",
        nxdt_model.name,
    ),
    _rule(
        "nxdt-data",
        "data that NxDT's instruction tuning does not read",
        "NxDT model_alignment_data_module.py, load_datasets",
        nxdt_model.data,
    ),
    _rule(
        "nxdt-source",
        "there are no weights to begin with",
        "the stages fetch and convert",
        nxdt_model.source,
    ),
    _rule(
        "nxdt-other-run",
        "the run shall begin with a checkpoint of another one",
        "NxDT nlp_overrides.py, restore_loops and restore_optimizers_and_schedulers; training_orchestrator.py, COMPILE",
        nxdt_run.other_run,
    ),
    _rule(
        "nxdt-precision",
        "a precision that Trainium or NxDT does not have, or that loses its master weights",
        "NxDT training_orchestrator.py, process_config; base.py, _initialize_nxd_config",
        nxdt_model.precision,
    ),
    _rule(
        "nxdt-schedule",
        "a learning rate that NxDT's schedule never has",
        "NxDT optim/lr_schedulers.py",
        nxdt_model.schedule,
    ),
    _rule(
        "nxdt-weight-decay",
        "optim.weight_decay is not the one that NxDT always takes",
        "NxDT utils/model_utils.py, get_param_groups_by_weight_decay",
        nxdt_model.weight_decay,
    ),
    _rule(
        "nxdt-saves",
        "the run saves nothing, or Lightning refuses how it should save",
        "Lightning ModelCheckpoint; NxDT utils/exp_manager.py, NeMoModelCheckpoint",
        nxdt_run.saves,
    ),
    _rule(
        "nxdt-ranking",
        "NeMo cannot read the value of the monitor in the paths of checkpoints, so that a restart fails",
        "NeMo nemo_model_checkpoint.py, nemo_topk_check_previous_run, which NxDT calls on each start",
        nxdt_run.ranking,
    ),
    _rule(
        "nxdt-recompute",
        "what shall be computed again is not known to NxDT",
        "NxDT llama_model.py: unknown names are dropped",
        nxdt_model.recompute,
    ),
    _rule(
        "nxdt-cache",
        "the cache of compiled graphs is not on storage that all nodes share",
        "Neuron's guide to neuron_parallel_compile; the stages compile and train may get different nodes",
        nxdt_run.compiler_cache,
    ),
    _rule(
        "nxdt-env",
        "a variable is set that would beat NxDT's YAML",
        "NxDT training_orchestrator.py, set_env_variable",
        nxdt_run.environment,
    ),
    _rule(
        "nxdt-ema",
        "exp_manager.ema is on, with which NxDT fails",
        "NxDT utils/exp_manager.py against NeMo 2.1.0's EMAParams",
        nxdt_run.ema,
    ),
    _rule(
        "nxdt-shared-dir",
        "model, shards or data of launcher=slurm lie where its nodes may not see them",
        "conf/site.yaml, site.slurm.shared_dir",
        nxdt_run.shared_dir,
        dry_run_severity="warning",
    ),
    _rule(
        "nxdt-sft",
        "NxDT's instruction tuning: labels, masks and long records are not what they should be",
        "NxDT ConcatDataset.py, PaddedDataset.py, modeling_llama.py; its pull request 22",
        nxdt_model.instruction_tuning,
        severity="warning",
    ),
    _rule(
        "nxdt-zero1",
        "sharded optimizer state on several replicas, which checkpoints may not hold whole",
        "NxDT nlp_overrides.py, _is_checkpoint_using_zero1_optimizer",
        nxdt_run.zero1,
        severity="warning",
    ),
    _rule(
        "nxdt-last-steps",
        "the steps after the last regular save are not saved",
        "NxDT utils/exp_manager.py, on_train_end: only with save_last",
        nxdt_run.last_steps,
        severity="warning",
    ),
    _rule(
        "nxdt-async",
        "checkpoints are written in the background",
        "neuronx_distributed trainer/checkpoint.py: the marker `done` comes with the next save",
        nxdt_run.background_saves,
        severity="warning",
    ),
    _rule(
        "nxdt-validation",
        "validation during training, whose graphs the stage compile does not see",
        "neuron_parallel_compile's trial run has ten steps and no validation",
        nxdt_run.validation,
        severity="warning",
    ),
    _rule(
        "nxdt-dev-samples",
        "only the first records of the data are taken, of validation too",
        "NxDT model_alignment_data_module.py, tokenize_datasets",
        nxdt_model.dev_samples,
        severity="warning",
    ),
)

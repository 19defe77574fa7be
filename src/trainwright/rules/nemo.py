"""Rules of NeMo: what its code accepts and then fails at, or does otherwise than its config says.

They speak only where NeMo has the architecture at all: of other models, the rule `architecture` says enough. Traps that
no config triggers, and what becomes of those: docs/compared.md.
Sources: NeMo 1.23.0, megatron-core 0.5.0, pytorch-lightning 2.0.7.
"""

import re
from collections.abc import Callable, Iterator

from trainwright.config import RunConfig
from trainwright.config_backend import NemoBackend
from trainwright.config_launcher import VertexLauncher
from trainwright.rules import nemo_saves
from trainwright.rules.case import Case, Rule, Severity, is_below
from trainwright.rules.vertex_machines import ACCELERATORS

Found = Iterator[tuple[str, str]]

_FP8 = 89  # compute capability * 10


def has_half_weights(config: RunConfig, backend: NemoBackend) -> bool:
    """Return whether weights are of 16 bits, as NeMo's megatron_amp_O2 means."""
    chosen = backend.megatron_amp_O2
    return config.trainer.precision != "32-true" if chosen is None else chosen


def _data(case: Case, backend: NemoBackend) -> Found:
    config, data = case.config, case.config.data
    if data.kind != "gpt":
        yield f"data={data.name} is data.kind={data.kind}; {backend.script} trains on text", "use data=wikipedia"
        return
    if data.data_prefix is None:
        yield (
            f"data.text={data.text}: NeMo reads Megatron data sets only",
            "make one by `trainwright data build` and give it as data.data_prefix, with data.text=null",
        )
    if data.shuffle_tokens:
        yield "data.shuffle_tokens=true is native's: NeMo reads a data set as it is", "use backend=native"
    if data.tokenizer.type == "bert_wordpiece":
        yield f"data.tokenizer.type={data.tokenizer.type} is of BERT", "use gpt2_bpe or huggingface"
    if data.tokenizer.vocab_size != config.model.vocab_size:
        yield (
            f"model.vocab_size={config.model.vocab_size}, but NeMo takes the tokenizer's "
            f"data.tokenizer.vocab_size={data.tokenizer.vocab_size}",
            "set both to what the tokenizer has",
        )
    weights = [float(weight) for weight in re.findall(r"[.0-9]+", data.splits_string)]
    if config.trainer.limit_val_batches > 0 and (len(weights) < 2 or weights[1] == 0):
        yield (
            f"data.splits_string={data.splits_string} has no validation part, but "
            f"trainer.limit_val_batches={config.trainer.limit_val_batches}",
            "give it one, or use trainer.limit_val_batches=0",
        )


def _source(case: Case, backend: NemoBackend) -> Found:
    if case.config.model.source is not None:
        yield f"model.source={case.config.model.source}: NeMo's script begins with random weights", "use null"


def _copies(case: Case, backend: NemoBackend) -> Found:
    launcher = case.config.launcher
    mount = launcher.bucket_mount if isinstance(launcher, VertexLauncher) else None
    if backend.data_cache_dir is not None and mount is not None and is_below(backend.data_cache_dir, mount):
        yield f"backend.data_cache_dir={backend.data_cache_dir} is in a bucket, no disk of a node", "use /ssd/.cache"
    elsewhere = [prefix for prefix in _prefixes(case.config) if mount is None or not is_below(prefix, mount)]
    if backend.data_copy == "rsync" and backend.data_cache_dir is not None and elsewhere:
        yield f"backend.data_copy=rsync, but {elsewhere[0]} is in no bucket", "use backend.data_copy=mount"


def _uncached(case: Case, backend: NemoBackend) -> Found:
    launcher = case.config.launcher
    if not isinstance(launcher, VertexLauncher) or backend.data_cache_dir is not None:
        return
    in_bucket = [prefix for prefix in _prefixes(case.config) if is_below(prefix, launcher.bucket_mount)]
    if in_bucket:
        yield (
            f"backend.data_cache_dir=null: samples are read at random from {in_bucket[0]}, each by a request",
            "use backend.data_cache_dir=/ssd/.cache",
        )


def _index_mapping(case: Case, backend: NemoBackend) -> Found:
    """Only rank 0 builds the indices, and ranks of other nodes read them."""
    config, place = case.config, case.config.data.index_mapping_dir
    if config.hardware.num_nodes == 1:
        return
    launcher, shared = config.launcher, config.site.slurm.shared_dir
    folder = {"vertex": getattr(launcher, "bucket_mount", None), "slurm": shared}.get(launcher.kind)
    if place is None and backend.data_cache_dir is not None:
        yield (
            f"data.index_mapping_dir=null puts indices beside the copied data, on the disk of one of "
            f"{config.hardware.num_nodes} nodes",
            f"use a directory below {folder}",
        )
    elif place is not None and folder is not None and "<site." not in place + folder and not is_below(place, folder):
        yield f"data.index_mapping_dir={place} is not below {folder}, which all nodes share", "choose one below it"


def _validation(case: Case, backend: NemoBackend) -> Found:
    trainer, batches = case.config.trainer, case.plan.max_steps * case.plan.accumulate_grad_batches
    interval = trainer.val_check_interval
    if interval > batches or (trainer.limit_val_batches > 0 and interval > trainer.max_steps):
        refused = f", and Lightning refuses more than its {batches} micro-batches" if interval > batches else ""
        yield (
            f"trainer.val_check_interval={interval} is more than trainer.max_steps={trainer.max_steps}: NeMo would "
            f"never validate{refused}",
            f"use trainer.val_check_interval={trainer.max_steps} or less",
        )


def _precision(case: Case, backend: NemoBackend) -> Found:
    precision, is_half = case.config.trainer.precision, has_half_weights(case.config, backend)
    if precision == "bf16-true":
        yield "trainer.precision=bf16-true: NeMo's plug-ins know mixed precision only", "use bf16-mixed"
    if precision == "32-true" and is_half:
        yield (
            "trainer.precision=32-true with backend.megatron_amp_O2=true, which wants weights in 16 bits",
            "use trainer.precision=bf16-mixed, or backend.megatron_amp_O2=false",
        )
    if precision == "16-mixed" and is_half and backend.optim.name == "fused_adam":
        yield (
            "trainer.precision=16-mixed with backend.megatron_amp_O2=true, which backend.optim.name=fused_adam refuses",
            "use distributed_fused_adam, or backend.megatron_amp_O2=false",
        )


def _fp8(case: Case, backend: NemoBackend) -> Found:
    if not backend.fp8:
        return
    kind = case.config.hardware.accelerator_type
    if ACCELERATORS.get(kind or "", _FP8) < _FP8:
        yield f"backend.fp8=true on {kind}, which computes in no 8-bit type", "use hardware=h100 or backend.fp8=false"
    if not backend.transformer_engine:
        yield "backend.fp8=true without backend.transformer_engine=true, which alone does it", "use both"
    if not (backend.fp8_e4m3 or backend.fp8_hybrid):
        yield "backend.fp8=true with neither backend.fp8_e4m3 nor fp8_hybrid", "use backend.fp8_hybrid=true"


def _parallel(case: Case, backend: NemoBackend) -> Found:
    config, sizes = case.config, case.config.parallelism
    tensor, pipeline, context = (
        sizes.tensor_model_parallel_size,
        sizes.pipeline_model_parallel_size,
        sizes.context_parallel_size,
    )
    if sizes.strategy != "ddp":
        yield (
            f"parallelism.strategy={sizes.strategy} is native's",
            "use ddp: backend.optim.name=distributed_fused_adam shards optimizer state",
        )
    for key, value in (
        ("model.ffn_hidden_size", config.model.ffn_hidden_size),
        ("model.num_query_groups", config.model.num_query_groups or tensor),
        *([("data.seq_length", config.data.seq_length)] if sizes.sequence_parallel else []),
    ):
        if value % tensor:
            yield f"parallelism.tensor_model_parallel_size={tensor} does not divide {key}={value}", "use a divisor"
    if context > 1 and config.data.seq_length % (2 * context):
        yield (
            f"data.seq_length={config.data.seq_length} is no multiple of twice "
            f"parallelism.context_parallel_size={context}",
            f"use a multiple of {2 * context}",
        )
    if context > 1 and not backend.transformer_engine:
        yield f"parallelism.context_parallel_size={context} needs backend.transformer_engine=true", "use both"
    pieces = backend.virtual_pipeline_model_parallel_size or 1
    if pieces > 1 and (pipeline == 1 or config.model.num_layers % (pipeline * pieces)):
        yield (
            f"backend.virtual_pipeline_model_parallel_size={pieces} with pipeline_model_parallel_size={pipeline} and "
            f"model.num_layers={config.model.num_layers}",
            "use null, or a pipeline whose pieces divide the layers",
        )
    if pieces > 1 and not has_half_weights(config, backend):
        yield f"backend.virtual_pipeline_model_parallel_size={pieces} needs backend.megatron_amp_O2=true", "use both"


def _schedule(case: Case, backend: NemoBackend) -> Found:
    sched, constant, max_steps = case.config.optim.sched, backend.optim.constant_steps, case.config.trainer.max_steps
    if constant == 0:
        return
    if sched.name != "CosineAnnealing":
        yield f"backend.optim.constant_steps={constant} with optim.sched.name={sched.name}", "use constant_steps=0"
        return
    if sched.min_lr >= case.config.optim.lr:
        yield (
            f"optim.sched.min_lr={sched.min_lr:g} is not below optim.lr={case.config.optim.lr:g}, as "
            f"backend.optim.constant_steps={constant} needs",
            "lower it, or use constant_steps=0",
        )
    if sched.warmup_steps < max_steps <= sched.warmup_steps + constant:
        yield (
            f"backend.optim.constant_steps={constant} leaves nothing between optim.sched.warmup_steps="
            f"{sched.warmup_steps} and trainer.max_steps={max_steps}: the learning rate falls from its peak at once",
            "use backend.optim.constant_steps=0",
        )


def _warm_up(case: Case, backend: NemoBackend) -> Found:
    optim, max_steps = case.config.optim, case.config.trainer.max_steps
    if optim.sched.warmup_steps > max_steps:
        reached = optim.lr * max_steps / optim.sched.warmup_steps
        yield (
            f"optim.sched.warmup_steps={optim.sched.warmup_steps} is more than trainer.max_steps={max_steps}: the "
            f"learning rate ends at {reached:.2g} and never comes to optim.lr={optim.lr:g}",
            "use fewer, or allow=[nemo-warm-up]",
        )


def _seed(case: Case, backend: NemoBackend) -> Found:
    if case.config.seed == 0:
        yield "seed=0: Megatron wants more than 0", "use another, such as seed=1234"


def _idle(case: Case, backend: NemoBackend) -> Found:
    config, sizes = case.config, case.config.parallelism
    idle = {
        "trainer.num_threads": (config.trainer.num_threads is not None, "use launcher.env.OMP_NUM_THREADS"),
        "parallelism.kv_replicator": (sizes.kv_replicator != 1, "use 1"),
        "parallelism.sequence_parallel": (
            sizes.sequence_parallel and sizes.tensor_model_parallel_size == 1,
            "use false, or a larger parallelism.tensor_model_parallel_size",
        ),
        "backend.ub_tp_comm_overlap": (
            backend.ub_tp_comm_overlap and not sizes.sequence_parallel,
            "use parallelism.sequence_parallel=true",
        ),
        "backend.overlap_p2p_comm": (
            backend.overlap_p2p_comm and (backend.virtual_pipeline_model_parallel_size or 1) == 1,
            "use backend.virtual_pipeline_model_parallel_size",
        ),
        "model.max_position_embeddings": (
            config.model.max_position_embeddings != config.data.seq_length,
            f"it has data.seq_length={config.data.seq_length} positions; use the same number",
        ),
    }
    for key, (is_set, remedy) in idle.items():
        section, _, name = key.rpartition(".")
        if is_set:
            value = str(getattr(getattr(config, section), name)).replace("True", "true")
            yield f"{key}={value} does nothing in NeMo here", remedy


def _profile(case: Case, backend: NemoBackend) -> Found:
    profile = backend.nsys_profile
    if not profile.enabled:
        return
    beyond = [rank for rank in profile.ranks if rank >= case.plan.world_size]
    if profile.end_step < profile.start_step or beyond:
        yield (
            f"backend.nsys_profile: steps {profile.start_step} to {profile.end_step} of ranks {list(profile.ranks)} of "
            f"{case.plan.world_size}",
            "use end_step >= start_step, and ranks that exist",
        )


def _versions(case: Case, backend: NemoBackend) -> Found:
    if backend.nemo_version == "2.7" and "megatron_gpt_pretraining" in backend.script:
        yield (
            f"backend.nemo_version=2.7: that version has no {backend.script} any more",
            "use backend.nemo_version=1.23, or a script of your own",
        )


def _prefixes(config: RunConfig) -> list[str]:
    return [part for part in config.data.data_prefix or () if isinstance(part, str)]


def _rule(
    id: str,
    condition: str,
    source: str,
    find: Callable[[Case, NemoBackend], Found],
    *,
    severity: Severity = "error",
) -> Rule:
    def found(case: Case) -> Found:
        if isinstance(case.config.backend, NemoBackend) and case.config.model.architecture == "gpt2":
            yield from find(case, case.config.backend)

    return Rule(id=id, severity=severity, condition=condition, source=source, find=found)


RULES: tuple[Rule, ...] = (
    _rule(
        "nemo-data",
        "data or tokenizer that NeMo's script does not read, or reads otherwise than planned",
        "NeMo megatron_gpt_model.py, build_train_valid_test_datasets",
        _data,
    ),
    _rule("nemo-source", "model.source is set, but NeMo starts from random weights", "NeMo's script", _source),
    _rule(
        "nemo-data-copy",
        "data cannot be copied the way that is asked for",
        "`gcloud storage rsync` reads buckets only",
        _copies,
    ),
    _rule(
        "nemo-index-mapping",
        "data.index_mapping_dir is not on storage that all nodes share",
        "megatron-core 0.5.0, gpt_dataset.py: rank 0 builds indices, all ranks read them",
        _index_mapping,
    ),
    _rule(
        "nemo-filename",
        "a checkpoint's name does not tell what NeMo reads in it when it resumes",
        "NeMo megatron_base_model.py, _extract_consumed_samples_from_ckpt; exp_manager.py, check_resume",
        nemo_saves.filename,
    ),
    _rule(
        "nemo-path",
        "a path holds what NeMo looks for in the names of checkpoints",
        "NeMo megatron_base_model.py, _extract_consumed_samples_from_ckpt; uninject_model_parallel_rank",
        nemo_saves.path,
    ),
    _rule(
        "nemo-saves",
        "NeMo or Lightning fails at how the run should save, or cannot resume from it",
        "NeMo utils/exp_manager.py, check_resume; NeMoModelCheckpoint; Lightning ModelCheckpoint",
        nemo_saves.saves,
    ),
    _rule(
        "nemo-validation",
        "trainer.val_check_interval is more than the run has steps",
        "Lightning fit_loop.py, setup_data",
        _validation,
    ),
    _rule(
        "nemo-precision",
        "a precision that NeMo does not train in, or not with these settings",
        "NeMo megatron_trainer_builder.py; megatron_base_model.py, configure_optimizers",
        _precision,
    ),
    _rule(
        "nemo-fp8",
        "fp8 on a GPU that has none, or without what it needs",
        "Transformer Engine, check_fp8_support: compute capability 8.9; NeMo build_transformer_config",
        _fp8,
    ),
    _rule(
        "nemo-parallel",
        "a kind of parallelism that NeMo does not have, or sizes that do not fit each other",
        "megatron-core TransformerConfig; NeMo megatron_gpt_model.py",
        _parallel,
    ),
    _rule(
        "nemo-schedule",
        "a learning rate schedule without a decay",
        "NeMo core/optim/lr_scheduler.py, WarmupAnnealHoldPolicy",
        _schedule,
    ),
    _rule(
        "nemo-ema",
        "exp_manager.ema with which NeMo cannot resume",
        "NeMo collections/common/callbacks/ema.py",
        nemo_saves.ema,
    ),
    _rule("nemo-seed", "seed is 0", "NeMo megatron_init.py, _set_random_seed", _seed),
    _rule(
        "nemo-files",
        "a file of exp_manager.files_to_copy that nodes do not see",
        "NeMo utils/exp_manager.py: rank 0 copies when it starts",
        nemo_saves.files_to_copy,
    ),
    _rule(
        "nemo-profile",
        "steps or ranks of backend.nsys_profile that never come",
        "NeMo core/classes/modelPT.py, _setup_nsys_profiling",
        _profile,
    ),
    _rule(
        "nemo-version",
        "backend.nemo_version does not have backend.script",
        "nemo-toolkit 2.7.3 is without nemo.collections.nlp",
        _versions,
    ),
    _rule(
        "nemo-uncached",
        "data is read from a bucket sample by sample",
        "Cloud Storage FUSE, semantics: reads are requests of ranges",
        _uncached,
        severity="warning",
    ),
    _rule(
        "nemo-rarely-saves",
        "a run that is cut short loses much, or keeps other checkpoints than the best",
        "Lightning ModelCheckpoint: with every_n_epochs=1 it saves after validations",
        nemo_saves.rarely_saves,
        severity="warning",
    ),
    _rule(
        "nemo-own-resume",
        "NeMo by itself could not resume in the run's directory; the worker does not ask it to",
        "NeMo NeMoModelCheckpoint, nemo_topk_check_previous_run",
        nemo_saves.own_resume,
        severity="warning",
    ),
    _rule(
        "nemo-warm-up",
        "the warm-up is longer than the run; the first article's is",
        "NeMo core/optim/lr_scheduler.py",
        _warm_up,
        severity="warning",
    ),
    _rule(
        "nemo-max-time",
        "two limits of time, of which NeMo keeps one",
        "NeMo utils/exp_manager.py, StatelessTimer",
        nemo_saves.max_time,
        severity="warning",
    ),
    _rule(
        "nemo-idle",
        "keys are set that NeMo does not heed",
        "NeMo megatron_base_model.py, _validate_and_override_config; megatron-core GPTModel",
        _idle,
        severity="warning",
    ),
)

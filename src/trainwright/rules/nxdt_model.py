"""What NxDT's rules find in model, data, optimizer and how the model is spread. The rules themselves: rules/nxdt.py."""

from collections.abc import Iterator

from trainwright.config_backend import NxdtBackend
from trainwright.rules.case import Case

_DEVICES = (1, 2, 8, 32, 64, 128)
_RECOMPUTED = (
    "CoreAttention",
    "LlamaDecoderLayer",
    "LlamaMLP",
    "LlamaRMSNorm",
    "LlamaRotaryEmbedding",
    "ActivationMultiplyMLP",
)
_WEIGHT_DECAY = 0.01

Found = Iterator[tuple[str, str]]


def heads(case: Case, backend: NxdtBackend) -> Found:
    model, sizes = case.config.model, case.config.parallelism
    tensor, copies = sizes.tensor_model_parallel_size, sizes.kv_replicator
    groups = model.num_query_groups or model.num_attention_heads
    if tensor != groups * copies:
        fits = f"use parallelism.tensor_model_parallel_size={groups * copies}"
        if tensor % groups == 0:
            fits += f" or parallelism.kv_replicator={tensor // groups}"
        yield (
            f"parallelism.tensor_model_parallel_size={tensor} is not "
            f"model.num_query_groups * parallelism.kv_replicator = {groups} * {copies}",
            fits,
        )
    if model.ffn_hidden_size % tensor:
        yield (
            f"parallelism.tensor_model_parallel_size={tensor} does not divide "
            f"model.ffn_hidden_size={model.ffn_hidden_size}",
            "use a divisor",
        )
    if case.config.hardware.neuron_generation == "trn2" and copies > 1:
        yield (
            f"parallelism.kv_replicator={copies}: which rank of a trn2 holds which head is unverified, and NxD's own "
            "converter and module differ",
            f"use parallelism.kv_replicator=1 with parallelism.tensor_model_parallel_size={groups}, or hardware=trn1",
        )


def parallel(case: Case, backend: NxdtBackend) -> Found:
    config, sizes = case.config, case.config.parallelism
    tensor, pipeline = sizes.tensor_model_parallel_size, sizes.pipeline_model_parallel_size
    if sizes.strategy != "ddp":
        yield f"parallelism.strategy={sizes.strategy} is native's", "use ddp: backend.zero1 shards optimizer state"
    if sizes.context_parallel_size > 1:
        yield (
            f"parallelism.context_parallel_size={sizes.context_parallel_size}: ring attention is not rendered for NxDT",
            "use 1",
        )
    if sizes.sequence_parallel and config.data.seq_length % tensor:
        yield (
            f"data.seq_length={config.data.seq_length} is no multiple of "
            f"parallelism.tensor_model_parallel_size={tensor}, as parallelism.sequence_parallel needs",
            "use a multiple, or parallelism.sequence_parallel=false",
        )
    pieces = backend.virtual_pipeline_model_parallel_size
    if pieces > 1 and (pipeline == 1 or config.model.num_layers % (pipeline * pieces)):
        yield (
            f"backend.virtual_pipeline_model_parallel_size={pieces} with pipeline_model_parallel_size={pipeline} and "
            f"model.num_layers={config.model.num_layers}",
            "use 1, or a pipeline whose pieces divide the layers",
        )


def devices(case: Case, backend: NxdtBackend) -> Found:
    if case.config.hardware.devices not in _DEVICES:
        yield f"hardware.devices={case.config.hardware.devices}", f"use {', '.join(map(str, _DEVICES))}"


def seed(case: Case, backend: NxdtBackend) -> Found:
    if case.config.seed == 0:
        yield "seed=0: NxDT wants more than 0", "use another, such as seed=1234"


def tied(case: Case, backend: NxdtBackend) -> Found:
    if case.config.model.share_embeddings_and_output_weights:
        yield (
            f"model={case.config.model.name} shares the table of input and output, which NxDT would train as two",
            "use a model with model.share_embeddings_and_output_weights=false",
        )


def name(case: Case, backend: NxdtBackend) -> Found:
    if "mixtral" in case.config.name:
        yield f"name={case.config.name}: NxDT takes any name with mixtral for that architecture", "choose another name"


def data(case: Case, backend: NxdtBackend) -> Found:
    data, source = case.config.data, case.config.model.source
    tokenizer = data.tokenizer.name
    if data.kind != "sft":
        yield f"data={data.name} is data.kind={data.kind}; the NxDT recipe tunes on instructions", "use data=tanuki_sft"
    for key, path in (("data.train_path", data.train_path), ("data.val_path", data.val_path)):
        if path is not None and not path.lower().endswith((".json", ".jsonl")):
            yield f"{key}={path}: NxDT goes by the name and reads .jsonl and .json only", "rename the file"
    if data.tokenizer.type != "huggingface":
        yield f"data.tokenizer.type={data.tokenizer.type}: NxDT reads Hugging Face's only", "use huggingface"
    elif tokenizer is not None and tokenizer != source and not tokenizer.startswith(("/", "<site.")):
        yield (
            f"data.tokenizer.name={tokenizer} is neither model.source={source} nor a path: each rank would ask the hub "
            "for it, and its tokens may be others",
            "use null for the one that is fetched with the model, or a path that all nodes see",
        )


def dev_samples(case: Case, backend: NxdtBackend) -> Found:
    if backend.dev_choose_samples is not None:
        yield (
            f"backend.dev_choose_samples={backend.dev_choose_samples} is taken of both files; one with fewer records "
            "ends the run with an IndexError",
            "count data.val_path, or use null",
        )


def instruction_tuning(case: Case, backend: NxdtBackend) -> Found:
    if backend.packing:
        told = "prompts and padding are trained on, and records of data.seq_length tokens or more are dropped"
    else:
        told = "prompts and padding count in the loss, and records of data.seq_length tokens or more end the run"
    yield (
        f"backend.packing={str(backend.packing).lower()}: in NxDT {told}; its loss compares with no other trainer's",
        "look with `trainwright data inspect`; allow=[nxdt-sft] if you know",
    )


def source(case: Case, backend: NxdtBackend) -> Found:
    if case.config.model.source is None:
        yield (
            f"model.source=null: model={case.config.model.name} has no trained weights to begin with",
            f"give one, or put the model into backend.model_dir={backend.model_dir} and allow=[nxdt-source]",
        )


def precision(case: Case, backend: NxdtBackend) -> Found:
    wanted = case.config.trainer.precision
    if wanted == "16-mixed":
        yield "trainer.precision=16-mixed: Trainium trains in bf16 or fp32", "use bf16-mixed"
    if backend.precision is not None and wanted != "bf16-mixed":
        yield (
            f"backend.precision={backend.precision} with trainer.precision={wanted}",
            "use trainer.precision=bf16-mixed",
        )
    if wanted.endswith("-mixed") and not backend.zero1:
        yield (
            f"backend.zero1=false with trainer.precision={wanted}: then NxDT keeps no fp32 master weights",
            "use backend.zero1=true",
        )


def schedule(case: Case, backend: NxdtBackend) -> Found:
    optim, max_steps = case.config.optim, case.config.trainer.max_steps
    if optim.sched.warmup_steps > max_steps:
        yield (
            f"optim.sched.warmup_steps={optim.sched.warmup_steps} is more than trainer.max_steps={max_steps}, so that "
            "optim.lr is never reached",
            "use fewer",
        )
    if optim.sched.name == "LinearAnnealingWithWarmUp" and optim.sched.min_lr > 0:
        yield (
            f"optim.sched.min_lr={optim.sched.min_lr:g}: NxDT's {optim.sched.name} ends at 0 and knows no other end",
            "use optim.sched.min_lr=0 or optim.sched.name=CosineAnnealing",
        )


def weight_decay(case: Case, backend: NxdtBackend) -> Found:
    if case.config.optim.weight_decay != _WEIGHT_DECAY:
        yield (
            f"optim.weight_decay={case.config.optim.weight_decay:g}, but NxDT always takes {_WEIGHT_DECAY}",
            f"use optim.weight_decay={_WEIGHT_DECAY}",
        )


def recompute(case: Case, backend: NxdtBackend) -> Found:
    if case.config.trainer.recompute != "selective":
        return
    named = backend.activations_checkpoint_recompute
    if not named:
        yield "trainer.recompute=selective, but backend.activations_checkpoint_recompute=[]", "name what, or use none"
    for unknown in (name for name in named if name not in _RECOMPUTED):
        yield (
            f"backend.activations_checkpoint_recompute: {unknown} is no class of NxDT's, which would drop it silently",
            f"use {', '.join(_RECOMPUTED)}",
        )

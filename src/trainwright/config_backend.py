"""The backend section: what trains, and the keys that only it knows, under its own names."""

from typing import Annotated, Literal

from pydantic import Field

from trainwright.config_types import Count, Directive, Duration, Section

BackendKind = Literal["native", "nemo", "nxdt"]


class NativeBackend(Section):
    kind: Literal["native"]
    base_image: Directive
    image: Directive | None  # None: on Vertex AI what `trainwright image` makes of base_image; else the bare host


class NemoOptim(Section):
    name: Literal["distributed_fused_adam", "fused_adam"]
    bucket_cap_mb: Count
    overlap_grad_sync: bool
    overlap_param_sync: bool
    grad_sync_dtype: Literal["bf16", "fp16"] | None  # None: fp32
    constant_steps: Annotated[int, Field(ge=0)]


class NemoNsysProfile(Section):
    enabled: bool
    trace: tuple[str, ...]
    start_step: Annotated[int, Field(ge=0)]
    end_step: Annotated[int, Field(ge=0)]
    ranks: tuple[Annotated[int, Field(ge=0)], ...]
    gen_shape: bool


class NemoBackend(Section):
    kind: Literal["nemo"]
    nemo_version: Literal["1.23", "2.7"]
    script: str
    base_image: Directive
    image: Directive | None  # None: what `trainwright image` makes of base_image
    data_cache_dir: str | None  # None: data is read where it is
    data_copy: Literal["mount", "rsync"]
    max_time: Duration | None  # None: no limit
    virtual_pipeline_model_parallel_size: Count | None  # None: stages are not cut
    overlap_p2p_comm: bool
    batch_p2p_comm: bool
    ub_tp_comm_overlap: bool
    activations_checkpoint_method: Literal["uniform", "block"]
    activations_checkpoint_num_layers: Count
    num_micro_batches_with_partial_activation_checkpoints: Count | None  # None: all alike
    activations_checkpoint_layers_per_pipeline: Count | None  # None: all stages alike
    grad_div_ar_fusion: bool
    gradient_accumulation_fusion: bool
    bias_activation_fusion: bool
    bias_dropout_add_fusion: bool
    masked_softmax_fusion: bool
    megatron_amp_O2: bool | None  # noqa: N815 (NeMo's spelling). None: where trainer.precision has 16 bits
    native_amp_init_scale: Count
    native_amp_growth_interval: Count
    hysteresis: Count
    transformer_engine: bool
    fp8: bool
    fp8_e4m3: bool
    fp8_hybrid: bool
    fp8_margin: int
    fp8_interval: Count
    fp8_amax_history_len: Count
    fp8_amax_compute_algo: Literal["max", "most_recent"]
    fp8_wgrad: bool
    optim: NemoOptim
    dataloader_type: Literal["single", "cyclic"]
    reset_position_ids: bool
    reset_attention_mask: bool
    eod_mask_loss: bool
    nsys_profile: NemoNsysProfile


class NxdtFusions(Section):
    softmax: bool
    flash_attention: bool


class NxdtBackend(Section):
    kind: Literal["nxdt"]
    python: str
    nxdt_dir: str
    model_dir: str
    pretrained_dir: str
    packing: bool
    dev_choose_samples: Count | None  # None: all
    precision: Literal["mixed_precision_sr", "autocast"] | None  # None: what trainer.precision says
    virtual_pipeline_model_parallel_size: Count
    zero1: bool
    fuse_qkv: bool
    transpose_nki_inputs: bool
    fusions: NxdtFusions
    activations_checkpoint_recompute: tuple[str, ...]
    log_parameter_norm: bool
    log_gradient_norm: bool
    use_master_weights_in_ckpt: bool
    compiler_flags: str
    compiler_cache_url: str
    async_exec_max_inflight_requests: Count
    bucket_size_collectives: Count
    neuron_rt_exec_timeout: Count
    neuron_experimental_compress_rg: bool
    max_open_files: Count
    reserved_port: Annotated[int, Field(ge=1, lt=2**16)] | None  # None: no fixed port, so none to keep free


Backend = Annotated[NativeBackend | NemoBackend | NxdtBackend, Field(discriminator="kind")]

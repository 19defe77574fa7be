"""Machines and accelerators of Vertex AI custom training, as data.

Sources: [code] google.cloud.aiplatform.v1, accelerator_type.proto; [doc] github.com/google/caliban,
caliban/platform/cloud/types.py, and cloud.google.com/compute/docs/accelerator-optimized-machines; [memory] not
looked up.
"""

# Compute capability * 10 by the API's name. [code] for the names, CUDA's table of GPUs for the numbers.
ACCELERATORS = {
    "NVIDIA_TESLA_K80": 37,
    "NVIDIA_TESLA_P100": 60,
    "NVIDIA_TESLA_P4": 61,
    "NVIDIA_TESLA_V100": 70,
    "NVIDIA_TESLA_T4": 75,
    "NVIDIA_TESLA_A100": 80,
    "NVIDIA_A100_80GB": 80,
    "NVIDIA_L4": 89,
    "NVIDIA_H100_80GB": 90,
    "NVIDIA_H100_MEGA_80GB": 90,
    "NVIDIA_H200_141GB": 90,
    "NVIDIA_B200": 100,
    "NVIDIA_GB200": 100,
    "NVIDIA_RTX_PRO_6000": 120,
}
_BFLOAT16 = 80

# Machine types that nothing can be attached to. [doc]
NO_ACCELERATOR = ("e2-", "n2-", "n2d-", "n4-", "c2-", "c2d-", "c3-", "c3d-", "c4-", "c4a-", "c4d-", "m1-", "m2-", "m3-")

_Counts = dict[str, tuple[int, ...]]  # how many of an accelerator
_T4, _P4, _P100, _V100 = "NVIDIA_TESLA_T4", "NVIDIA_TESLA_P4", "NVIDIA_TESLA_P100", "NVIDIA_TESLA_V100"
_SMALL: _Counts = {_T4: (1, 2, 4), _P4: (1, 2, 4), _P100: (1, 2, 4), _V100: (1, 2, 4, 8)}
_OF_16: _Counts = {_T4: (1, 2, 4), _P4: (1, 2, 4), _P100: (1, 2, 4), _V100: (2, 4, 8)}
_OF_32: _Counts = {_T4: (2, 4), _P4: (2, 4), _P100: (2, 4), _V100: (4, 8)}
_LARGE: _Counts = {_T4: (4,), _P4: (4,), _V100: (8,)}

# Accelerators that an N1 machine takes, and how many: more processors need more of them. [doc]
N1: dict[str, _Counts] = {
    **dict.fromkeys(("n1-standard-4", "n1-standard-8", "n1-highmem-2", "n1-highmem-4", "n1-highmem-8"), _SMALL),
    **dict.fromkeys(("n1-standard-16", "n1-highmem-16", "n1-highcpu-16"), _OF_16),
    **dict.fromkeys(("n1-standard-32", "n1-highmem-32", "n1-highcpu-32"), _OF_32),
    **dict.fromkeys(("n1-standard-64", "n1-highmem-64"), _LARGE),
    "n1-highcpu-64": {**_LARGE, _P100: (4,)},
    **dict.fromkeys(("n1-standard-96", "n1-highmem-96", "n1-highcpu-96"), _LARGE),
}

# What is built into a machine; the name says how many. [doc]
FIXED: dict[str, tuple[str, int]] = {
    **{f"g2-standard-{cores}": ("NVIDIA_L4", 1) for cores in (4, 8, 12, 16, 32)},
    **{f"g2-standard-{cores}": ("NVIDIA_L4", cores // 12) for cores in (24, 48, 96)},
    **{f"a2-highgpu-{count}g": ("NVIDIA_TESLA_A100", count) for count in (1, 2, 4, 8)},
    "a2-megagpu-16g": ("NVIDIA_TESLA_A100", 16),
    **{f"a2-ultragpu-{count}g": ("NVIDIA_A100_80GB", count) for count in (1, 2, 4, 8)},
    **{f"a3-highgpu-{count}g": ("NVIDIA_H100_80GB", count) for count in (1, 2, 4, 8)},
    "a3-megagpu-8g": ("NVIDIA_H100_MEGA_80GB", 8),
    "a3-ultragpu-8g": ("NVIDIA_H200_141GB", 8),
    "a4-highgpu-8g": ("NVIDIA_B200", 8),
    "a4x-highgpu-4g": ("NVIDIA_GB200", 4),
}
NEEDS_SPOT_OR_FLEX_START = ("a3-highgpu-1g", "a3-highgpu-2g", "a3-highgpu-4g")  # [memory]

# What flexible start brings. Source: cloud.google.com/vertex-ai/docs/training/schedule-jobs-dws, Requirements
FLEX_START = (
    "NVIDIA_L4",
    "NVIDIA_TESLA_A100",
    "NVIDIA_A100_80GB",
    "NVIDIA_H100_80GB",
    "NVIDIA_H100_MEGA_80GB",
    "NVIDIA_H200_141GB",
    "NVIDIA_B200",
)

# Regions where an accelerator is known to be, none of them sure: they come and go. [memory]
_REGIONS = {
    _T4: """
        us-central1 us-east1 us-east4 us-west1 us-west2 us-west4 northamerica-northeast1 southamerica-east1 europe-west1
        europe-west2 europe-west3 europe-west4 europe-central2 me-west1 asia-east1 asia-east2 asia-northeast1
        asia-northeast3 asia-south1 asia-southeast1 asia-southeast2 australia-southeast1""",
    "NVIDIA_L4": """
        us-central1 us-east1 us-east4 us-west1 us-west4 northamerica-northeast2 europe-west1 europe-west2 europe-west3
        europe-west4 europe-west6 me-central2 asia-east1 asia-northeast1 asia-northeast3 asia-south1 asia-southeast1""",
    "NVIDIA_TESLA_A100": """
        us-central1 us-east1 us-west1 us-west3 us-west4 europe-west4 me-west1 asia-northeast1 asia-northeast3
        asia-southeast1""",
    "NVIDIA_A100_80GB": "us-central1 us-east4 us-east5 us-east7 europe-west4 asia-southeast1",
    "NVIDIA_H100_80GB": """
        us-central1 us-east4 us-east5 us-east7 us-west1 us-west4 europe-west1 europe-west2 europe-west3 europe-west4
        europe-west9 asia-northeast1 asia-northeast3 asia-south1 asia-southeast1 australia-southeast1""",
}
REGIONS = {accelerator: frozenset(names.split()) for accelerator, names in _REGIONS.items()}


def has_bfloat16(accelerator: str | None) -> bool:
    """Return whether an accelerator computes in bfloat16; what is not in the table does."""
    return ACCELERATORS.get(accelerator or "", _BFLOAT16) >= _BFLOAT16

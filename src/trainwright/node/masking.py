"""What the environment tells of a cluster, for people to read: secrets are masked, whatever variable holds them."""

from __future__ import annotations

import re
from typing import Collection, Mapping

MASK = "***"
_SHORTEST = 4  # characters of a secret that is looked for inside other values; a shorter one would be found by chance

# Of a cluster, its devices and how they talk; all else that a shell holds is nobody's business.
_TOLD = re.compile(
    "TF_CONFIG|CLUSTER_SPEC|HOSTNAME|WORLD_SIZE|RANK|LOCAL_RANK|GROUP_RANK|LOCAL_WORLD_SIZE|NODE_RANK|NNODES|"
    "MASTER_.*|(CLOUD_ML|AIP|NCCL|TORCH|GLOO|UCX|FI|NVIDIA|CUDA|NVTE|OMP|SLURM|PMIX?|TRAINWRIGHT)_.*|LD_LIBRARY_PATH"
)
_SECRET_NAME = "TOKEN|JWT|API[_-]?KEY|ACCESS[_-]?KEY|PRIVATE[_-]?KEY|SECRET|PASSW|PASSPHRASE|CREDENTIAL|COOKIE"
_SECRET_VARIABLE = re.compile(f"{_SECRET_NAME}|(^|_)(KEY|PWD|AUTH|AUTHORIZATION)($|_)", re.IGNORECASE)
_QUOTE = r"""\\*["']?"""  # also of JSON that is a text inside JSON
_VALUE = r"""[^\s"'\\,;&}\]]+"""
_SECRETS = (
    # User and password of a URL.
    (r"(\b[a-z][a-z0-9+.-]*://)[^/\s\"'@]+@", rf"\1{MASK}@"),
    (r"\b((?:bearer|basic)\s+)[\w.~+/=-]{8,}", rf"\1{MASK}"),
    # api_key=..., "token": "...", --token=...
    (rf"([\w-]*(?:{_SECRET_NAME})[\w-]*{_QUOTE}\s*[=:]\s*{_QUOTE})(?!\*)(?!bearer |basic ){_VALUE}", rf"\1{MASK}"),
    # --token VALUE, as words or as a list of words.
    (rf"(--[\w-]*(?:{_SECRET_NAME})[\w-]*{_QUOTE},?\s+{_QUOTE})(?!-)(?!\*){_VALUE}", rf"\1{MASK}"),
    # By their looks: web tokens of Slurm and others; Hugging Face, GitHub, Slack, OpenAI, Google, AWS.
    (r"\beyJ[\w-]+\.[\w-]+\.[\w-]+", MASK),
    (r"\b(?:(?:hf|gh[opsur]|github_pat|xox[abp]|sk|ya29)[_.-]|AKIA|AIza)[\w.-]{12,}", MASK),
)
_PATTERNS = tuple((re.compile(pattern, re.IGNORECASE), replacement) for pattern, replacement in _SECRETS)


def cluster_variables(environ: Mapping[str, str], hidden: Collection[str] = ()) -> list[str]:
    """Return what the environment tells of the cluster, a line for each variable, without secrets.

    `hidden` are names of variables whose values are secrets (launcher.env_from): masked in other variables too.
    """
    values = [environ[name] for name in hidden if len(environ.get(name, "")) >= _SHORTEST]
    lines = []
    for name in sorted(environ):
        if not _TOLD.fullmatch(name):
            continue
        is_secret = name in hidden or _SECRET_VARIABLE.search(name)
        lines.append(f"{name}={MASK if is_secret else masked(environ[name], values)}")
    return lines


def masked(text: str, values: Collection[str] = ()) -> str:
    """Return `text` with each of `values`, and all that looks like a secret, masked."""
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, MASK)
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text

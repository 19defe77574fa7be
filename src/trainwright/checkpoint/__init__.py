"""Checkpoints between the formats of Hugging Face and NxD. The public functions: hf_to_nxd, nxd_to_hf, verify."""

from trainwright.checkpoint.convert import Report
from trainwright.checkpoint.hf_to_nxd import hf_to_nxd
from trainwright.checkpoint.nxd_to_hf import nxd_to_hf
from trainwright.checkpoint.verify import Verdict, verify

__all__ = ["Report", "Verdict", "hf_to_nxd", "nxd_to_hf", "verify"]

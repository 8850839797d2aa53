"""Our parts of OpenRLHF, one file for each part of OpenRLHF that they replace or extend."""

from openrlhf_bapo.openrlhf import cpu

cpu.register()  # first, because without CUDA the modules here could not import OpenRLHF

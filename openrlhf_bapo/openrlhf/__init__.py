"""Our parts in OpenRLHF's seams, one file per seam."""

from openrlhf_bapo.openrlhf import cpu

cpu.register()  # without CUDA, OpenRLHF could not even be imported by the modules here

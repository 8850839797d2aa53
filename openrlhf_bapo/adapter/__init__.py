"""OpenRLHF's seams, one file a seam; the only place that imports openrlhf."""

from openrlhf_bapo.adapter import cpu

cpu.register()  # without CUDA, OpenRLHF could not even be imported by the modules here

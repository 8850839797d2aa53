"""The method: torch, numpy, safetensors and the standard library only; knows no framework."""

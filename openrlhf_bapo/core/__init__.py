"""The method: torch, safetensors and the standard library only; knows no framework."""

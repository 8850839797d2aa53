"""The ideas: torch, safetensors and the standard library only; knows no OpenRLHF, Ray or vLLM."""

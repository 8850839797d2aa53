"""The ideas: torch and the standard library only; knows no OpenRLHF, Ray or vLLM."""

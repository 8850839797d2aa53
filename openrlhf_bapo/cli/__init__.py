"""The command line: thin over the adapter."""

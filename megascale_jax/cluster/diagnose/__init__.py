"""Checks of hosts, GPUs, NICs, compute and network; each outcome is a value, and so is the verdict over all nodes."""

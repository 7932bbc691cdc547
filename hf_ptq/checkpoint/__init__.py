"""Safetensors checkpoints: sources and their headers, lazy tensors, names, the layout and writing of files."""

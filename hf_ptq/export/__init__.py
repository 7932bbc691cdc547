"""The export: tensors, configuration files, side files, verification, and the way to the final path."""

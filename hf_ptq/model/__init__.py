"""The model: built without memory, filled unit by unit; its experts and attention as quantizers see them."""

"""What is quantized with what: recipes, number formats, quantizers, statistics, algorithms."""

"""A vision transformer trained on handwritten digits, with a checkpoint that is resumed by name half-way."""

"""Plans: the units of a model, where their bytes are, and what memory is spent on."""

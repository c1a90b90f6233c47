"""What is streamed: the units of a model, where their bytes are, what memory is spent on."""

"""What SGLang's adapters share."""

"""A state as it was at one moment: protected, copied, or on a device."""

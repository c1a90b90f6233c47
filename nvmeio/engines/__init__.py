"""Engines: what moves the bytes. Reading order: base (the contract), libaio, threads, select."""

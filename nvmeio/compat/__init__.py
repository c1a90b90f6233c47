"""Other libraries' interfaces over nvmeio's engine; nothing here is imported by `import nvmeio`."""

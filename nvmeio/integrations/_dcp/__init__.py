"""What `nvmeio.integrations.dcp` is made of: items, files, and reading them."""
